"""An inference server that a job starts, watches and ends, whatever protocol it speaks.

Between the job and the server stands a process of ours (guard.py). It writes the server's log and ends everything that the
server started, when the job says so and also when the job was killed. A thread of the job watches: a server that ended, or
that showed no sign of life for too long, is ended wholly, and `Server.failure` says why in words for the user.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from draftline import processes
from draftline.activity import Activity
from draftline.errors import DraftlineError
from draftline.gpus import Nvml, gib, plain
from draftline.progress import say

HOST = "127.0.0.1"
PORTS = 5
"""How many ports are tried: between choice and use, another process may take one."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL. A server has nothing to save, and the next job waits ten seconds for its GPU."""
MEMORY_SECONDS = 60.0
"""Seconds for the GPUs' memory to come back after the last process ended."""
SLACK = 256 << 20
"""Bytes that may be in use more than before: less than a context takes."""
POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0
"""Time between two looks for signs of life; each asks the driver and reads of every process."""
MARK = "DRAFTLINE_SERVER"
"""Environment variable of all that a server starts: its token."""
ADDRESS_IN_USE = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)
ERROR = re.compile(r"\w*(Error|Exception)\b|\berror:", re.IGNORECASE)
LINES = 5
"""Lines of a log that a message shows."""


@dataclass(frozen=True)
class Program:
    """How a server is started.

    `command` takes the port and a file with the key, whose name ends in `.yaml` and whose content `key_file` makes of the key:
    a key on the command line would stand in the list of processes. `environment` is added to the job's, `caches` are the
    folders that its compilers fill.
    """

    name: str
    command: Callable[[int, Path], list[str]]
    key_file: Callable[[str], str]
    environment: Mapping[str, str] = field(default_factory=dict)
    caches: Sequence[Path] = ()


