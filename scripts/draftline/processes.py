"""Processes of others: whether they live, and their end."""

import contextlib
from collections.abc import Sequence

import psutil

PATIENCE = 20.0
"""Seconds between SIGTERM, upon which a process cleans up (a job removes its unfinished files), and SIGKILL."""


def is_alive(process: psutil.Process) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def marked(name: str, value: str) -> list[psutil.Process]:
    """Processes with the environment variable `name` at `value`: whatever was started with it, wherever it went."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # Ended meanwhile, or another user's.
            if process.environ().get(name) == value and is_alive(process):
                found.append(process)
    return found


def end(processes: Sequence[psutil.Process]) -> None:
    """End processes, gently first. One that may not be ended is left."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
    psutil.wait_procs(alive, timeout=PATIENCE)
