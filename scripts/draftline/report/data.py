"""What the report says of the training data: counts along the chain, masks by source, and samples to read."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from draftline import provenance
from draftline.chat import Chat
from draftline.manifest import Manifest
from draftline.tokens import Ragged

BINS = 48
"""At most so many bars in a histogram."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 8
"""A character is spread over at most so many tokens; what still is none after them is shown as it decodes."""


@dataclass(frozen=True)
class SourceCounts:
    """A source's way through the chain: rows by prompt reason, completion status, and what became of the completions."""

    name: str
    prompts: dict[str, int]
    completions: dict[str, int]
    samples: dict[str, int]


def source_counts(prompts: str, completions: Iterable[str], tokens: Iterable[str]) -> list[SourceCounts]:
    """Counts of every source. `prompts` is any one shard (all hold the same), the others are added up over shards."""
    read = provenance.parquet_facts(prompts, "counts") or {}
    statuses, samples = _added(completions), _added(tokens)
    return [
        SourceCounts(name, read.get(name, {}), statuses.get(name, {}), samples.get(name, {}))
        for name in dict.fromkeys([*read, *statuses, *samples])
    ]


def retokenized(completions: Iterable[str]) -> int:
    """Completions whose ids were made from a server's text."""
    return sum(provenance.parquet_facts(path, "retokenized") or 0 for path in completions)


def _added(paths: Iterable[str]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for path in paths:
        for source, counts in (provenance.parquet_facts(path, "counts") or {}).items():
            total[source].update(counts)
    return {source: dict(counts) for source, counts in total.items()}


@dataclass(frozen=True)
class SourceMasks:
    """Loss masks of a source. `finished` and `cut` are rows per bin of `Masks.edges`; `common` is the most frequent sum."""

    name: str
    rows: int
    tokens: int
    median: float
    common: int
    common_share: float
    finished: npt.NDArray[np.int64]
    cut: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Masks:
    """Histograms of mask sums on common `edges` [bins + 1], and totals over all sources."""

    edges: npt.NDArray[np.float64]
    sources: list[SourceMasks]
    rows: int
    tokens: int
    length: int


def masks(path: str) -> Masks:
    """Histograms of stats/mask.parquet by source."""
    table = provenance.read_parquet(path, ["source", "length", "mask_sum", "finished"])
    names = np.asarray(table["source"].to_pylist(), object)
    sums, finished = table["mask_sum"].to_numpy(), table["finished"].to_numpy()
    # Whole numbers of tokens per bin, so that no bin holds more values than its neighbour.
    highest = int(sums.max(initial=1))
    width = highest // BINS + 1
    edges = np.arange(0, highest + width + 1, width, dtype=np.float64)
    sources = []
    for name in sorted(set(names.tolist())):
        of_source = names == name
        own, values = sums[of_source], np.bincount(sums[of_source])
        sources.append(
            SourceMasks(
                name=name,
                rows=len(own),
                tokens=int(own.sum()),
                median=float(np.median(own)),
                common=int(values.argmax()),
                common_share=float(values.max() / len(own)),
                finished=np.histogram(sums[of_source & finished], edges)[0],
                cut=np.histogram(sums[of_source & ~finished], edges)[0],
            )
        )
    return Masks(edges, sources, len(sums), int(sums.sum()), int(table["length"].to_numpy().sum()))


Kind = Literal["context", "answer", "think", "gap"]


@dataclass(frozen=True)
class Run:
    """Neighbouring pieces of a sample of one kind: not supervised, supervised, supervised inside the think block, or left out.

    `pieces` are the tokens' texts; tokens that share a character are one piece.
    """

    kind: Kind
    pieces: list[str]


@dataclass(frozen=True)
class Sample:
    """A training sample to read: facts and its text."""

    id: str
    status: str
    finished: bool
    length: int
    supervised: int
    runs: list[Run]


def samples(
    path: str, manifest: Manifest, chat: Chat, per_source: int, head: int, tail: int
) -> dict[str, list[Sample]]:
    """The first `per_source` samples of every source in one shard of tokens, by source.

    Of a long sample `head` tokens from the start, `head` on either side of the answer's begin, and `tail` from the end are shown.
    """
    table = provenance.read_parquet(path)
    sources = table["source"].to_pylist()
    found: dict[str, list[Sample]] = {}
    for source in sorted(set(sources)):
        rows = islice((row for row, name in enumerate(sources) if name == source), per_source)
        found[source] = [_sample(table, row, manifest, chat, head, tail) for row in rows]
    return found


def _sample(table: Any, row: int, manifest: Manifest, chat: Chat, head: int, tail: int) -> Sample:
    one = table.slice(row, 1)
    ids, spans = Ragged.of(one["input_ids"])[0].tolist(), Ragged.of(one["spans"])[0].tolist()
    kinds = token_kinds(ids, spans, manifest.think_open, manifest.think_close)
    begin = spans[-2] if spans else 0
    shown = sorted({
        *range(min(head, len(ids))),
        *range(max(0, begin - head), min(begin + head, len(ids))),
        *range(max(0, len(ids) - tail), len(ids)),
    })  # fmt: skip
    return Sample(
        id=one["id"][0].as_py(),
        status=one["status"][0].as_py(),
        finished=one["finished"][0].as_py(),
        length=len(ids),
        supervised=sum(end - start for start, end in zip(spans[::2], spans[1::2])),
        runs=list(_runs(ids, kinds, shown, chat)),
    )


def token_kinds(
    ids: Sequence[int], spans: Sequence[int], think_open: int | None, think_close: int | None
) -> list[Kind]:
    """Kind of every token. A think block runs from its opening to its closing tag, both included, also when the tag that opens
    it stands in the prompt."""
    kinds: list[Kind] = ["context"] * len(ids)
    for start, end in zip(spans[::2], spans[1::2]):
        kinds[start:end] = ["answer"] * (end - start)
    thinking = False
    for place, token in enumerate(ids):
        thinking = thinking or token == think_open
        if thinking and kinds[place] == "answer":
            kinds[place] = "think"
        thinking = thinking and token != think_close
    return kinds


def _runs(ids: list[int], kinds: list[Kind], shown: list[int], chat: Chat) -> Iterable[Run]:
    """Runs of the tokens at the places `shown`, with a gap wherever places are left out."""
    start = 0
    while start < len(shown):
        place, end = shown[start], start + 1
        while end < len(shown) and shown[end] == shown[end - 1] + 1 and kinds[shown[end]] == kinds[place]:
            end += 1
        yield Run(kinds[place], pieces([ids[n] for n in shown[start:end]], chat))
        if end < len(shown) and (left := shown[end] - shown[end - 1] - 1):
            yield Run("gap", [f"{left:,}"])
        start = end


def pieces(ids: Sequence[int], chat: Chat) -> list[str]:
    """Texts of tokens; those that only together are a character are one piece. Joined, they are the decoded whole.

    A token is decoded behind the piece before it, because many tokenizers drop the space that a text's first token begins with.
    """
    found: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for place, token in enumerate(ids):
        pending.append(token)
        text = chat.decode([*before, *pending])[len(chat.decode(before)) :]
        if REPLACEMENT not in text or len(pending) == LONGEST_CHARACTER or place == len(ids) - 1:
            found.append(text)
            before, pending = pending, []
    return found
