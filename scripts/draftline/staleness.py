"""Which artifacts are up to date, from the artifacts alone.

The id that an artifact should carry follows from settings and graph alone: a hash over its path, its rule's settings and
the ids that its inputs should carry. An artifact is up to date when it exists and carries that id. Nothing else counts: no
modification times, no records of Snakemake's. So a lost ``.snakemake``, a fresh clone, touched files, or a change and its
undoing are all the same as nothing.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from draftline import provenance
from draftline.errors import DraftlineError


@dataclass(frozen=True)
class Node:
    """The job behind an artifact: its rule, first output, settings hash, and the artifacts it reads."""

    rule: str
    first: str
    settings: str
    inputs: tuple[str, ...]
    temporary: bool = False


class Staleness:
    """Answers for one state of config, code and files; `node` gives the job that makes an artifact."""

    def __init__(self, node: Callable[[str], Node]) -> None:
        self._node = node
        self._wanted: dict[str, str] = {}
        self._actual: dict[str, str | None] = {}
        self._pending: dict[str, bool] = {}

    def wanted(self, path: str) -> str:
        """The id that `path` carries once it is up to date."""
        if path not in self._wanted:
            node = self._node(path)
            self._wanted[path] = provenance.identity(
                node.first, node.settings, {name: self.wanted(name) for name in node.inputs}
            )
        return self._wanted[path]

    def actual(self, path: str) -> str | None:
        """The id that `path` carries; None when there is no such file, or when it is torn or not ours."""
        if path not in self._actual:
            self._actual[path] = None
            if os.path.exists(path):
                try:
                    self._actual[path] = provenance.read(path)["id"]
                except DraftlineError:
                    pass
        return self._actual[path]

    def foreign(self, path: str) -> bool:
        """`path` carries another id than what would be made now.

        A file without a readable record counts as present: whoever reads it refuses it by its path, because remaking it
        unasked would hide the damage.
        """
        return self.actual(path) not in (None, self.wanted(path))

    def pending(self, path: str) -> bool:
        """`path`, or something it is made from, is missing or foreign. Temporary artifacts may be missing."""
        if path not in self._pending:
            node = self._node(path)
            missing = not os.path.exists(path) and not node.temporary
            self._pending[path] = missing or self.foreign(path) or any(self.pending(name) for name in node.inputs)
        return self._pending[path]
