"""Clear what a killed run left behind in this folder: its jobs that still run, and Snakemake's lock.

Snakemake locks a working directory by files in .snakemake/locks and removes them when it ends; a SIGKILL or a power cut
leaves them. They are cleared when no Snakemake that could have written them is alive in this folder. Jobs of a killed
Snakemake that run on are ended first, because the next run starts them again: finished rows and training checkpoints are
kept, and two writers never meet. Exit status 1 when a living Snakemake holds the lock.
"""

import contextlib
import os
import sys
from pathlib import Path

import psutil

from draftline.processes import end, is_alive
from draftline.settings import RUN_FILE
from draftline.slurm import LOCKS

SLURM_JOB = "SLURM_JOB_ID"


def is_snakemake(process: psutil.Process) -> bool:
    """Whether a process is Snakemake, started by its console script or as a module."""
    try:
        return any(Path(word).name == "snakemake" for word in process.cmdline()[:4])
    except psutil.Error:
        return False  # Ended meanwhile.


def processes(folder: Path) -> list[psutil.Process]:
    """Living processes, readable for this user, that work in `folder`; not this one and its ancestors."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and Path(process.cwd()) == folder and is_alive(process):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # Ended meanwhile, or another user's.
    return found


def holders(locks: list[Path], living: list[psutil.Process]) -> list[psutil.Process]:
    """Snakemake processes that may have written one of the locks: those that were there before it."""
    newest = max((lock.stat().st_mtime for lock in locks), default=0.0)
    return [process for process in living if is_snakemake(process) and process.create_time() <= newest]


def leftovers(living: list[psutil.Process]) -> list[psutil.Process]:
    """Jobs of a run whose Snakemake is gone. A command started by hand has no run in its environment and is left alone.

    So is a process of another SLURM job, where this machine is a node too: the next run settles those (draftline.slurm).
    """
    found = []
    for process in living:
        try:
            environment = process.environ()
            orphan = RUN_FILE in environment and not is_snakemake(process)
            orphan = orphan and environment.get(SLURM_JOB) in (None, os.environ.get(SLURM_JOB))
            if orphan and not any(is_snakemake(parent) for parent in process.parents()):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def unlock(folder: Path) -> str | None:
    """Clear jobs and locks of dead runs in `folder`. Gives the reason when a living one holds it."""
    locks = sorted((folder / LOCKS).glob("*.lock"))
    living = processes(folder.resolve())
    held = holders(locks, living)
    if held:
        pids = ", ".join(str(process.pid) for process in held)
        return (
            f"{LOCKS}: Snakemake (process {pids}) is running in this folder; wait for it, or stop it with: kill {pids}"
        )
    jobs = leftovers(living)
    for job in jobs:
        with contextlib.suppress(psutil.NoSuchProcess):
            print(f"draftline: ending process {job.pid}, a job of a run that was killed: {' '.join(job.cmdline()[:3])}")
    end(jobs)
    for lock in locks:
        lock.unlink(missing_ok=True)
    if locks:
        print("draftline: cleared the lock of a run that no longer lives")
    return None


if __name__ == "__main__":
    reason = unlock(Path.cwd())
    sys.exit(f"draftline: {reason}" if reason else 0)
