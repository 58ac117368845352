"""The gate on the loss mask: are these answers worth training on, and do their hidden states fit on the disk?

Data whose answers are all the same few tokens looks healthy to everything but the distribution of mask sums. That is what is
read here, per source, over the rows that stopped by themselves: a row that was cut says nothing about how long answers are.
"""

import math
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftline import provenance
from draftline.gates import close_gate
from draftline.manifest import Manifest
from draftline.progress import say
from draftline.storage import layer_bytes
from draftline.tokens import EXAMPLES, Ragged, Samples, mask_sums, read_samples, supervised

TEXT_TOKENS = 24
"""Of a dominant answer, so many tokens are shown."""
STATUS_LIMITS = {"truncated": "truncated_share", "repetition": "looping_share", "empty": "empty_share"}
STATUS_WORDS = {"truncated": "truncated", "repetition": "loops", "empty": "empty"}

FEW = 50
"""Of fewer rows, a share must be over its limit beyond chance."""
CERTAINTY = 1.645
"""Standard deviations of a normal distribution that leave 5% above."""

Decode = Callable[[list[int]], str]


@dataclass
class SourceMasks:
    """What the checks need of one source: counts by status over all its completions, and its samples' masks.

    `sums` [rows] supervised tokens, `finished` [rows], `ids` and `answers` [rows]: sample ids, and the first supervised tokens.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    sums: list[npt.NDArray[np.int32]] = field(default_factory=list)
    finished: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """A share of a source that is over its limit. `excess` is by how much; `samples` are ids of rows that show it."""

    text: str
    key: str
    excess: float
    samples: list[str]


@dataclass
class Verdict:
    """The checks' result over all sources: figures for the report, failures with the worst first, and what was waived."""

    figures: dict[str, Any]
    limits: dict[str, Any]
    failures: list[str]
    waived: list[dict[str, Any]]


def collect(shards: Iterable[Samples]) -> dict[str, SourceMasks]:
    """Masks by source, shard after shard; only the first tokens of each answer stay in memory."""
    sources: dict[str, SourceMasks] = defaultdict(SourceMasks)
    for shard in shards:
        for source, counts in shard.counts.items():
            sources[source].counts.update(counts)
        for source, examples in shard.examples.items():
            for status, found in examples.items():
                sources[source].examples[status] = [*sources[source].examples[status], *found][:EXAMPLES]
        names = np.asarray(shard.table["source"].to_pylist(), object)
        ids = np.asarray(shard.table["id"].to_pylist(), object)
        finished = np.asarray(shard.table["finished"].to_pylist(), bool)
        sums, answers = mask_sums(shard.table["spans"]), _first_answers(shard)
        for source in dict.fromkeys(names.tolist()):
            rows = np.flatnonzero(names == source)
            masks = sources[source]
            masks.sums.append(sums[rows])
            masks.finished.append(finished[rows])
            masks.ids += ids[rows].tolist()
            masks.answers += [answers[row] for row in rows]
    return dict(sorted(sources.items()))


