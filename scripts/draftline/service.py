"""A service under maintenance: the user's own commands for it, its processes, and who still holds the GPUs.

The commands are the user's, so `bash -c` runs them as they are written. Each runs in a session of its own: the Ctrl-C that
interrupts a window does not reach the start command, and a service that it starts outlives the window's terminal.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

import draftline.processes
from draftline.errors import DraftlineError
from draftline.gpus import Nvml
from draftline.processes import is_alive, marked

LOG = Path("results/.resume/maintenance/log")
"""What a window did and when, and the output of the commands."""
CALL_SECONDS = 30.0
"""Limit of a command that only looks: one call of health or processes."""
Known = list[tuple[int, float]]
"""Processes as (pid, start in seconds since the epoch), so that a reused pid is not taken for the process."""


@dataclass(frozen=True)
class Service:
    """The config's `maintenance`: commands, and the seconds that they may take (`schemas/config.schema.yaml`)."""

    stop: str
    start: str
    health: str
    processes: str | None
    stop_seconds: float
    memory_seconds: float
    health_seconds: float

    def run(self, name: str, seconds: float, environment: Mapping[str, str] | None = None) -> None:
        """Run the command `name`, its output into `LOG`.

        Raises DraftlineError when it fails or takes longer than `seconds`, after which it is killed.
        """
        with _log() as output:
            process = subprocess.Popen(
                ["bash", "-c", getattr(self, name)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise DraftlineError(f"maintenance.{name}: did not return within {seconds:g} s; see {LOG}") from None
        if status:
            raise DraftlineError(f"maintenance.{name}: exit status {status}; its output is in {LOG}")

    def is_healthy(self) -> bool:
        """Whether the health command succeeds now."""
        try:
            self.run("health", CALL_SECONDS)
        except DraftlineError:
            return False
        return True

    def family(self) -> list[psutil.Process]:
        """The living processes that the `processes` command names, and what descends from them.

        Raises DraftlineError when the command fails.
        """
        if self.processes is None:
            return []
        command = ["bash", "-c", self.processes]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise DraftlineError(f"maintenance.processes: did not return within {CALL_SECONDS:g} s") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise DraftlineError(f"maintenance.processes: exit status {done.returncode}: {last}")
        found: dict[int, psutil.Process] = {}
        for word in done.stdout.split():
            # What tools print beside pids: a heading (docker top), a 0 for a unit that is not running (systemctl show).
            if word.isdigit() and int(word) > 1:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(int(word))
                    found |= {p.pid: p for p in [process, *process.children(recursive=True)]}
        ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        return [process for pid, process in found.items() if pid not in ours and is_alive(process)]

    def leftovers(self, known: Known) -> list[psutil.Process]:
        """What is still there of the processes `known` before the stop, and what `processes` names now."""
        with contextlib.suppress(DraftlineError):  # Of a container that is gone, say, there is nothing to tell.
            known = known + remember(self.family())
        return recall(known)

    def await_end(self, known: Known, wait: Callable[[Callable[[], bool], float], bool]) -> None:
        """Until no process of the service is left and the GPUs are free; leftovers are ended when their time is over.

        `wait(condition, seconds)` waits until the condition holds and tells whether it did. Raises DraftlineError, with
        the holders, when the GPUs are not free thereafter: they are not the service's, and are not touched.
        """
        if not wait(lambda: not self.leftovers(known) and not gpu_holders(), self.memory_seconds):
            left = self.leftovers(known)
            end(left, "what is left of the service")
            if not left or not wait(lambda: not self.leftovers(known) and not gpu_holders(), self.memory_seconds):
                holders = [*map(describe, self.leftovers(known)), *gpu_holders()]
                raise DraftlineError(
                    f"maintenance: not free {self.memory_seconds:g} s after the service stopped: {'; '.join(holders)}\n"
                    "End what holds it, or leave that GPU out of CUDA_VISIBLE_DEVICES, then try again"
                )


def gpu_holders(own: Iterable[int] = ()) -> list[str]:
    """Who holds the GPUs that CUDA_VISIBLE_DEVICES names (all if it is not set); nobody where there is no NVIDIA driver.

    With the pids `own`: the processes beside these.
    """
    own = set(own)
    try:
        nvml = Nvml()
    except DraftlineError:
        return []
    with nvml:
        devices = nvml.visible()
    found = []
    for device in devices:
        others = [process for process in device.processes if process.compute and process.pid not in own]
        found += [f"{device} is held by {process} of user {process.user}" for process in others]
        if not own and not others:  # Memory without a process, or a device that does not answer.
            found += [f"{device} is {reason}" for reason in device.blockers]
    return found


def say(text: str) -> None:
    """A line for the terminal, which may be gone, and for the log."""
    with contextlib.suppress(OSError):
        print(f"maintenance: {text}", flush=True)
    with contextlib.suppress(OSError), open(LOG, "a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def remember(processes: Iterable[psutil.Process]) -> Known:
    """Processes as they are kept in a file."""
    known = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            known.append((process.pid, process.create_time()))
    return known


def recall(known: Known) -> list[psutil.Process]:
    """Those of the processes that are alive, and what descends from them."""
    found: dict[int, psutil.Process] = {}
    for pid, created in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            # The start is counted from the time of boot, which moves a little when the clock is set.
            if abs(process.create_time() - created) < 1 and is_alive(process):
                found |= {p.pid: p for p in [process, *process.children(recursive=True)]}
    return [process for process in found.values() if is_alive(process)]


def end_marked(name: str, value: str, what: str) -> None:
    """End the processes that `marked` finds, and those that they start meanwhile."""
    for _ in range(3):
        if not (found := marked(name, value)):
            return
        end(found, what)


def end(processes: list[psutil.Process], what: str) -> None:
    """End processes and say so. One that may not be ended is left, and is found again by who waits for it."""
    if processes:
        say(f"ending {what}: {'; '.join(map(describe, processes))}")
    draftline.processes.end(processes)


def describe(process: psutil.Process) -> str:
    """Process, user and command, in words."""
    try:
        command = " ".join(process.cmdline()) or process.name()
        return f"process {process.pid} ({process.username()}: {command[:80]})"
    except psutil.Error:
        return f"process {process.pid}"


def _log() -> IO[bytes]:
    """The log; nowhere where it cannot be written, because the service must be started all the same."""
    try:
        return open(LOG, "ab")
    except OSError:
        return open(os.devnull, "ab")
