"""Config, wildcards, and the three kinds of input: artifacts, gates and settings.

Which job has to run is decided by draftline.staleness from the ids inside the artifacts. Snakemake is told so through its
inputs: those of a job with nothing to do are `ancient()`, and a settings file is newer than an artifact that it does not match.
"""

import gc
import json
import os
import shlex
import sys
from pathlib import Path

from snakemake.utils import validate

WORKFLOW = Path(workflow.basedir)
sys.path.insert(0, str(WORKFLOW / "scripts"))

from draftline import plan, slurm
from draftline.config import check_keys
from draftline.errors import DraftlineError

sys.path.remove(str(WORKFLOW / "scripts"))

# The graph's objects stay as long as the run: searching them for garbage as often as Python does takes a tenth of a dry run.
gc.set_threshold(200_000, 50, 50)

if workflow.is_main_process and not workflow.overwrite_configfiles:

    configfile: "config.yaml" if os.path.exists("config.yaml") else WORKFLOW / "config.yaml"


try:
    if workflow.is_main_process:
        for path in workflow.configfiles:
            check_keys(Path(path))
        slurm.settle(act=not workflow.output_settings.dryrun)
    config = plan.resolve(config, WORKFLOW, validate, main=workflow.is_main_process)
    CLUSTER = workflow.global_resources.get("_nodes").value is not None
    PLAN = plan.Plan(config, WORKFLOW, workflow.rules, main=workflow.is_main_process, cluster=CLUSTER)
    if workflow.is_main_process and not CLUSTER:
        PLAN.bound_gpus(workflow.global_resources)
except DraftlineError as error:
    sys.exit(f"draftline: {error}")

SHARDS = [f"{shard:04d}" for shard in range(config["shards"])]
PARTS = [f"{part:04d}" for part in range(config["hidden_states"]["parts_per_shard"])]
SEGMENTS = list(range(1, config["segments"] + 1))
MODELS = list(config["drafters"])
SETS = list(config["benches"])
BENCHMARKED = list(config["engine_benchmarks"])
THREADS = config["run"]["threads"]


wildcard_constraints:
    shard=r"\d+",
    part=r"\d+",
    segment=r"\d+",
    drafter="|".join(MODELS),
    bench="|".join(SETS),
    name="|".join(BENCHMARKED),
    baseline="untrained|unigram",


def artifact(*patterns):
    """Input artifacts by their patterns; `ancient` for a job that has nothing to do."""
    return PLAN.artifact(lambda wildcards: [pattern.format(**wildcards) for pattern in patterns])


def artifacts(paths):
    """Input artifacts by a function of the wildcards."""
    return PLAN.artifact(paths)


def gate(*patterns):
    """A gate that must have passed before a job starts. It decides whether work begins, never what comes out."""
    return PLAN.gate(lambda wildcards: [pattern.format(**wildcards) for pattern in patterns])


def settings(rule, per=None):
    """The settings file of a rule, of one drafter or bench where `per` names that wildcard."""
    return PLAN.settings(rule, per)


def command(rule, entry=None):
    """Command line of a rule's script, with the options that do not change its result, of one `entry` where they differ.

    It takes the place of its shell: a shell between would die of the SIGTERM upon which the command still saves its work.
    """
    options = json.dumps(PLAN.run_options(rule, entry))
    return shlex.join(["exec", sys.executable, str(WORKFLOW / "scripts" / f"{rule}.py"), "--run", options])


def needs(rule):
    """Resources of a rule: from `run` of the config, else the plan's estimates; more at another attempt."""
    return PLAN.needs(rule)


def on_submit_host(rule):
    """Whether a rule's jobs run beside Snakemake wherever others go."""
    return PLAN.on_submit_host(rule)


def previous_state(wildcards):
    """State of the segment before, none for the first."""
    before = int(wildcards.segment) - 1
    return [f"results/drafters/{wildcards.drafter}/segments/{before}/state.safetensors"] if before else []


def segment_parts(wildcards):
    """The parts of hidden states that a segment reads, in its order, each once."""
    visits = PLAN.segment_visits(wildcards.drafter, int(wildcards.segment))
    return list(dict.fromkeys(f"results/hidden_states/{shard}/{part}.safetensors" for _, shard, part in visits))
