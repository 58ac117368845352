"""What all commands share: options, settings, log, the record of what they make, and errors in one or two lines.

A command is a file in scripts/ named after its rule. It declares its inputs and outputs and gives a function of a `Job`::

    command = Command("tokens", __doc__)
    command.input("completions")
    command.output("output")

    def work(job: Job) -> None:
        from draftline.tokens import make_tokens
        make_tokens(...)

    if __name__ == "__main__":
        command.run(work)

Imports of heavy libraries stand inside `work`, so that ``--help`` and bad options answer at once.
"""

import argparse
import errno
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from draftline import progress, provenance
from draftline.errors import DraftlineError
from draftline.fingerprint import SCRIPTS, fingerprint
from draftline.settings import load, settings_hash
from draftline.writing import claim

log = logging.getLogger("draftline")

MEMORY = {
    **dict.fromkeys(("canary", "completions", "bench_completions", "engine_benchmark"), "run.completions.batch"),
    **dict.fromkeys(("hidden_states", "hidden_states_gate", "bench_hidden_states"), "run.hidden_states.batch"),
    **dict.fromkeys(("evaluate", "evaluate_baseline"), "run.evaluate.batch"),
    "train_segment": "the drafter's anchors",
}
"""What of the config decides on a job's memory besides the models' sizes."""


@dataclass(frozen=True)
class Job:
    """One run of a command.

    `config` is the part of the config that makes the artifact, in config's own nesting; `run` holds options that do not
    (device, batch sizes); `paths` the values of the input, output and plain options; `record` goes into each output;
    `sources` identifies the files that come from outside (`draftline.sources`), as the run was planned with them.
    """

    rule: str
    config: dict[str, Any]
    run: dict[str, Any]
    paths: dict[str, Any]
    record: provenance.Record
    threads: int
    gpus: int
    sources: dict[str, str] = field(default_factory=dict)

    def check_sources(self, found: dict[str, str]) -> None:
        """Raise DraftlineError when a source file, as read, is not the one that the record will name."""
        for name in sorted({*self.sources, *found}):
            if found.get(name) != self.sources.get(name):
                raise DraftlineError(f"{name}: this file changed after the run was planned; start the run again")

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["paths"][name]
        except KeyError:
            raise AttributeError(name) from None


