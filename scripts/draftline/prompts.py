"""A prompt: its identity, its place among the shards, and the Parquet files of prompts/ and benches/."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from draftline import provenance

if TYPE_CHECKING:
    import pyarrow

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """What the target is asked: `messages` up to the last user or tool turn, and what else is known of the row.

    `response` is the assistant turn that followed in the source file; `problem` is an evaluation set's text before its
    template was put around it; `name` is the row's own id in its file.
    """

    id: str
    source: str
    name: str | None
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    response: Message | None = None
    problem: str | None = None


NESTED = ("messages", "tools", "response")
"""Fields that are stored as JSON, since their shape is free."""
BATCH_ROWS = 10000


def prompt_id(messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
    """32 hex digits over what the target sees; neither the source nor the response counts."""
    content = orjson.dumps([messages, tools], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def shard_of(id: str, shards: int) -> int:
    """The shard, 0..shards-1, that holds an id: equal ranges of its first 32 bits."""
    return int(id[:8], 16) * shards >> 32


def draw_of(id: str) -> float:
    """A number in [0, 1) from the id's last 52 bits: chance that is the same whatever other rows there are.

    Independent of the bits that choose the shard, so a source that is thinned stays spread over all shards.
    """
    return int(id[-13:], 16) / 2**52


def schema() -> "pyarrow.Schema":
    """Columns of prompts.parquet (docs/artifacts.md)."""
    import pyarrow

    required = {"id", "source", "messages"}
    names = PromptRow.__dataclass_fields__
    return pyarrow.schema([pyarrow.field(name, pyarrow.string(), nullable=name not in required) for name in names])


def write_prompts(
    path: str | Path, rows: Iterable[PromptRow], record: provenance.Record, counts: dict[str, dict[str, int]]
) -> None:
    """Write `rows`, which come in order of id, with `counts` (by source: rows read, kept, left out by reason) as a fact."""
    import pyarrow

    stored = map(_stored, rows)
    batches = iter(lambda: list(islice(stored, BATCH_ROWS)), [])
    columns = schema()
    table = pyarrow.Table.from_batches([pyarrow.RecordBatch.from_pylist(batch, columns) for batch in batches], columns)
    provenance.write_parquet(path, table, record, {"counts": counts})


def read_prompts(path: str | Path) -> list[PromptRow]:
    """Rows of a prompts file, ordered by id. Raises DraftlineError with the path for a torn or foreign file."""
    rows = provenance.read_parquet(path).to_pylist()
    return [PromptRow(**{name: _loaded(name, value) for name, value in row.items()}) for row in rows]


def _stored(row: PromptRow) -> dict[str, str | None]:
    values = {name: getattr(row, name) for name in PromptRow.__dataclass_fields__}
    for name in NESTED:
        if values[name] is not None:
            values[name] = orjson.dumps(values[name]).decode()
    return values


def _loaded(name: str, value: str | None) -> Any:
    return orjson.loads(value) if name in NESTED and value is not None else value
