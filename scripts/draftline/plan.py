"""What the Snakefile knows of a run: its config, each rule's settings, and which artifacts have to be made again.

The graph is taken from Snakemake's rules themselves: an input made by `Plan.artifact` tells its paths, so the rule that a
reader sees is the only place where an edge is written.
"""

import contextlib
import functools
import inspect
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from draftline import gpus, maintenance, slurm, sources
from draftline.config import benchmark, check, check_benchmarks, check_schema
from draftline.engines import sglang_flags
from draftline.errors import DraftlineError
from draftline.fingerprint import fingerprint
from draftline.packages import OFFLINE
from draftline.provenance import canonical, digest
from draftline.settings import ROOT, RUN_FILE, cut, settings_hash, write
from draftline.staleness import Node, Staleness
from draftline.storage import of_bench
from draftline.visits import segment_visits

STALE = Path("results/.resume/stale.json")

KEYS: dict[str, list[str]] = {
    "target": ["target"],
    "bench_prompts": ["benches.{bench}"],
    "prompts": ["prompts", "shards"],
    "canary": ["canary", "completions", "tokens", "mask_gate"],
    "completions": ["completions"],
    "engine_benchmark": [f"completions.{key}" for key in ("max_new_tokens", "extend", "sampling", "seed", "thinking")],
    "bench_completions": ["evaluate.max_new_tokens", "evaluate.thinking", "completions.loop"],
    "tokens": ["tokens"],
    "mask_gate_shard": ["mask_gate", "hidden_states.storage"],
    "mask_stats": [],
    "mask_gate": ["mask_gate"],
    "hidden_states": ["hidden_states"],
    "hidden_states_gate": ["hidden_states_gate"],
    "bench_hidden_states": ["hidden_states.layers", "hidden_states.storage"],
    "train_segment": ["drafters.{drafter}", "segments", "shards", "hidden_states.parts_per_shard"],
    "keep_checkpoint": [],
    "export": ["target.chat_template"],
    "export_gate": [],
    "evaluate": ["evaluate"],
    "evaluate_baseline": ["evaluate"],
    "report": [],
}
"""The config keys that make each rule's artifacts. A gate's keys are its own: gates decide when work starts, not what it gives."""

RESOURCES: dict[str, dict[str, int]] = {
    "light": {"gpus": 0, "mem_mb": 2000, "runtime": 60, "disk_mb": 1000},
    "completions": {"gpus": 1, "mem_mb": 8000, "runtime": 1440, "disk_mb": 4000},
    "hidden_states": {"gpus": 1, "mem_mb": 8000, "runtime": 720, "disk_mb": 100000},
    "train_segment": {"gpus": 1, "mem_mb": 12000, "runtime": 1440, "disk_mb": 100000},
    "evaluate": {"gpus": 1, "mem_mb": 8000, "runtime": 240, "disk_mb": 1000},
    "export": {"gpus": 0, "mem_mb": 4000, "runtime": 60, "disk_mb": 4000},
}
KIND_OF_WORK = {
    "canary": "completions",
    "completions": "completions",
    "bench_completions": "completions",
    "engine_benchmark": "completions",
    "hidden_states": "hidden_states",
    "hidden_states_gate": "hidden_states",
    "bench_hidden_states": "hidden_states",
    "train_segment": "train_segment",
    "evaluate": "evaluate",
    "evaluate_baseline": "evaluate",
    "export": "export",
    "export_gate": "export",
    "keep_checkpoint": "export",
}
"""Rules that share `run.{kind}` of the config; all others are light."""
NO_GPU_ENGINES = ("openai", "dataset")
"""Engines that answer without a model in the job."""
MEASURED = {
    "transformers": (),
    "openai": ("endpoints", "allow_retokenize", "tokens"),
    "sglang": ("python", "tensor_parallel", "data_parallel", "memory_fraction", "flags", "tokens"),
}
"""Keys of section `engine` that a benchmark of an engine measures."""
GROWING = ("mem_mb", "runtime")
"""Resources of which another attempt gets more."""
DOWNLOADS = ("target", "bench_prompts")
"""Rules that may fetch from the network, which compute nodes often lack."""


