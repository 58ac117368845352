"""Progress lines of a running command: a few a minute on the terminal, all of them in the log."""

import logging
import time
from typing import TextIO

log = logging.getLogger("draftline")


class Progress:
    """Counts finished items and tells rate, remaining time and any further counts, at most every `every` seconds."""

    def __init__(self, what: str, total: int, unit: str = "rows", every: float = 10.0) -> None:
        self.what, self.total, self.unit, self.every = what, total, unit, every
        self.done = 0
        self.started = self.told = time.monotonic()

    def add(self, count: int = 1, **facts: object) -> None:
        """`count` more items are done; `facts` are shown as they are."""
        self.done += count
        now = time.monotonic()
        if now - self.told < self.every and self.done < self.total:
            return
        self.told = now
        rate = self.done / max(now - self.started, 1e-9)
        left = (self.total - self.done) / rate if rate else float("inf")
        more = "".join(f", {name} {value}" for name, value in facts.items())
        say(f"{self.what}: {self.done}/{self.total} {self.unit}, {rate:.3g}/s{more}, {left:.0f} s left")


terminal: TextIO | None = None
"""Where `say` shows its lines beside the log; set by a command whose output goes to a file."""


def say(text: str) -> None:
    """One line for the log, and for the terminal where that is another place."""
    log.info(text)
    if terminal is not None:
        print(text, file=terminal, flush=True)
