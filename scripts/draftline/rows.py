"""The row store: what an engine has once sampled is never sampled again.

It lies below results/.resume/rows/{hash of the settings that change an answer}/{bucket}/, outside the workflow's graph. The
bucket is the beginning of a prompt's id, so a shard, which is a range of ids, reads only its own. Each writer has a file of
its own in each bucket and appends rows to it, so several jobs may write at once, and a job killed at any byte leaves at most
one torn row, which readers skip.

A row's key is its prompt's token ids. The limit on new tokens is not part of it: a row cut at a smaller limit is continued,
one that is longer is cut back.
"""

import array
import hashlib
import os
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import orjson

from draftline.provenance import digest

ROOT = Path("results/.resume/rows")
BUCKET_DIGITS = 2


@dataclass(frozen=True)
class Row:
    """Sampled ids of a prompt, the stop token included, with how they ended (``stop`` or ``length``) and in how many tries.

    `retokenized` ids were made from text; which rows of a store are so, its user knows.
    """

    completion_ids: list[int]
    finish_reason: str
    attempts: int = 1
    retokenized: bool = False

    def within(self, limit: int) -> "Row":
        """The row as a limit of `limit` new tokens would have left it."""
        if len(self.completion_ids) <= limit:
            return self
        return replace(self, completion_ids=self.completion_ids[:limit], finish_reason="length")

    def complete(self, limit: int) -> bool:
        """Whether nothing is left to sample below `limit` new tokens."""
        return self.finish_reason == "stop" or len(self.completion_ids) >= limit

    @property
    def _rank(self) -> tuple[bool, int, list[int]]:
        """Larger is further on; two writers' rows of one prompt have the same winner in any order of reading."""
        return self.finish_reason == "stop", len(self.completion_ids), self.completion_ids


class RowStore:
    """Rows of one target, engine and sampling. Use as a context manager, or call `close`."""

    def __init__(self, settings: Mapping[str, Any], root: Path = ROOT) -> None:
        """`settings` is all that changes an answer besides its prompt."""
        self.folder = root / digest(settings)
        self._name = f"{uuid.uuid4().hex}.jsonl"
        self._files: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def find(self, prompts: Mapping[str, Sequence[int]]) -> dict[str, Row]:
        """The stored rows among `prompts` (id -> token ids), by id."""
        by_bucket: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for row_id, prompt_ids in prompts.items():
            by_bucket[_bucket(row_id)][_key(prompt_ids)].append(row_id)
        found: dict[str, Row] = {}
        for bucket, wanted in by_bucket.items():
            for path in sorted((self.folder / bucket).glob("*.jsonl")):
                for key, row in _rows(path):
                    for row_id in wanted.get(key, ()):
                        if row_id not in found or found[row_id]._rank < row._rank:
                            found[row_id] = row
        return found

    def add(self, row_id: str, prompt_ids: Sequence[int], row: Row) -> None:
        """Store a row; once this returns, a SIGKILL does not lose it."""
        values = [_key(prompt_ids), row.completion_ids, row.finish_reason, row.attempts]
        # The line break stands in front, so that a row is whole even behind a torn one.
        line = memoryview(b"\n" + orjson.dumps(values))
        file = self._file(_bucket(row_id))
        while line:
            line = line[os.write(file, line) :]

    def close(self) -> None:
        """Close the writer's files; a later `add` opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _file(self, bucket: str) -> int:
        if bucket not in self._files:
            path = self.folder / bucket / self._name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[bucket] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return self._files[bucket]


def _bucket(row_id: str) -> str:
    return row_id[:BUCKET_DIGITS]


def _key(prompt_ids: Sequence[int]) -> str:
    return hashlib.sha256(array.array("i", prompt_ids).tobytes()).hexdigest()[:32]


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Whole rows of a file. A torn one cannot be taken for whole: no beginning of a JSON list is JSON."""
    with open(path, "rb") as file:
        for line in file:
            try:
                key, completion_ids, finish_reason, attempts = orjson.loads(line)
            except ValueError:
                continue
            yield key, Row(completion_ids, finish_reason, attempts)
