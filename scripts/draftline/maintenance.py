"""The maintenance window: a service makes room for GPU jobs and is started again, whatever happens to them.

What a window must do later stands in a file before the service is stopped, and leaves it when the service is healthy again.
Signals raise nothing: they are noted, and looked at where work may be given up, so none can come between two steps of the
way back. After a SIGKILL of this process the file is found by the next call, which ends the window's jobs and starts
the service; every run of Snakemake says so until then.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

from draftline.errors import DraftlineError
from draftline.fingerprint import SCRIPTS
from draftline.processes import marked
from draftline.provenance import replacing
from draftline.service import LOG, Known, Service, end, end_marked, gpu_holders, recall, remember, say

FOLDER = LOG.parent
STATE = FOLDER / "stopped.json"
LOCK = FOLDER / "lock"
MARK = "DRAFTLINE_WINDOW"
"""Environment variable of what a window starts: its id for jobs, `stop-` and its id for the stop command."""
VARIANTS = {"train_last_segment": "train_segment"}
"""Rules that are another one's variant (`use rule ... as`), by the name that a user knows."""
DRY_RUN = re.compile(r"--dry|-[tkfFlSDvpa]*n")
"""Snakemake's option, also behind others in one word that take no value: -pn."""
POLL_SECONDS = 0.5


class Interrupted(Exception):  # noqa: N818 - no error: somebody wants this to end
    """A signal asked for the end of the window."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


@dataclass(frozen=True)
class State:
    """A window, as it is kept on disk from before the stop until the service is healthy again."""

    id: str
    pid: int
    host: str
    since: float
    phase: str
    service: dict[str, Any]
    processes: Known

    def save(self) -> None:
        """Write beside and rename: the next call finds this or what was before."""
        with replacing(STATE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls) -> "State":
        """The window that was not closed. Raises DraftlineError for a damaged file."""
        try:
            values = json.loads(STATE.read_text(encoding="utf-8"))
            return cls(**{**values, "processes": [(pid, created) for pid, created in values["processes"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise DraftlineError(
                f"{STATE}: damaged ({error}); start the service by hand, then delete this file"
            ) from None


@dataclass(frozen=True)
class Planned:
    """A job that Snakemake would start: its rule, and the paths that it reads and writes."""

    rule: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Signals:
    """SIGTERM, SIGINT and SIGHUP are noted, to be acted upon where work may be given up."""

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self.received = self.received or number
        with contextlib.suppress(OSError):  # print() may not be called within itself, and the terminal may be gone.
            os.write(2, f"maintenance: {signal.Signals(number).name} noted; please wait\n".encode())

    def wait(self, condition: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """Wait until `condition` holds; False when it does not within `seconds`. Raises Interrupted."""
        return wait(condition, seconds, self.check)

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.received:
            raise Interrupted(self.received)


def wait(condition: Callable[[], bool], seconds: float, check: Callable[[], None] = lambda: None) -> bool:
    """Wait until `condition` holds, whatever signal comes; False when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        check()
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


# What comes before a window, and what belongs into it -----------------------------------------------------------------


def split(jobs: list[Planned], rules: list[str]) -> tuple[list[str], list[str]]:
    """The artifacts to make before the next window, and those to make in it; both empty when no job of `rules` is pending.

    A job of another rule that needs one of the window's jobs, as completions need the canary, comes after this window;
    what needs that one comes in a window after it.
    """
    maker = {path: job for job in jobs for path in job.outputs}
    makers = {job: {maker[path] for path in job.inputs if path in maker} for job in jobs}
    windows: dict[Planned, int] = {}
    for job in TopologicalSorter(makers).static_order():
        outside = job.rule not in rules
        windows[job] = max((windows[m] + (outside and m.rule in rules) for m in makers[job]), default=0)
    inside = {job for job, window in windows.items() if job.rule in rules and window == 0}
    before = {path for job in inside for path in job.inputs if path in maker and maker[path] not in inside}
    readers: dict[str, set[Planned]] = {path: set() for path in maker}
    for job in jobs:
        for path in set(job.inputs) & maker.keys():
            readers[path].add(job)
    # What only the window's own jobs read is not asked for, so that Snakemake removes what is temporary.
    wanted = {path for job in inside for path in job.outputs if not readers[path] or readers[path] - inside}
    return sorted(before), sorted(wanted)


def planned(targets: list[str], arguments: list[str]) -> tuple[dict[str, Any], list[Planned]]:
    """The resolved config, and the jobs that Snakemake would start. Raises DraftlineError when it cannot say."""
    with tempfile.NamedTemporaryFile("r", prefix="draftline-", suffix=".jsonl") as file:
        command = [sys.executable, str(SCRIPTS / "planned.py"), file.name, *_options(targets, arguments), "--dry-run"]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, start_new_session=True
        )
        lines = [json.loads(line) for line in file]
    if done.returncode:
        raise DraftlineError(f"snakemake -n: failed; mend that first\n{(done.stdout + done.stderr).strip()}")
    return lines[-1], [
        Planned(VARIANTS.get(job["rule"], job["rule"]), tuple(job["inputs"]), tuple(job["outputs"]))
        for job in lines[:-1]
    ]


def _options(targets: list[str], arguments: list[str]) -> list[str]:
    return [*targets, "--snakefile", str(SCRIPTS.parent / "Snakefile"), *arguments]


# The window -----------------------------------------------------------------------------------------------------------