class Server:
    """One server after the other of a program; `log` takes the output of all of them.

    `stall_seconds` is how long it may show no sign of life (draftline.activity) while it starts or owes answers. With `gpus` the
    job's devices are watched too, those of CUDA_VISIBLE_DEVICES; their memory in use when this object is made is what they
    have to come back to.
    """

    def __init__(self, program: Program, log: Path, stall_seconds: float, gpus: bool) -> None:
        self.program, self.log, self.stall_seconds = program, log, stall_seconds
        self.key, self.token = secrets.token_hex(16), secrets.token_hex(16)  # A key must not look like a flag.
        self.port = 0
        self._gpus = gpus
        self._before = self._memory()
        self._guard: subprocess.Popen[bytes] | None = None
        self._file: Path | None = None
        self._failure: str | None = None
        self._failed, self._over = threading.Event(), threading.Event()
        self._watch: threading.Thread | None = None
        self._owing = False

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def failure(self) -> str | None:
        """Why the server is not there any more, in words, with its last lines; None while it is."""
        return self._failure if self._failed.is_set() else None

    # Start ------------------------------------------------------------------------------------------------------------

    def start(self, ask: Callable[[], str | None]) -> None:
        """Start the program and wait until it answers.

        `ask` puts a real question to the server and gives None when that was answered, else why not, in words; it may take long.
        Raises DraftlineError with the last lines of the log when the server ends, stalls, or refuses the question for long.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        try:
            for _ in range(PORTS):
                self._launch()
                self._await(ask)
                if not self.failure:
                    return
                if not ADDRESS_IN_USE.search(self._words()):
                    raise DraftlineError(self.failure)
                if held := self.end():
                    raise DraftlineError(f"{self.program.name}: no other server can start: {'; '.join(held)}")
                say(f"{self.program.name}: port {self.port} was taken meanwhile; trying another one")
            raise DraftlineError(f"{self.program.name}: {PORTS} ports were taken one after the other\n{self.failure}")
        except BaseException:
            self.end()
            raise

    def _launch(self) -> None:
        self.port = free_port()
        self._offset = self.log.stat().st_size
        self._failed.clear()
        self._over.clear()
        self._owing = True
        self._file = file = private_file(self.program.key_file(self.key))
        order = {
            "command": self.program.command(self.port, file),
            "log": str(self.log.resolve()),
            "secret": self.key,
            "file": str(file),
            "grace": GRACE,
        }
        self._guard = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("guard.py"))],
            stdin=subprocess.PIPE,
            env={**os.environ, **self.program.environment, MARK: self.token, "SPT_NOENV": "1"},
            start_new_session=True,
        )
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):  # It ended already, as the watch will see.
            self._guard.stdin.write(json.dumps(order).encode() + b"\n")
            self._guard.stdin.flush()
        self._activity = Activity(self.log, self.program.caches, self._members, self._memory)
        self._watch = threading.Thread(target=self._keep_watch, daemon=True)
        self._watch.start()

    def _await(self, ask: Callable[[], str | None]) -> None:
        """Until the server answers or is gone. A question is asked in a thread: a hanging one must not hide a stall."""
        question: threading.Thread | None = None
        replies: list[str | None] = []
        since = float("inf")
        while not self._failed.wait(POLL_SECONDS):
            if question and question.is_alive():
                continue
            if None in replies:
                self._owing = False
                return
            # Each refusal is a line in the log, so the watch takes it for a sign of life.
            if replies and time.monotonic() - since > self.stall_seconds:
                lines = self._last_lines(errors=True)
                raise DraftlineError(
                    f"{self.program.name}: does not answer: {replies[-1]}; its log is {self.log}{lines}"
                )
            if self._listens():
                since = min(since, time.monotonic())
                question = threading.Thread(target=lambda: replies.append(ask()), daemon=True)
                question.start()

    def _listens(self) -> bool:
        """Whether the port is open and is our server's own: no other process is ever shown the key."""
        with socket.socket() as probe:
            if probe.connect_ex((HOST, self.port)):
                return False
        for process in self._members():
            with contextlib.suppress(psutil.Error):
                for place in process.net_connections("tcp"):
                    if place.status == psutil.CONN_LISTEN and place.laddr.port == self.port:
                        return True
        return False

    # Watch ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def owing(self) -> Iterator[Callable[[], None]]:
        """While the server owes answers, silence is a stall. Gives what is to be called at each answer."""
        self._activity.touch()
        self._owing = True
        try:
            yield self._activity.touch
        finally:
            self._owing = False

    def _keep_watch(self) -> None:
        """Until the server is gone, or shows no sign of life: then it is ended, and `failure` says why."""
        guard = self._guard
        assert guard
        reason, stalled, due = None, False, 0.0
        while reason is None:
            if self._over.wait(POLL_SECONDS):
                return
            if guard.poll() is not None:
                reason = f"the server ended ({status_in_words(guard.returncode)})"
            elif not self._owing or time.monotonic() < due:
                continue
            elif self._activity.quiet(self.stall_seconds):
                stalled = True
                reason = (
                    f"no sign of life for {self.stall_seconds:g} s (no log line, no change of GPU memory, no growing cache,"
                    " no reading, no answer); the server was ended"
                )
            due = time.monotonic() + min(LOOK_SECONDS, self.stall_seconds / 10)
        memory = ", ".join(f"{name}: {used >> 20} MiB in use" for name, used in self._memory().items())
        stop(guard)
        facts = f"; {memory}" if memory else ""
        lines = self._last_lines(errors=not stalled)
        self._failure = f"{self.program.name}: {reason}{facts}; its log is {self.log}{lines}"
        self._failed.set()

    def _members(self) -> list[psutil.Process]:
        """Processes of the server, its guard not among them."""
        with contextlib.suppress(psutil.Error):
            if self._guard:
                return list(psutil.Process(self._guard.pid).children(recursive=True))
        return []

    def _words(self) -> str:
        """What the last server wrote into the log; nothing if somebody deleted it."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(self._offset)
            return file.read().decode(errors="replace")
        return ""

    def _last_lines(self, errors: bool) -> str:
        """The last lines of the log, to stand below a message; with `errors` those that name one, where there are such."""
        lines = [plain(line.strip())[:300] for line in self._words().splitlines()[-400:] if line.strip()]
        chosen = (errors and [line for line in lines if ERROR.search(line)][-LINES:]) or lines[-LINES:]
        return "".join(f"\n  {line}" for line in chosen)

    # End --------------------------------------------------------------------------------------------------------------

    def end(self) -> list[str]:
        """End the server and all that it started, then wait for the GPUs' memory. Gives, in words, what does not come back."""
        self._over.set()
        if self._watch and self._watch is not threading.current_thread():
            self._watch.join()
        if self._guard:
            stop(self._guard)
        # What the guard could not see to, where it was killed itself.
        processes.end(processes.marked(MARK, self.token))
        if self._file:
            self._file.unlink(missing_ok=True)
        return self._held()

    def _held(self) -> list[str]:
        deadline = time.monotonic() + MEMORY_SECONDS
        while held := [name for name, used in self._memory().items() if used > self._before.get(name, 0) + SLACK]:
            if time.monotonic() > deadline:
                return self._holders(held)
            time.sleep(POLL_SECONDS)
        return []

    def _holders(self, names: list[str]) -> list[str]:
        with Nvml() as nvml:
            devices = [device for device in nvml.visible() if str(device) in names]
        return [
            f"{device} has {gib(device.used)} in use, {gib(self._before.get(str(device), 0))} before the server; held by "
            + ("; ".join(str(process) for process in device.processes) or "no process that can be seen from here")
            for device in devices
        ]

    def _memory(self) -> dict[str, int]:
        """Bytes in use by GPU of the job; nothing where the driver does not answer (any more)."""
        with contextlib.suppress(DraftlineError):
            if self._gpus:
                with Nvml() as nvml:
                    return {str(device): device.used for device in nvml.visible()}
        return {}


def stop(guard: "subprocess.Popen[bytes]") -> None:
    """Tell the guard to end the server, and wait for both. A guard that hangs is killed, and takes its server with it."""
    assert guard.stdin
    with contextlib.suppress(BrokenPipeError):
        guard.stdin.close()
    try:
        guard.wait(4 * GRACE)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def private_file(content: str) -> Path:
    """A new file that only this user may read."""
    descriptor, name = tempfile.mkstemp(prefix="draftline-", suffix=".yaml")
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
    return Path(name)


def status_in_words(status: int) -> str:
    """Of the guard: the server's, or a signal that ended the guard itself."""
    if status < 0:
        return f"its guard was killed by signal {-status}"
    return f"killed by signal {status - 128}" if status > 128 else f"exit status {status}"
