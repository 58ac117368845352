"""Which artifacts are up to date, from the artifacts alone.

The id that an artifact should carry follows from settings and graph alone: a hash over its path, its rule's settings and
the ids that its inputs should carry. An artifact is up to date when it exists and carries that id. Nothing else counts: no
modification times, no records of Snakemake's. So a lost ``.snakemake``, a fresh clone, touched files, or a change and its
undoing are all the same as nothing.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from draftline import provenance
from draftline.errors import DraftlineError

NO_RECORD: provenance.Record = {}


@dataclass(frozen=True, slots=True)
class Node:
    """The job behind an artifact: its rule, first output, settings hash, the artifacts it reads, and the outputs it keeps."""

    rule: str
    first: str
    settings: str
    inputs: tuple[str, ...]
    temporary: bool = False
    kept: tuple[str, ...] = ()


class Staleness:
    """Answers for one state of config, code and files; `node` gives the job that makes an artifact."""

    def __init__(self, node: Callable[[str], Node]) -> None:
        self._node = node
        self._wanted: dict[str, str] = {}
        self._records: dict[str, provenance.Record] = {}
        self._pending: dict[str, bool] = {}
        self._waits: dict[str, bool] = {}
        self._outdated: dict[str, bool] = {}

    def wanted(self, path: str) -> str:
        """The id that `path` carries once it is up to date: its present one where that was accepted in place of the new."""
        if path not in self._wanted:
            wanted, record = self.due(path), self.record(path)
            accepted = record.get("accepted", {}).get("id") == wanted
            self._wanted[path] = record["id"] if accepted else wanted
        return self._wanted[path]

    def due(self, path: str) -> str:
        """The id that `path` would get if it were made now."""
        node = self._node(path)
        return provenance.identity(node.first, node.settings, {name: self.wanted(name) for name in node.inputs})

    def record(self, path: str) -> provenance.Record:
        """The record that `path` carries; empty when there is no such file, or when it is torn or not ours."""
        if path not in self._records:
            self._records[path] = NO_RECORD
            if os.path.exists(path):
                with contextlib.suppress(DraftlineError):
                    self._records[path] = provenance.read(path)
        return self._records[path]

    def foreign(self, path: str) -> bool:
        """`path` carries another id than what would be made now.

        A file without a readable record counts as present: whoever reads it refuses it by its path, because remaking it
        unasked would hide the damage.
        """
        return bool(self.record(path)) and self.record(path)["id"] != self.wanted(path)

    def pending(self, path: str) -> bool:
        """`path`, another output of its job, or something it is made from is missing or foreign; temporary ones may be missing."""
        if path not in self._pending:
            node = self._node(path)
            missing = not node.temporary and not os.path.exists(path)
            self._pending[path] = missing or self.foreign(path) or self._waiting(node)
        return self._pending[path]

    def _waiting(self, node: Node) -> bool:
        """Whether a job has an output or an input to wait for; asked once for all its outputs, which may be many."""
        if node.first not in self._waits:
            missing = not all(map(os.path.exists, node.kept))
            self._waits[node.first] = missing or self._foreign(node) or any(self.pending(name) for name in node.inputs)
        return self._waits[node.first]

    def outdated(self, path: str) -> bool:
        """An output of the job that makes `path` carries another id. A temporary one may be gone, the others tell."""
        return self.foreign(path) or self._foreign(self._node(path))

    def _foreign(self, node: Node) -> bool:
        if node.first not in self._outdated:
            self._outdated[node.first] = any(map(self.foreign, node.kept))
        return self._outdated[node.first]