def maintain(targets: list[str], arguments: list[str], restore_only: bool) -> None:
    """Make what a window needs, then open it, as often as pending jobs of `maintenance.rules` ask for it.

    `targets` and `arguments` go to Snakemake. Raises DraftlineError, or Interrupted after a signal; the service is up
    in both cases unless the message says otherwise.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _exclusive():
        signals = Signals()
        if STATE.exists():
            _restore_after(State.load())
        elif restore_only:
            say("nothing to restore: no window was left open")
        if not restore_only:
            _run_windows(targets, arguments, signals)


def _run_windows(targets: list[str], arguments: list[str], signals: Signals) -> None:
    if subprocess.run([sys.executable, str(SCRIPTS / "unlock.py")], check=False).returncode:
        raise DraftlineError("another run holds this folder; a window needs it for itself")
    asked: list[str] = []
    opened = False
    while True:
        config, jobs = planned(targets, arguments)
        signals.check()
        settings = config.get("maintenance")
        if settings is None:
            raise DraftlineError("config: maintenance: missing; give stop, start and health (docs/maintenance.md)")
        before, wanted = split(jobs, settings["rules"])
        if not wanted:
            say("done" if opened else f"nothing pending of {', '.join(settings['rules'])}: the service stays up")
            return
        if any(map(DRY_RUN.match, arguments)):
            say(f"would make {_listed(before) if before else 'nothing'} before the window, and in it {_listed(wanted)}")
            return
        if asked == (before or wanted):
            raise DraftlineError(f"{asked[0]}: still pending after a run that made it; what says snakemake -n?")
        service = Service(**{key: value for key, value in settings.items() if key != "rules"})
        _check(service)
        asked = before or wanted
        window = uuid.uuid4().hex
        if before:
            say(f"before the window: {_listed(before)}; the service stays up")
            _snakemake(before, arguments, window, signals)
        else:
            _open_window(service, wanted, arguments, window, signals)
            opened = True


def _check(service: Service) -> None:
    """Nothing is stopped that was not up, or that could not be seen to be up again."""
    if not service.is_healthy():
        raise DraftlineError(
            f"maintenance.health: fails before the window; its output is in {LOG}\n"
            "Start the service, or mend the command; if the service is down on purpose, run snakemake without a window"
        )


def _open_window(service: Service, wanted: list[str], arguments: list[str], window: str, signals: Signals) -> None:
    processes = service.family()
    if processes and (others := gpu_holders(own=[process.pid for process in processes])):
        raise DraftlineError(f"maintenance: the service was not stopped, others hold GPUs too: {'; '.join(others)}")
    signals.check()
    state = State(
        window, os.getpid(), socket.gethostname(), time.time(), "stopping", asdict(service), remember(processes)
    )
    state.save()
    say(f"window for {_listed(wanted)}: stopping the service")
    try:
        service.run("stop", service.stop_seconds, {MARK: f"stop-{window}"})
        state = replace(state, phase="stopped")
        state.save()
        service.await_end(state.processes, signals.wait)
        say(f"GPUs are free after {time.time() - state.since:.0f} s")
        _snakemake(wanted, arguments, window, signals)
    finally:
        _restore(state)


def _snakemake(targets: list[str], arguments: list[str], window: str, signals: Signals) -> None:
    """Run Snakemake, its jobs marked with the window's id. A signal ends it and its jobs."""
    child = subprocess.Popen(
        [sys.executable, "-m", "snakemake", *_options(targets, arguments)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, MARK: window},
        start_new_session=True,
    )
    try:
        signals.wait(lambda: child.poll() is not None)
    finally:
        end_marked(MARK, window, "jobs of this window")
    if child.returncode:
        raise DraftlineError(f"snakemake: exit status {child.returncode}; what failed stands above")


def _restore_after(state: State) -> None:
    """Restore after a window whose process was killed."""
    if state.host != socket.gethostname():
        raise DraftlineError(
            f"{STATE}: the service was stopped on {state.host}, this is {socket.gethostname()}; run there, with --restore"
        )
    say(f"process {state.pid} was killed in its window: restoring the service")
    if state.phase == "stopping":  # A stop command that still works would stop the service after its start.
        wait(lambda: not marked(MARK, f"stop-{state.id}"), state.service["stop_seconds"])
    end_marked(MARK, state.id, "jobs of that window")
    _restore(state)


def _restore(state: State) -> None:
    """End what is left of the stopped service, start it, and forget the window once it is healthy.

    Only processes from before the stop are ended: by now somebody may have started the service by hand.
    """
    if state.phase == "stopped":
        end(recall(state.processes), "what is left of the service")
    say("starting the service")
    failure = _start(Service(**state.service))
    if failure:
        raise DraftlineError(
            f"{failure}\nTHE SERVICE IS DOWN. Mend it, then run: {sys.executable} {SCRIPTS / 'maintenance.py'} --restore"
        )
    STATE.unlink(missing_ok=True)
    say(f"the service is healthy again; it was down for {time.time() - state.since:.0f} s")


def _start(service: Service) -> str | None:
    """Start the service and wait for its health. Gives what failed."""
    try:
        service.run("start", service.health_seconds)
    except DraftlineError as error:
        return str(error)
    if not wait(service.is_healthy, service.health_seconds):
        return f"maintenance.health: still fails {service.health_seconds:g} s after the start; see {LOG}"
    return None


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


# Lock and reminder ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _exclusive() -> Iterator[None]:
    """Hold the lock. It ends with this process, however that ends."""
    with open(LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise DraftlineError(f"{LOCK}: a window is open already, by {file.read().strip()}; wait for it") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def remind() -> None:
    """Say it when a window was killed and its service not started since."""
    if not STATE.exists():
        return
    with contextlib.suppress(OSError), open(LOCK, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        print(
            f"{STATE}: a maintenance window was killed and its service is still stopped;"
            f" restore it: {sys.executable} {SCRIPTS / 'maintenance.py'} --restore",
            file=sys.stderr,
        )