def _first_answers(shard: Samples) -> list[bytes]:
    """The first supervised tokens of each row, as int32 bytes: equal answers are equal keys."""
    ids, mask = supervised(shard.table)
    flat = ids[mask]
    ends = np.cumsum(mask_sums(shard.table["spans"]), dtype=np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    return [flat[start : min(end, start + TEXT_TOKENS)].tobytes() for start, end in zip(starts, ends)]


def judge(
    sources: Mapping[str, SourceMasks], settings: Mapping[str, Any], block_size: int, decode: Decode, where: str
) -> Verdict:
    """Check every source. `settings` is the config's ``mask_gate``, `where` names the data in messages."""
    limits = {**{key: value for key, value in settings.items() if key != "waive"}, "short_below": 2 * block_size}
    reasons = {waiver["source"]: waiver["reason"] for waiver in settings["waive"]}
    figures, failing, waived = {}, [], []
    for source, masks in sources.items():
        figures[source], findings = _check_source(masks, limits, decode)
        if not findings:
            continue
        message = _message(where, source, findings)
        if source in reasons:
            waived.append({"source": source, "reason": reasons[source], "failure": message})
        else:
            failing.append((max(finding.excess for finding in findings), message))
    failures = [message for _, message in sorted(failing, key=lambda entry: (-entry[0], entry[1]))]
    return Verdict(figures, limits, failures, waived)


def _check_source(
    masks: SourceMasks, limits: Mapping[str, Any], decode: Decode
) -> tuple[dict[str, Any], list[Finding]]:
    sums = np.concatenate([np.empty(0, np.int32), *masks.sums])
    rows = np.flatnonzero(np.concatenate([np.empty(0, bool), *masks.finished]))
    figures: dict[str, Any] = {
        "rows": len(sums),
        "finished": len(rows),
        "supervised_tokens": int(sums.sum(dtype=np.int64)),
        "counts": dict(sorted(masks.counts.items())),
    }
    findings: list[Finding] = []

    def limit(key: str, found: int, of: int, text: str, samples: list[str]) -> None:
        # A single row is no share: of four answers one may be short.
        share = least_share(found, of) if 0 < of < FEW else found / max(of, 1)
        if found > 1 and share > limits[key]:
            findings.append(Finding(f"{text} (mask_gate.{key}: {limits[key]})", key, found / of - limits[key], samples))

    if len(rows):
        figures["dominant"] = dominant = _dominant(masks, sums, rows, decode)
        if len(rows) >= limits["dominant_rows"]:
            text = (
                f"{dominant['rows']} of {len(rows)} answers that stopped by themselves ({dominant['share']:.1%}) have exactly"
                f" {dominant['mask_sum']} supervised tokens, like {dominant['text']!r}"
            )
            limit("dominant_share", dominant["rows"], len(rows), text, dominant["samples"])
        short = rows[sums[rows] < limits["short_below"]]
        figures["short"] = {"rows": len(short), "share": _share(len(short), len(rows))}
        text = (
            f"{len(short)} of {len(rows)} answers that stopped by themselves ({len(short) / len(rows):.1%}) have fewer than"
            f" {limits['short_below']} supervised tokens"
        )
        limit("short_share", len(short), len(rows), text, [masks.ids[row] for row in short[:EXAMPLES]])
    total = sum(count for name, count in masks.counts.items() if name not in ("kept", "no_anchor"))
    for status, key in STATUS_LIMITS.items():
        found = masks.counts[status]
        figures[key] = _share(found, total)
        text = f"{found} of {total} completions ({found / max(total, 1):.1%}) are {STATUS_WORDS[status]}"
        limit(key, found, total, text, masks.examples[status])
    return figures, findings


def _dominant(
    masks: SourceMasks, sums: npt.NDArray[np.int32], rows: npt.NDArray[np.intp], decode: Decode
) -> dict[str, Any]:
    """The mask sum that most of `rows` have, and the text that most rows with it share."""
    values, found = np.unique(sums[rows], return_counts=True)
    value = int(values[np.argmax(found)])
    alike = rows[sums[rows] == value]
    answer = Counter(masks.answers[row] for row in alike).most_common(1)[0][0]
    more = " ..." if value > TEXT_TOKENS else ""
    return {
        "mask_sum": value,
        "rows": len(alike),
        "share": _share(len(alike), len(rows)),
        "text": decode(np.frombuffer(answer, np.int32).tolist()) + more,
        "samples": [masks.ids[row] for row in alike if masks.answers[row] == answer][:EXAMPLES],
    }


def least_share(found: int, of: int) -> float:
    """The share that `found` of `of` rows show beyond chance: Wilson's lower bound at one-sided 95%.

    Two of eight rows are no sign that over a fifth of a source is bad, five are.
    """
    share, spread = found / of, CERTAINTY**2 / of
    return (share + spread / 2 - CERTAINTY * math.sqrt((share * (1 - share) + spread / 4) / of)) / (1 + spread)


def _share(found: int, of: int) -> float:
    return round(found / of, 4) if of else 0.0


def _message(where: str, source: str, findings: list[Finding]) -> str:
    keys = " and ".join(f"mask_gate.{finding.key}" for finding in findings)
    samples = dict.fromkeys(name for finding in findings for name in finding.samples)
    return (
        f"{where}: source {source}: {'; '.join(finding.text for finding in findings)};"
        f" samples {', '.join(list(samples)[:EXAMPLES])};"
        f" give the source better answers, or raise {keys}, or waive it with a reason in mask_gate.waive"
    )


def gate_shard(
    tokens: str, output: str, decode: Decode, manifest: Manifest, config: Mapping[str, Any], record: provenance.Record
) -> None:
    """tokens/{shard}.parquet -> gates/mask/{shard}.json: the masks of a shard, and the disk for its hidden states.

    `config` is the job's: ``mask_gate``, ``hidden_states.storage``, ``block_size`` and ``tapped_layers``.
    """
    samples = read_samples(tokens)
    verdict = judge(collect([samples]), config["mask_gate"], config["block_size"], decode, tokens)
    length = int(Ragged.of(samples.table["input_ids"]).lengths.sum(dtype=np.int64))
    layers, storage = config["tapped_layers"], config["hidden_states"]["storage"]
    each = layer_bytes(storage, manifest.hidden_size)
    needed = length * layers * each
    states = Path(output).parents[2] / "hidden_states"
    size = f"{length:,} tokens x {layers} layers x {each:,} bytes, {storage}"
    say(f"{tokens}: hidden states to come: {_bytes(needed)} ({size})")
    room = _room(states, Path(output).stem)
    if needed > room:
        verdict.failures.append(
            f"{states}: the hidden states of {tokens} take {_bytes(needed)} ({size}), the disk has room for"
            f" {_bytes(room)}; free some space, move results/ to a larger disk, or lower hidden_states.layers"
        )
    figures = {
        "sources": verdict.figures,
        "hidden_states": {
            "tokens": length,
            "layers": layers,
            "hidden_size": manifest.hidden_size,
            "storage": storage,
            "bytes": needed,
        },
    }
    close_gate(output, record, figures=figures, limits=verdict.limits, failures=verdict.failures, waived=verdict.waived)


def _room(states: Path, shard: str) -> int:
    """Bytes that a shard's hidden states may take: what is free, and what its present files give back."""
    present = sum(file.stat().st_size for file in (states / shard).glob("*.safetensors"))
    place = next(folder for folder in (states, *states.parents) if os.path.exists(folder))
    return shutil.disk_usage(place).free + present


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def gate_all(
    tokens: list[str], output: str, decode: Decode, config: Mapping[str, Any], record: provenance.Record
) -> None:
    """All of tokens/ -> gates/mask.json: the same checks over all shards together."""
    sources = collect(read_samples(path) for path in tokens)
    where = str(Path(tokens[0]).parent)
    verdict = judge(sources, config["mask_gate"], config["block_size"], decode, where)
    verdict.failures += nothing_left(verdict, where)
    close_gate(
        output,
        record,
        figures={"sources": verdict.figures},
        limits=verdict.limits,
        failures=verdict.failures,
        waived=verdict.waived,
    )


def nothing_left(verdict: Verdict, where: str) -> list[str]:
    """The failure of having no sample at all, if that is so."""
    if any(figures["rows"] for figures in verdict.figures.values()):
        return []
    counts = sum((Counter(figures["counts"]) for figures in verdict.figures.values()), Counter[str]())
    found = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
    return [f"{where}: no sample is left to train on (completions: {found}); see tokens.keep and tokens.max_length"]