class Command:
    """Command line of one rule. Options: one per input and output, ``--settings``, ``--run``, ``--threads``, ``--log``."""

    def __init__(self, rule: str, description: str) -> None:
        self.rule = rule
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._parser = argparse.ArgumentParser(
            prog=f"scripts/{rule}.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add = self._parser.add_argument
        add("--settings", required=True, metavar="FILE", help="settings file of the rule, below results/settings/")
        add("--run", type=json.loads, default={}, metavar="JSON", help="options that do not change the result")
        add("--threads", type=int, default=os.cpu_count(), metavar="N", help="CPU threads to use")
        add("--gpus", type=int, default=0, metavar="N", help="GPUs that the scheduler gave")
        add("--log", metavar="FILE", help="file that takes all output; progress and errors are shown as well")

    def input(self, name: str, many: bool = False, help: str | None = None) -> None:
        """An artifact that the command reads, as ``--{name}`` (several with `many`)."""
        self._inputs.append(name)
        self._file(name, many, help)

    def output(self, name: str, many: bool = False, help: str | None = None) -> None:
        """An artifact that the command writes. The first one declared names the job in the record."""
        self._outputs.append(name)
        self._file(name, many, help)

    def _file(self, name: str, many: bool, help: str | None) -> None:
        self.option(name, required=True, nargs="*" if many else None, metavar="FILE", help=help)

    def option(self, name: str, **how: Any) -> None:
        """A plain option (a wildcard of the rule, say)."""
        self._parser.add_argument(f"--{name.replace('_', '-')}", dest=name, **how)

    def run(self, work: Callable[[Job], None], arguments: list[str] | None = None) -> NoReturn:
        """Parse, check, work, and exit: 0, or 1 with the reason in one or two lines."""
        options = vars(self._parser.parse_args(arguments))
        try:
            lock = claim(_listed(options[self._outputs[0]])[0])
        except DraftlineError as error:
            _fail(None, f"{self.rule}: {error}")
        except OSError as error:
            _fail(None, f"{self.rule}: {_system_error(error)}")
        with lock:  # Before the log is opened: a second writer must not empty the first one's.
            self._run(work, options)

    def _run(self, work: Callable[[Job], None], options: dict[str, Any]) -> NoReturn:
        log_path = options.pop("log")
        options["run"] = {**options["run"], "log": log_path}  # A server that the job starts has its log beside.
        terminal = _open_log(log_path)
        started = time.time()
        try:
            job = self._job(options)
            _prepare(job)
            if job.run.get("device") == "cuda":
                from draftline import gpus, preflight

                output, wanted = _listed(job.paths[self._outputs[0]])[0], job.run.get("gpus", 1)
                gpus.lease(wanted, job.gpus, job.rule, output)
                if wanted and "preflight" in job.run:
                    preflight.ensure(job.run["preflight"], job.paths.get("manifest"))
            work(job)
            if log_path:
                _write_run_record(job, log_path, started)
        except DraftlineError as error:
            _fail(terminal, f"{self.rule}: {error}")
        except OSError as error:
            _fail(terminal, f"{self.rule}: {_system_error(error)}")
        except Exception as error:  # noqa: BLE001 - a defect of ours: the trace belongs in the log, not in the user's way
            traceback.print_exc()
            if remedy := _more_memory(error):
                less = f", or lower {MEMORY[self.rule]}" if self.rule in MEMORY else ""
                _fail(terminal, f"{self.rule}: out of memory; give the job {remedy}{less}")
            where = f"; the trace is in {log_path}" if log_path else ""
            _fail(terminal, f"{self.rule}: internal error, {type(error).__name__}: {error}{where}")
        sys.stdout.flush()
        sys.exit(0)

    def _job(self, options: dict[str, Any]) -> Job:
        settings = load(options.pop("settings"))
        if settings["rule"] != self.rule:
            raise DraftlineError(
                f"--settings: is for rule {settings['rule']}, not {self.rule}; pass {self.rule}'s file"
            )
        if settings["code"] != fingerprint(self.rule):
            raise DraftlineError(
                f"scripts/: the code of {self.rule} changed after this run was planned; start the run again"
            )
        run, threads, gpus = (options.pop(name) for name in ("run", "threads", "gpus"))
        inputs = {path: provenance.read(path)["id"] for name in self._inputs for path in _listed(options[name])}
        first = _listed(options[self._outputs[0]])[0]
        settings_id = settings_hash(settings)
        record = {
            "rule": self.rule,
            "id": provenance.identity(first, settings_id, inputs),
            "settings": settings_id,
            "inputs": inputs,
        }
        sources = settings.get("sources", {})
        return Job(self.rule, settings["config"], run, options, record, threads, gpus, sources)


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _prepare(job: Job) -> None:
    """Threads for the libraries not yet imported, and a SIGTERM that lets files be cleaned up."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(job.threads)
    # Threads that spin while they wait make a shared machine many times slower than threads that sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A module named like a rule (scripts/evaluate.py) must not be taken for a library of that name.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != str(SCRIPTS)]


def _open_log(path: str | None) -> Any:
    """Send standard output and error to `path`; the terminal as it was comes back, for progress and errors."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    if path is None:
        return None
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    progress.terminal = terminal
    return terminal


def _write_run_record(job: Job, log_path: str, started: float) -> None:
    """What ran where and how long, beside the log, for the report: facts that an artifact must not hold."""
    facts = {
        "rule": job.rule,
        "id": job.record["id"],
        "host": socket.gethostname(),
        "device": job.run.get("device", "cpu"),
        "threads": job.threads,
        "gpus": job.gpus,
        "started": started,
        "seconds": time.time() - started,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    with open(os.path.splitext(log_path)[0] + ".run.json", "w", encoding="utf-8") as file:
        json.dump(facts, file)


def _fail(terminal: Any, message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    if terminal is not None:
        print(message, file=terminal, flush=True)
    sys.exit(1)


def _more_memory(error: Exception) -> str | None:
    """What a job lacks, if `error` says that memory is used up. torch, which says it in its own way, is not imported for this."""
    if type(error).__name__ == "OutOfMemoryError":
        return "a GPU with more"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "more (mem_mb)"
    return None


def _system_error(error: OSError) -> str:
    path = error.filename or "the output"
    if error.errno == errno.ENOSPC:
        return f"{path}: the disk is full; free some space or move results/ to a larger disk, then run again"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{path}: not allowed ({error.strerror}); make it readable and results/ writable"
    return f"{path}: {error.strerror or error}"
