"""Signs of life of a server: its log grows, its GPUs' memory changes, it reads files, compilers fill their caches.

A server that loads weights, compiles or captures graphs may say nothing for minutes, and one that hangs looks the same from
outside but for these. The caches are walked through only when nothing else showed for as long as is allowed.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

READ_RATE = 1 << 20
"""Bytes per second from which on reading counts. Threads that wake up to look at something read far less, for ever."""


class Activity:
    """When a server last showed a sign of life.

    `members` gives its processes, `memory` the bytes in use by GPU, empty where there is none; `caches` are folders.
    """

    def __init__(
        self,
        log: Path,
        caches: Sequence[Path],
        members: Callable[[], Iterable[psutil.Process]],
        memory: Callable[[], dict[str, int]],
    ) -> None:
        self.log, self.caches, self.members, self.memory = log, caches, members, memory
        self._seen = self._signs()
        self._read: dict[psutil.Process, int] = {}
        self._looked = self.last = time.monotonic()

    def touch(self) -> None:
        """Note a sign of life that came another way (an answer, say)."""
        self.last = time.monotonic()

    def quiet(self, seconds: float) -> bool:
        """Look; whether there has been no sign for `seconds`."""
        signs, reads = self._signs(), self._reads()
        if signs != self._seen or reads:
            self._seen = signs
            self.touch()
        if time.monotonic() - self.last < seconds:
            return False
        # Walked through only now, and for what happened since, not for what changed between two looks.
        since_change = max(0.0, time.time() - max(modified(self.caches), default=0.0))
        self.last = max(self.last, time.monotonic() - since_change)
        return time.monotonic() - self.last >= seconds

    def _signs(self) -> tuple[int, dict[str, int]]:
        with contextlib.suppress(OSError):
            return self.log.stat().st_size, self.memory()
        return 0, self.memory()

    def _reads(self) -> bool:
        """Whether the processes read files at some rate since the last look: from a disk, or from the system's cache."""
        total, now = 0, time.monotonic()
        counts: dict[psutil.Process, int] = {}
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                counters = process.io_counters()
                # What is mapped into memory, as weights are, shows among the bytes from the disk alone.
                counts[process] = counters.read_chars + counters.read_bytes
                total += counts[process] - self._read.get(process, 0)
        seconds = now - self._looked
        self._read, self._looked = counts, now
        return total > READ_RATE * seconds


def modified(folders: Iterable[Path]) -> Iterator[float]:
    """Times of modification, in seconds since the epoch, of all that lies in the folders and of these."""
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in (".", *names):
                with contextlib.suppress(OSError):
                    yield os.lstat(os.path.join(place, name)).st_mtime
