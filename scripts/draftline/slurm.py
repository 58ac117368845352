"""What a run under SLURM needs beside Snakemake's executor for it: no second writers after a kill, and options of sbatch.

The executor never finds the jobs of a killed Snakemake again, and a new one would submit them a second time. They are known
by their job name, which begins as profiles/slurm sets it, and by the folder that they work in.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from draftline.errors import DraftlineError

JOB_NAME = "draftline_"
"""How the names of our jobs begin: `slurm-jobname-prefix` of the profile, and the executor's underscore."""
LOCKS = Path(".snakemake/locks")
LOGS = Path("results/logs/slurm")
"""`slurm-logdir` of the profile. Where there is none, no job was submitted from this folder."""
BAD_NODES = Path("results/.resume/preflight/bad")
"""A file `{node}.json` for each node that a preflight found unfit."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
"""States in which a job has no node yet."""
WARNING_SECONDS = 180
"""How long before its time limit a training is told to save. SLURM may do so a minute earlier still."""
POLL_SECONDS = 10.0


@dataclass(frozen=True)
class Job:
    """A job of ours in the queue. `what` is the executor's comment: the rule and its wildcards."""

    id: str
    state: str
    what: str


def extra_options(rule: str, runtime: int) -> str:
    """Options of sbatch for a job of `rule` with a limit of `runtime` minutes: when to warn it, and nodes to keep it from."""
    options = []
    # A shorter limit leaves no time to go on after a warning; there SIGTERM comes with the limit itself.
    if rule == "train_segment" and runtime * 60 >= 10 * WARNING_SECONDS:
        options.append(f"--signal=TERM@{WARNING_SECONDS}")
    bad = sorted(path.stem for path in BAD_NODES.glob("*.json"))
    # Last, because the executor takes a node's name that ends in -e and what follows it for an option.
    if bad:
        options.append(f"--exclude={','.join(bad)}")
    return " ".join(options)


def settle(act: bool) -> None:
    """Before a run is planned: cancel what a killed run left in the queue here, and wait for what of it still works.

    Where Snakemake's lock stands, a run may be alive: then nothing is done, and Snakemake itself refuses or has nothing in
    common with it. Without `act` (a dry run) the jobs are only named.
    """
    if not LOGS.exists() or shutil.which("squeue") is None or any(LOCKS.glob("*.lock")):
        return
    jobs = leftovers(Path.cwd())
    if jobs and not act:
        _say(f"SLURM jobs of a killed run are still here: {_listed(jobs)}; a run would end or await them first")
        return
    queued = [job for job in jobs if job.state in WAITING]
    if queued:
        _say(f"cancelling queued SLURM jobs of a killed run: {_listed(queued)}")
        _slurm("scancel", *(job.id for job in queued))
    told: set[str] = set()
    while jobs := leftovers(Path.cwd()):
        if not {job.id for job in jobs} <= told:
            ids = " ".join(job.id for job in jobs)
            _say(f"waiting for SLURM jobs of a killed run: {_listed(jobs)}; to start them again instead: scancel {ids}")
        told |= {job.id for job in jobs}
        time.sleep(POLL_SECONDS)


def leftovers(folder: Path) -> list[Job]:
    """This user's unfinished jobs of ours that work in `folder`. Raises DraftlineError when SLURM does not answer."""
    found = []
    for line in _slurm("squeue", "--me", "--noheader", "--format=%i|%T|%j|%Z|%k").splitlines():
        job, state, name, place, what = line.split("|", 4)
        if name.startswith(JOB_NAME) and os.path.realpath(place) == os.path.realpath(folder):
            found.append(Job(job, state, what.removeprefix("rule_").replace("_wildcards_", " ")))
    return found


def _listed(jobs: list[Job]) -> str:
    return ", ".join(f"{job.id} ({job.what}, {job.state.lower()})" for job in jobs)


def _slurm(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except subprocess.TimeoutExpired:
        reason = "no answer in 60 s"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"status {error.returncode}"])[-1]
    raise DraftlineError(
        f"{command[0]}: {reason}, so jobs that a killed run left here cannot be seen; wait until SLURM answers, or, if"
        f" there can be none, remove {LOGS}"
    )


def _say(text: str) -> None:
    print(f"draftline: {text}", file=sys.stderr, flush=True)