def resolve(config: dict[str, Any], workflow: Path, validate: Callable[..., None], main: bool) -> dict[str, Any]:
    """The config with defaults, checked. A job of a running workflow takes the one that its main process resolved."""
    if not main:
        return dict(planned()["config"])
    path = workflow / "schemas" / "config.schema.yaml"
    schema = yaml.safe_load(path.read_text(encoding="utf-8"))
    check_schema(config, schema)
    check_benchmarks(config, schema)
    validate(config, str(path))
    check(config)
    return config


def planned() -> dict[str, Any]:
    """The run file, as a job gets it from its main process: `config`, and `settings` by `settings_name`."""
    try:
        return dict(json.loads(Path(os.environ[RUN_FILE]).read_text(encoding="utf-8")))
    except KeyError:
        raise DraftlineError(
            f"{RUN_FILE}: not in this job's environment, so it cannot know what was planned; have the cluster pass the"
            " environment of the submit host on (sbatch --export=ALL)"
        ) from None
    except (OSError, ValueError) as error:
        raise DraftlineError(f"{os.environ[RUN_FILE]}: cannot be read ({error}); start the run again") from None


def settings_name(rule: str, entry: str | None) -> str:
    """Folder of a rule's settings files below results/settings/; `entry` is the drafter or bench that they are for."""
    return f"{rule}.{entry}" if entry else rule


SIGNATURE = inspect.signature(lambda wildcards: None)


def kind_of_work(rule: str) -> str:
    """The key of section `run` that says what a rule's jobs need."""
    return KIND_OF_WORK.get(rule, "light")


def may_use_gpus(rule: str) -> bool:
    """Whether a rule's jobs compute on GPUs where the config has them do so."""
    return RESOURCES[kind_of_work(rule)]["gpus"] > 0


class Wildcards(dict):  # type: ignore[type-arg]
    """Wildcards of a path, by attribute as in Snakemake's input functions."""

    __getattr__ = dict.__getitem__


class Maker(NamedTuple):
    """An output of a rule: what its paths begin with, and whether more follows that only its `output` pattern can tell."""

    rule: Any
    output: Any
    start: str
    pattern: bool
    temporary: bool

    @classmethod
    def of(cls, rule: Any, output: Any) -> "Maker":
        from snakemake.io import is_flagged

        start, brace, _ = str(output).partition("{")
        return cls(rule, output, start, bool(brace), is_flagged(output, "temp"))


