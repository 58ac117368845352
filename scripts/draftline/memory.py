"""Main memory that this process may still use: what the machine has free, within the limits of its control groups."""

from collections.abc import Iterator
from pathlib import Path

import psutil

MOUNT = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes. SLURM, containers and systemd set limits by control groups; a process over one is killed without a word."""
    return min([int(psutil.virtual_memory().available), *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Bytes left under each limit that holds here: of the process's own group and of those above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # Not Linux.
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = MOUNT, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage, cache = (
                MOUNT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
            )  # fmt: skip
        else:
            continue
        place = root / group.lstrip("/")
        for folder in [place, *place.parents]:
            if folder.is_relative_to(root):
                try:
                    statistics = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                    used = int((folder / usage).read_text()) - int(statistics[cache])
                    yield int((folder / limit).read_text()) - used
                except (OSError, ValueError, KeyError):
                    continue  # A group without a limit ("max"), or not mounted here.
