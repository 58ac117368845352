"""Samples for training: prompt and completion ids joined, cut to length, with the spans that are supervised.

A completion is supervised whole: its think block and its stop token are what the target would write. Lengths say what is real,
never the pad id, which in some tokenizers is the stop token.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from draftline import provenance
from draftline.errors import DraftlineError
from draftline.manifest import Manifest

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("status", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.int32())),
        ("finished", pa.bool_()),
    ]
)
EXAMPLES = 3
"""So many sample ids are remembered of each source and status, for messages."""

Ids = npt.NDArray[np.int32]


@dataclass
class Samples:
    """A table of `SCHEMA`, and what was seen before the choice of rows.

    `counts`: source -> rows by status, and how many were ``kept`` or had ``no_anchor``. `examples`: source -> status -> sample ids.
    """

    table: pa.Table
    counts: dict[str, dict[str, int]]
    examples: dict[str, dict[str, list[str]]]


@dataclass(frozen=True)
class Ragged:
    """A list<int32> column as flat `values` and `offsets` of its rows."""

    values: Ids
    offsets: npt.NDArray[np.int32]

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "Ragged":
        array = column.combine_chunks()
        return cls(array.values.to_numpy(), array.offsets.to_numpy())

    def __getitem__(self, row: int) -> Ids:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return np.diff(self.offsets)


def tokenize(
    completions: pa.Table, engine: str, manifest: Manifest, settings: Mapping[str, Any], where: str
) -> Samples:
    """Samples from a table of completions, in its order.

    `engine` is the one that answered: only ``dataset`` has assistant turns besides the last one to train on. `settings` is the
    config's ``tokens``; `where` names the completions in messages. Raises DraftlineError for spans that lie outside or end without a
    stop token, for ids outside the vocabulary, and for a mask token in the data.
    """
    prompts, answers, turns = (Ragged.of(completions[n]) for n in ("prompt_ids", "completion_ids", "assistant_spans"))
    names, sources, statuses = (completions[n].to_pylist() for n in ("id", "source", "status"))
    stopped = pc.equal(completions["finish_reason"], "stop").to_pylist()
    every_turn = engine == "dataset" and settings["turns"] == "all"
    stops = frozenset(manifest.eos_token_ids)

    rows, ids, spans, finished = [], [], [], []
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    examples: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row, (name, source, status) in enumerate(zip(names, sources, statuses)):
        counts[source][status] += 1
        if len(examples[source][status]) < EXAMPLES:
            examples[source][status].append(name)
        if status not in settings["keep"]:
            continue
        prompt, answer = prompts[row], answers[row]
        whole = np.concatenate([prompt, answer])
        found = turns[row].tolist() if every_turn else [len(prompt), len(whole)]
        complaint = _complaint(whole, len(prompt), found, stopped[row], stops)
        if complaint:
            raise DraftlineError(f"{where}: sample {name}: {complaint}")
        sample = whole[: settings["max_length"]]
        kept = _clip(found, len(sample))
        if max(kept[1::2] - kept[::2], default=0) < 2:
            counts[source]["no_anchor"] += 1
            continue
        counts[source]["kept"] += 1
        rows.append(row)
        ids.append(sample)
        spans.append(kept)
        finished.append(stopped[row] and len(sample) == len(whole))

    chosen = completions.select(["id", "source", "status"]).take(pa.array(rows, pa.int64()))
    table = pa.table([*chosen.columns, _lists(ids), _lists(spans), pa.array(finished, pa.bool_())], schema=SCHEMA)
    _check_ids(table, manifest, where)
    return Samples(table, {s: dict(c) for s, c in counts.items()}, {s: dict(e) for s, e in examples.items()})


def _complaint(whole: Ids, prompt: int, spans: list[int], stopped: bool, stops: frozenset[int]) -> str | None:
    """What is wrong with a row's supervised spans, if anything is. Only the last turn may end without a stop token."""
    pairs = list(zip(spans[::2], spans[1::2]))
    if len(spans) % 2 or [0, *spans] != sorted([0, *spans]) or pairs[-1:] != [(prompt, len(whole))]:
        return f"assistant_spans {spans} do not ascend to the completion at {[prompt, len(whole)]}; delete the file and run again"
    for start, end in pairs if stopped else pairs[:-1]:
        if start == end or int(whole[end - 1]) not in stops:
            return (
                f"the finished turn at tokens {start}..{end} does not end with a stop token of the target {sorted(stops)};"
                " mend target.chat_template or the model's eos_token_id"
            )
    return None


def _clip(spans: Sequence[int], length: int) -> Ids:
    """`spans` within the first `length` tokens; those wholly behind them are dropped."""
    pairs = np.minimum(np.asarray(spans, np.int32), length).reshape(-1, 2)
    return pairs[pairs[:, 0] < pairs[:, 1]].ravel()


def _lists(rows: Sequence[Ids]) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    values = np.concatenate(rows) if rows else np.empty(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.int32()))


def _check_ids(table: pa.Table, manifest: Manifest, where: str) -> None:
    ids = Ragged.of(table["input_ids"])

    def sample(flat: npt.NDArray[np.bool_]) -> str:
        row = int(np.searchsorted(ids.offsets, np.argmax(flat), side="right")) - 1
        return str(table["id"][row])

    outside = (ids.values < 0) | (ids.values >= manifest.vocab_size)
    if outside.any():
        raise DraftlineError(
            f"{where}: sample {sample(outside)}: token id {ids.values[outside][0]} is none of the target's"
            f" {manifest.vocab_size}; the file was made with another target: delete it and run again"
        )
    masks = ids.values == manifest.mask_token_id
    if masks.any():
        raise DraftlineError(
            f"config: target.mask_token_id: {manifest.mask_token_id}: occurs in the data (sample {sample(masks)} of {where});"
            " name a token id that never does"
        )


def make_tokens(completions: str, output: str, manifest: Manifest, settings: Mapping[str, Any], record: Any) -> Samples:
    """completions/{shard}.parquet -> tokens/{shard}.parquet."""
    table = provenance.read_parquet(completions)
    samples = tokenize(table, provenance.parquet_facts(completions, "engine"), manifest, settings, completions)
    provenance.write_parquet(output, samples.table, record, {"counts": samples.counts, "examples": samples.examples})
    return samples


def read_samples(path: str | Path) -> Samples:
    """A shard of tokens with its counts. Raises DraftlineError with the path when it is torn or not ours."""
    table = provenance.read_parquet(path)
    return Samples(table, provenance.parquet_facts(path, "counts"), provenance.parquet_facts(path, "examples"))


def mask_sums(spans: pa.ChunkedArray) -> Ids:
    """Supervised tokens of each row of a ``spans`` column, [rows] int32. Every row has at least one span."""
    column = Ragged.of(spans)
    widths = column.values[1::2] - column.values[::2]
    return np.add.reduceat(widths, column.offsets[:-1] // 2, dtype=np.int32) if len(widths) else widths


def supervised(table: pa.Table) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """All rows' input ids one after the other, [tokens] int32, and which of them are supervised, [tokens] bool."""
    ids, spans = Ragged.of(table["input_ids"]), Ragged.of(table["spans"])
    edges = spans.values + np.repeat(ids.offsets[:-1], spans.lengths)
    steps = np.zeros(len(ids.values) + 1, np.int8)
    np.add.at(steps, edges[::2], 1)
    np.add.at(steps, edges[1::2], -1)
    return ids.values, np.cumsum(steps[:-1], dtype=np.int8).astype(bool)