class Plan:
    """Settings, staleness and resources of one run, for the functions in rules/common.smk."""

    def __init__(
        self, config: dict[str, Any], workflow: Path, rules: Iterable[Any], main: bool, cluster: bool = False
    ) -> None:
        self.config, self.workflow, self.rules, self.main, self.cluster = config, workflow, rules, main, cluster
        self.staleness = Staleness(self.node)
        self._values: dict[tuple[str, str | None], dict[str, Any]] = {}
        self._written: dict[str, str] = {} if main else planned()["settings"]
        self._nodes: dict[str, Node] = {}
        self._hashes: dict[tuple[str, str | None], str] = {}
        self._first: dict[int, str] = {}
        self.root = self._settings_root() if main else Path(ROOT)
        if main:
            maintenance.remind()
        else:
            os.environ[OFFLINE] = "1"

    @staticmethod
    def _settings_root() -> Path:
        """Where settings are written: elsewhere when results/ is read-only."""
        root = Path(ROOT)
        try:
            root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=root).close()
        except OSError:
            print("results/: not writable; a dry run (-n) works, anything else will not", file=sys.stderr)
            root = Path(tempfile.gettempdir()) / f"draftline-{os.getuid()}" / digest(os.getcwd()) / "settings"
        return root

    def _store_run(self) -> None:
        """Freeze config and settings for the jobs of this run, which may start when both have changed."""
        config = self.config
        entries = {
            None: [None],
            "drafter": config["drafters"],
            "bench": config["benches"],
            "name": config["engine_benchmarks"],
        }
        for rule in self.rules:
            for name, per in (item.of for item in rule.input if getattr(item, "kind", None) == "settings"):
                for entry in entries[per]:
                    self._write(name, entry)
        path = write({"config": self.config, "settings": self._written}, self.root / "run")
        with contextlib.suppress(OSError):
            os.utime(path)  # The youngest is the last run's, also where one like it was before.
        os.environ[RUN_FILE] = str(path.resolve())

    # Settings ---------------------------------------------------------------------------------------------------------

    def values(self, rule: str, entry: str | None) -> dict[str, Any]:
        """Content of a rule's settings file; `entry` is the drafter or bench that it is for."""
        known = self._values.get((rule, entry))
        if known is None:
            keys = [key.format(drafter=entry, bench=entry) for key in KEYS[rule]]
            part = cut(self.config, keys)
            self._derive(rule, part, entry)
            known = {"rule": rule, "config": part, "code": fingerprint(rule)}
            found = self._sources(rule, entry)
            if found:
                known["sources"] = found
            self._values[rule, entry] = known
        return known

    def _hash(self, rule: str, entry: str | None) -> str:
        """Name of a rule's settings file."""
        if (rule, entry) not in self._hashes:
            self._hashes[rule, entry] = settings_hash(self.values(rule, entry))
        return self._hashes[rule, entry]

    def _derive(self, rule: str, part: dict[str, Any], entry: str | None) -> None:
        """Keys that follow from others, and keys that do not change this rule's result taken out."""
        config, layers = self.config, self.config["hidden_states"]["layers"]
        drafters = config["drafters"]
        if rule in ("canary", "mask_gate_shard", "mask_gate"):
            part["block_size"] = max(drafter["block_size"] for drafter in drafters.values())
        if rule == "mask_gate_shard":
            part["tapped_layers"] = layers if isinstance(layers, int) else len(layers)
        if rule == "target":
            del part["target"]["stage_to"]
        if rule == "bench_hidden_states":
            part["hidden_states"]["storage"] = of_bench(part["hidden_states"]["storage"])
        if rule == "bench_completions":
            part["engine"] = self._asked(rule)[0]
        makes = rule in ("canary", "completions", "bench_completions")
        if makes and self._asked(rule)[0] == "openai" and config["engine"]["allow_retokenize"]:
            part["completions"]["allow_retokenize"] = True
        if rule in ("canary", "tokens") and config["completions"]["engine"] != "dataset":
            del part["tokens"]["turns"]
        if rule == "train_segment":
            del part["drafters"][entry]["checkpoints"]
        if rule == "evaluate_baseline":
            del part["evaluate"]["allow_kernel_mismatch"]
            name = next(iter(drafters))
            shape = ("layers", "block_size", "heads", "kv_heads", "head_dim", "intermediate_size", "rope_theta",
                     "max_position_embeddings", "sliding_window", "layer_types", "seed")  # fmt: skip
            part["drafter"] = {key: drafters[name][key] for key in shape}
        if rule == "engine_benchmark":
            measured = benchmark(config, str(entry))
            settings = {key: measured["settings"][key] for key in MEASURED[measured["engine"]]}
            part["benchmark"] = {**measured, "settings": settings}
        if rule == "report":
            outside = ("run", "maintenance", "engine", "engine_benchmarks")
            part.update({key: value for key, value in config.items() if key not in outside})
            part["target"] = {key: value for key, value in config["target"].items() if key != "stage_to"}

    def _sources(self, rule: str, entry: str | None) -> dict[str, str]:
        cache = sources.DIGESTS
        if rule == "target":
            return sources.target(self.config["target"], self.workflow, cache)
        if rule == "prompts":
            return sources.prompts(self.config["prompts"]["sources"], self.workflow, cache)
        if rule == "bench_prompts":
            return sources.bench(self.config["benches"][entry], self.workflow, cache)
        return {}

    def settings(self, rule: str, per: str | None) -> Callable[[Any], Any]:
        """Input function for a rule's settings file: newer than the job's output exactly when that must be made again."""
        from snakemake.io import ancient

        def function(wildcards: Any) -> Any:
            entry = wildcards[per] if per else None
            if not self.main:
                return ancient(self._written[settings_name(rule, entry)])
            path = self._write(rule, entry)
            output = self._output_of(function, wildcards)
            if not self.staleness.outdated(output):
                return ancient(path)
            os.utime(path)
            return path

        return _mark(function, "settings", of=(rule, per))

    def _write(self, rule: str, entry: str | None) -> str:
        name = settings_name(rule, entry)
        if name not in self._written:
            self._written[name] = str(write(self.values(rule, entry), self.root / name))
        return self._written[name]

    # Edges ------------------------------------------------------------------------------------------------------------

    def artifact(self, paths: Callable[[Any], list[str]]) -> Callable[[Any], Any]:
        """Input function for artifacts: `ancient` for a job that has nothing to do, plain for one that has.

        Plain whatever the artifact's own state: Snakemake asks no job behind one that will run (for an output that it holds
        for incomplete, say) for reasons of its own, it trusts in the edge.
        """
        from snakemake.io import ancient

        def function(wildcards: Any) -> Any:
            found = paths(wildcards)
            if not self.main or self.staleness.pending(self._output_of(function, wildcards)):
                return found
            return [ancient(path) for path in found]

        return _mark(function, "artifact", paths=paths)

    def gate(self, paths: Callable[[Any], list[str]]) -> Callable[[Any], Any]:
        """Input function for gates: awaited by a job that has work to do, and never a reason to do it."""

        def function(wildcards: Any) -> Any:
            if self.main and not self.staleness.pending(self._output_of(function, wildcards)):
                return []
            return paths(wildcards)

        return _mark(function, "gate")

    def _output_of(self, function: Any, wildcards: Any) -> str:
        """First output of the job that `function` is an input of."""
        if id(function) not in self._first:
            for rule in self.rules:
                for item in rule.input:
                    self._first[id(item)] = _plain(rule.output[0]) if len(rule.output) else ""
        return self._first[id(function)].format(**wildcards)

    def node(self, path: str) -> Node:
        """The job that makes an artifact, from Snakemake's rules. Files of one job share it."""
        if path not in self._nodes:
            node = self._describe(*self._maker(path))
            self._nodes |= dict.fromkeys((path,) if node.temporary else node.kept, node)
        return self._nodes[path]

    def _maker(self, path: str) -> tuple["Maker", Wildcards]:
        """The output that a path is, one that is kept before a temporary one, and its wildcards."""
        fixed, patterns = self._makers
        if path in fixed:
            return fixed[path], Wildcards()
        for maker in patterns:
            if path.startswith(maker.start) and (match := maker.output.match(path)):
                return maker, Wildcards(match.groupdict())
        raise DraftlineError(f"{path}: no rule makes it; the artifacts are listed in docs/artifacts.md")

    @functools.cached_property
    def _makers(self) -> tuple[dict[str, "Maker"], list["Maker"]]:
        """Outputs without wildcards by their path, and the others; the kept ones come first."""
        makers = [Maker.of(rule, output) for rule in self.rules for output in rule.output]
        makers.sort(key=lambda maker: maker.temporary)
        fixed = {maker.start: maker for maker in reversed(makers) if not maker.pattern}
        return fixed, [maker for maker in makers if maker.pattern]

    def _describe(self, maker: "Maker", wildcards: Wildcards) -> Node:
        from snakemake.io import is_flagged

        outputs = maker.rule.output
        functions = [item for item in maker.rule.input if hasattr(item, "kind")]
        (name, per) = next(item.of for item in functions if item.kind == "settings")
        # One string for each path, however many nodes name it: with fifty thousand jobs copies take their share of memory.
        return Node(
            rule=name,
            first=sys.intern(_plain(outputs[0]).format(**wildcards)),
            settings=self._hash(name, wildcards[per] if per else None),
            inputs=tuple(sys.intern(p) for item in functions if item.kind == "artifact" for p in item.paths(wildcards)),
            temporary=maker.temporary,
            kept=tuple(sys.intern(_plain(o).format(**wildcards)) for o in outputs if not is_flagged(o, "temp")),
        )

    # How to run -------------------------------------------------------------------------------------------------------

    def run_options(self, rule: str, entry: str | None = None) -> dict[str, Any]:
        """Options of a rule that do not change its result: device, how many GPUs it must be given, limits of the preflight, batch size.

        `entry` is the engine benchmark that they are for.
        """
        kind = kind_of_work(rule)
        options: dict[str, Any] = {"device": self._device(rule, entry)}
        if options["device"] == "cuda":
            options |= {"gpus": self.resource(rule, "gpus", entry=entry), "preflight": self.config["run"]["preflight"]}
        if "batch" in self.config["run"][kind]:
            options["batch"] = self.config["run"][kind]["batch"]
        if kind == "completions":
            options["engine"] = self._asked(rule, entry)[1]
        if kind in ("completions", "hidden_states") and self.config["target"]["stage_to"]:
            options["stage_to"] = self.config["target"]["stage_to"]
        return options

    def _asked(self, rule: str, entry: str | None = None) -> tuple[str, dict[str, Any]]:
        """The engine that a rule's jobs ask, and section `engine` as it is for them.

        An evaluation set is answered by the target, whatever a data set holds; a benchmark has an engine of its own.
        """
        if rule == "engine_benchmark" and entry is not None:
            measured = benchmark(self.config, entry)
            return measured["engine"], measured["settings"]
        engine = str(self.config["completions"]["engine"])
        return "transformers" if engine == "dataset" and rule == "bench_completions" else engine, self.config["engine"]

    def _device(self, rule: str, entry: str | None = None) -> str:
        """``cpu``, or ``cuda`` where a job of the rule works with a model on a GPU. The canary looks at hidden states."""
        answers = kind_of_work(rule) == "completions" and rule != "canary"
        without = not may_use_gpus(rule) or (answers and self._asked(rule, entry)[0] in NO_GPU_ENGINES)
        return "cpu" if without else str(self.config["run"]["device"])

    def resource(self, rule: str, name: str, attempt: int = 1, entry: str | None = None) -> int:
        """A resource from `run.{kind}` of the config, or its default; no GPU when the device is the CPU.

        Memory (`mem_mb`) and time (`runtime`, minutes) grow with the attempt, up to `run.limits`: SLURM lets a job that asks
        for more time than its partition allows wait for ever. The first attempt gets what it asks for.
        """
        kind, run = kind_of_work(rule), self.config["run"]
        if name == "gpus" and self._device(rule, entry) == "cpu":
            return 0
        if name == "gpus" and kind == "completions":
            engine, settings = self._asked(rule, entry)
            if engine == "sglang":
                return sglang_flags.gpus(settings)
        amount = int(run[kind].get(name, RESOURCES[kind][name]))
        return max(amount, min(amount * attempt, int(run["limits"].get(name, amount * attempt))))

    def needs(self, rule: str) -> dict[str, Any]:
        """A rule's resources as Snakemake takes them: on a cluster functions of the attempt where they grow with it.

        Only rules that may compute on a GPU have `gpu`, and only on a cluster there is `slurm_extra`: each resource costs time
        in a dry run of ten thousand jobs.
        """
        amounts: dict[str, Any] = {name: self.resource(rule, name) for name in ("mem_mb", "runtime", "disk_mb")}
        if rule == "engine_benchmark":
            amounts["gpu"] = lambda wildcards: self.resource(rule, "gpus", entry=wildcards.name)
        elif may_use_gpus(rule):
            amounts["gpu"] = self.resource(rule, "gpus")
        if self.cluster:
            amounts |= {name: self._growing(rule, name) for name in GROWING}
            if may_use_gpus(rule):
                amounts["slurm_extra"] = lambda wildcards, attempt: slurm.extra_options(
                    rule, self.resource(rule, "runtime", attempt)
                )
        return amounts

    def _growing(self, rule: str, name: str) -> Callable[..., int]:
        return lambda wildcards, attempt: self.resource(rule, name, attempt)

    def on_submit_host(self, rule: str) -> bool:
        """Whether the jobs of a light rule run beside Snakemake instead of going to a cluster."""
        return rule in DOWNLOADS or self.config["run"]["light"]["where"] == "submit_host"

    def bound_gpus(self, resources: Any) -> None:
        """Lower the limit on GPUs that jobs hold together to those free here, and say what the limit means for this run.

        `resources` are Snakemake's, of a run whose jobs work on this machine: the limit is its `gpu`. It stays at one at least,
        because a job names who holds the GPUs.
        """
        limit = resources.get("gpu").value
        if self.config["run"]["device"] == "cpu":
            if limit:
                _tell("run.device is cpu, so no job will use a GPU; set run: {device: cuda} in the config to use them")
            return
        if limit and (free := _free_gpus()) is not None:
            limit = min(limit, max(free, 1))
            resources.update({"gpu": limit})
        needs = {kind: self.resource(kind, "gpus") for kind in sorted(set(KIND_OF_WORK.values()))}
        for name in self.config["engine_benchmarks"]:
            needs[f"engine_benchmark {name}"] = self.resource("engine_benchmark", "gpus", entry=name)
        most = max(needs, key=lambda kind: needs[kind])
        if limit is not None and needs[most] > limit:
            _tell(
                f"run.device is cuda, a job of {most} needs gpu={needs[most]}, and jobs may hold gpu={limit} together "
                "(resources); it will refuse to start: run with --workflow-profile profiles/local-gpu"
            )

    def segment_visits(self, drafter: str, segment: int) -> list[tuple[int, str, str]]:
        """(epoch, shard, part) visits of a training segment."""
        config = self.config
        return segment_visits(
            config["shards"],
            config["hidden_states"]["parts_per_shard"],
            config["drafters"][drafter]["epochs"],
            config["segments"],
            segment,
        )

    # What is stale ----------------------------------------------------------------------------------------------------

    def announce(self, paths: Iterable[str]) -> None:
        """Say on the terminal which existing artifacts will be made again, why, and what that costs.

        The foreign ones are listed in results/.resume/stale.json with the id that they would get, for scripts/accept.py.
        """
        if not self.main:
            return
        self._store_run()
        again: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            if os.path.exists(path) and self.staleness.pending(path):
                again[self.node(path).rule].append(path)
        for rule in sorted(again, key=list(KEYS).index):  # What others follow from comes first.
            found = again[rule]
            seconds = sum({log: self._seconds(log) for path in found if (log := self._run_record(path))}.values())
            gpus = self.resource(rule, "gpus")
            cost = (
                f"{seconds / 3600 * max(gpus, 1):.2g} {'GPU' if gpus else 'CPU'}-hours last time"
                if seconds
                else "time unknown"
            )
            reason = next((why for path in found if (why := self._why(path))), "something that it is made from")
            print(f"stale: {rule}: {len(found)} files to be made again ({cost}) because of {reason}", file=sys.stderr)
        stale = {
            path: {"id": self.staleness.due(path), "settings": self.node(path).settings}
            for found in again.values()
            for path in found
            if self.staleness.foreign(path)
        }
        with contextlib.suppress(OSError):
            STALE.parent.mkdir(parents=True, exist_ok=True)
            STALE.write_text(json.dumps(stale, indent=1), encoding="utf-8")

    def _run_record(self, path: str) -> Path | None:
        """Where the last job that made `path` noted its time."""
        maker, wildcards = self._maker(path)
        log = Path(_plain(maker.rule.log[0]).format(**wildcards)).with_suffix(".run.json")
        return log if log.exists() else None

    @staticmethod
    def _seconds(log: Path) -> float:
        try:
            return float(json.loads(log.read_text())["seconds"])
        except (OSError, ValueError, KeyError):
            return 0.0

    def _why(self, path: str) -> str | None:
        """What changed in the settings of an artifact, by comparing its settings file with the one it would get."""
        node, record = self.node(path), self.staleness.record(path)
        if record.get("settings") in (None, node.settings):
            return None
        file = next((n for n in Path(ROOT).glob(f"*/{record['settings']}.json")), None)
        if file is None:
            return "other settings"
        old = json.loads(file.read_text(encoding="utf-8"))
        (rule, entry) = next(key for key, name in self._hashes.items() if name == node.settings)
        return "; ".join(_differences(old, self._values[rule, entry])) or "other settings"


def _free_gpus() -> int | None:
    """How many GPUs of this machine a job could take now; None where no driver answers. Says so, and who holds the others."""
    try:
        free, reasons = gpus.free()
    except DraftlineError as error:
        _tell(f"{error}. GPU jobs will refuse to start")
        return None
    _tell("; ".join([f"{len(free)} of {len(free) + len(reasons)} GPUs here are free", *reasons]))
    return len(free)


def _tell(text: str) -> None:
    print(f"draftline: {text}", file=sys.stderr)


def _mark(function: Any, kind: str, **facts: Any) -> Callable[[Any], Any]:
    """An input function with its kind. Its signature is said outright: Snakemake derives it several times a job."""
    function.__dict__.update(kind=kind, __signature__=SIGNATURE, **facts)
    return function  # type: ignore[no-any-return]


@functools.cache
def _plain(pattern: Any) -> str:
    """An output pattern without its wildcards' constraints."""
    return re.sub(r"\{(\w+),[^}]*\}", r"{\1}", str(pattern))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        name = f"{prefix}{key}"
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += _differences(before, after, "" if name == "config" else f"{name}.")
        elif name == "code":
            lines.append("its code")
        else:
            lines.append(f"{name}: {canonical(before).decode()} -> {canonical(after).decode()}")
    return lines
