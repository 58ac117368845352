"""Completions: each prompt's answer, from the row store where it is known, else from an engine.

    complete(rows, chat, manifest, config, run, what="completions") -> pyarrow.Table

`rows` are rows of prompts.parquet as dictionaries (``table.to_pylist()``), `config` the ``completions`` part of the config
(``job.config["completions"]``), `run` the job's ``job.run``. The table has `COMPLETIONS_SCHEMA`, in the order of `rows`.
"""

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow

from draftline import provenance
from draftline.chat import Chat
from draftline.digests import code_sha256
from draftline.engines import Request, Sampling, engine_version, open_engine
from draftline.engines.answers import BAD_SHARE, FEW, stop_end
from draftline.engines.dataset import recorded_answer
from draftline.errors import DraftlineError
from draftline.manifest import Manifest
from draftline.progress import Progress, say
from draftline.rows import Row, RowStore
from draftline.statuses import status

COMPLETIONS_SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("source", pyarrow.string()),
        ("prompt_ids", pyarrow.list_(pyarrow.int32())),
        ("completion_ids", pyarrow.list_(pyarrow.int32())),
        ("text", pyarrow.string()),
        ("reasoning", pyarrow.string()),
        ("finish_reason", pyarrow.string()),
        ("status", pyarrow.string()),
        ("thinking", pyarrow.bool_()),
        ("attempts", pyarrow.int32()),
        ("seed", pyarrow.int64()),
        ("assistant_spans", pyarrow.list_(pyarrow.int32())),
        ("retokenized", pyarrow.bool_()),
    ]
)
ATTEMPTS = 4
"""Tries of a row before its status is `error`."""
BACKOFF_SECONDS = 5.0
"""Wait before the second try; it doubles with each further one."""

Record = dict[str, Any]
"""A row of `COMPLETIONS_SCHEMA`."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine sees it. `limit`: new tokens it may get; `seed`: its own, whatever runs beside it."""

    id: str
    source: str
    ids: list[int]
    thinking: bool
    limit: int
    seed: int


def make_completions(
    prompts: str,
    output: str,
    chat: Chat,
    manifest: Manifest,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
    record: provenance.Record,
) -> None:
    """A prompts.parquet -> its completions.parquet. `config` is the ``completions`` part of the config."""
    table = complete(provenance.read_parquet(prompts).to_pylist(), chat, manifest, config, run, what=output)
    facts = {
        "sampling": config["sampling"],
        "engine": config["engine"],
        "engine_version": engine_version(config["engine"], run),
        "counts": count(table),
        "retokenized": count_retokenized(table),
    }
    provenance.write_parquet(output, table, record, facts)
    say(f"{output}: {total_counts(table) or 'no prompts'}")


def count_retokenized(table: pyarrow.Table) -> int:
    """Rows whose ids are not those that were sampled: they were made from a server's text."""
    return sum(map(bool, table["retokenized"].to_pylist()))


def bench_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``completions`` config of an evaluation set, from bench_completions' settings: greedy, because replay needs it."""
    evaluate = config["evaluate"]
    return {
        "engine": config["engine"],
        "max_new_tokens": evaluate["max_new_tokens"],
        "extend": {"share": 0, "max_new_tokens": evaluate["max_new_tokens"]},
        "sampling": asdict(Sampling()),
        "seed": 0,
        "thinking": float(evaluate["thinking"]),
        "loop": config["completions"]["loop"],
        "allow_retokenize": config["completions"].get("allow_retokenize", False),
    }


def count(table: pyarrow.Table) -> dict[str, dict[str, int]]:
    """Rows by source and status."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for source, found in zip(table["source"].to_pylist(), table["status"].to_pylist()):
        counts[source][found] += 1
    return {source: dict(sorted(counts[source].items())) for source in sorted(counts)}


def total_counts(table: pyarrow.Table) -> str:
    """Rows by status, in words."""
    words = [f"{number} {name}" for name, number in Counter(table["status"].to_pylist()).most_common()]
    if retokenized := count_retokenized(table):
        words.append(f"{retokenized} of them retokenized")
    return ", ".join(words)


def complete(
    rows: Sequence[Mapping[str, Any]],
    chat: Chat,
    manifest: Manifest,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
    what: str = "completions",
) -> pyarrow.Table:
    """A table of `COMPLETIONS_SCHEMA`, one row for each of `rows`, in their order. `what` heads the progress lines.

    Rows that no engine could answer have the status ``error``. Raises DraftlineError when the mask token occurs in a prompt
    or a completion, and when a prompt and its new tokens are longer than the target's context.
    """
    if config["engine"] == "dataset":
        records = _recorded(rows, chat, config, what)
    else:
        prompts = [as_prompt(row, chat, config) for row in rows]
        records = _generated(prompts, chat, manifest, config, run, what)
    found = {}
    for record in records:
        _check_mask_token(record, manifest)
        found[record["id"]] = record
    return pyarrow.Table.from_pylist([found[row["id"]] for row in rows], schema=COMPLETIONS_SCHEMA)


def share_holds(name: str, row_id: str, share: float) -> bool:
    """Whether a row belongs to a share of all rows: by its id, so that the choice moves with no other row."""
    return _hash(name, row_id) < share * 2**63


def _hash(*values: object) -> int:
    """63 bits over `values`."""
    return int(provenance.digest(list(values)), 16) >> 1


def as_prompt(row: Mapping[str, Any], chat: Chat, config: Mapping[str, Any]) -> Prompt:
    """A row of prompts.parquet as the engine gets it. `config` is the ``completions`` part of the config."""
    row_id, extend = row["id"], config["extend"]
    thinking = share_holds("thinking", row_id, config["thinking"])
    limit = config["max_new_tokens"]
    if share_holds("extend", row_id, extend["share"]):
        limit = max(limit, extend["max_new_tokens"])
    ids = chat.prompt_ids(orjson.loads(row["messages"]), row["tools"] and orjson.loads(row["tools"]), thinking)
    return Prompt(row_id, row["source"], ids, thinking, limit, seed=_hash(config["seed"], row_id))


def _recorded(rows: Sequence[Mapping[str, Any]], chat: Chat, config: Mapping[str, Any], what: str) -> Iterator[Record]:
    """Records of the answers that the data set holds. A row without one is an error, and the first says why."""
    refused = 0
    for row in rows:
        thinking = share_holds("thinking", row["id"], config["thinking"])
        prompt = Prompt(row["id"], row["source"], [], thinking, 0, seed=0)
        try:
            answer = recorded_answer(row, chat, thinking)
        except DraftlineError as error:
            refused += 1
            if refused == 1:
                say(f"{what}: {error}")
            yield _record(prompt, [], None, chat, config)
            continue
        completion = Row(answer.completion_ids, "stop")
        record = _record(prompt, answer.prompt_ids, completion, chat, config)
        yield {**record, "assistant_spans": [place for span in answer.spans for place in span]}
    if refused:
        say(f"{what}: {refused} of {len(rows)} rows hold no answer that fits the chat template; their status is error")


def _generated(
    prompts: Sequence[Prompt],
    chat: Chat,
    manifest: Manifest,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
    what: str,
) -> Iterator[Record]:
    """Records from the row store, then those that an engine completes, as it does.

    Raises DraftlineError when the engine answers nothing any more and many rows are left.
    """
    for prompt in prompts:
        _check_prompt(prompt, manifest)
    sampling = Sampling(**config["sampling"])
    settings = _answer_settings(manifest, config, sampling)
    # Apart, so that rows made from text are there for those only who allow them.
    with RowStore(settings) as store, RowStore({**settings, "retokenized": True}) as texts:
        stored = _stored(prompts, store, texts if config.get("allow_retokenize") else None)
        pending: dict[str, Prompt] = {}
        for prompt in prompts:
            row = stored.get(prompt.id)
            if row and row.complete(prompt.limit):
                yield _record(prompt, prompt.ids, stored.pop(prompt.id).within(prompt.limit), chat, config)
            else:
                pending[prompt.id] = prompt
        if len(pending) < len(prompts) or stored:
            say(
                f"{what}: {len(prompts) - len(pending)} of {len(prompts)} rows are in the store;"
                f" {len(stored)} more are continued"
            )
        if not pending:
            return
        with open_engine(config["engine"], manifest, run, chat) as engine:
            tally, reason = Tally(what, len(pending)), "no answer"  # A server may have taken minutes to start.
            for attempt in range(1, ATTEMPTS + 1):
                if attempt > 1:
                    say(f"{what}: {len(pending)} rows failed ({reason}); try {attempt} of {ATTEMPTS}")
                    time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 2))
                requests = [_request(prompt, stored.get(prompt.id)) for prompt in pending.values()]
                for request, result in engine.generate(requests, sampling):
                    if result.finish_reason == "error":
                        reason = result.error or reason
                        continue
                    prompt = pending.pop(request.id)
                    row = _row(request, result.ids, prompt.limit, chat.eos_token_ids, attempt)
                    begun = stored.get(prompt.id)
                    row = dataclasses.replace(row, retokenized=result.retokenized or bool(begun and begun.retokenized))
                    record = _record(prompt, prompt.ids, row, chat, config)
                    _check_mask_token(record, manifest)
                    (texts if row.retokenized else store).add(prompt.id, prompt.ids, row)
                    tally.add(len(result.ids), record["status"])
                    yield record
                if not pending:
                    return
        if len(pending) == len(requests) >= max(FEW, BAD_SHARE * len(prompts)):
            # Rows in error would make a finished shard, and what waits behind it would take it for all that there is.
            raise DraftlineError(
                f"{what}: {len(pending)} of {len(prompts)} rows failed {ATTEMPTS} times, and the last try answered none"
                f" ({reason}); see to the engine and run again: finished rows are kept"
            )
        for prompt in pending.values():
            tally.add(0, "error")
            yield _record(prompt, prompt.ids, None, chat, config)


def _stored(prompts: Sequence[Prompt], store: RowStore, texts: RowStore | None) -> dict[str, Row]:
    """Rows that are known already, by id; one made from text (in `texts`) only where no row as sampled is as complete."""
    wanted = {prompt.id: prompt.ids for prompt in prompts}
    found = store.find(wanted)
    if texts is not None:
        limits = {prompt.id: prompt.limit for prompt in prompts}
        for row_id, row in texts.find(wanted).items():
            known = found.get(row_id)
            if known is None or (row.complete(limits[row_id]) and not known.complete(limits[row_id])):
                found[row_id] = dataclasses.replace(row, retokenized=True)
    return found


class Tally:
    """Progress lines with tokens a second and rows by status."""

    def __init__(self, what: str, rows: int) -> None:
        self.progress, self.tokens, self.statuses = Progress(what, rows), 0, Counter[str]()

    def add(self, tokens: int, found: str) -> None:
        """A row ended."""
        self.tokens += tokens
        self.statuses[found] += 1
        rate = self.tokens / max(time.monotonic() - self.progress.started, 1e-9)
        self.progress.add(1, **{"tokens/s": round(rate)}, **self.statuses)


def _answer_settings(manifest: Manifest, config: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
    """All that changes an answer besides the prompt's ids. A greedy answer depends on no seed."""
    drawn = {} if sampling.greedy else {**asdict(sampling), "seed": config["seed"]}
    target = [manifest.config_sha256, manifest.weights_sha256, manifest.dtype]
    if manifest.trust_remote_code:
        target.append(code_sha256(Path(manifest.model)))
    return {
        "target": target,
        "stop": sorted(manifest.eos_token_ids),
        "engine": config["engine"],
        "sampling": drawn,
    }


def _request(prompt: Prompt, begun: Row | None) -> Request:
    sampled = begun.completion_ids if begun else []
    return Request(prompt.id, prompt.ids, sampled, prompt.limit - len(sampled), prompt.seed)


def _row(request: Request, ids: Sequence[int], limit: int, stop_ids: Sequence[int], attempt: int) -> Row:
    """A finished row: what was sampled earlier and now, up to the first stop token and the limit."""
    end = stop_end(ids, stop_ids)
    row = Row([*request.sampled_ids, *ids[:end]], "length" if end is None else "stop", attempt)
    return row.within(limit)


def _record(
    prompt: Prompt, prompt_ids: Sequence[int], row: Row | None, chat: Chat, config: Mapping[str, Any]
) -> Record:
    """A row of the artifact. Without `row` the engine gave none."""
    ids = row.completion_ids if row else []
    finish_reason = row.finish_reason if row else "error"
    reasoning, answer, sound = chat.split_think(ids, prompt_ids)
    content = ids[:-1] if finish_reason == "stop" else ids
    return {
        "id": prompt.id,
        "source": prompt.source,
        "prompt_ids": np.asarray(prompt_ids, dtype=np.int32),
        "completion_ids": np.asarray(ids, dtype=np.int32),
        "text": answer if row else None,
        "reasoning": reasoning if row else None,
        "finish_reason": finish_reason,
        "status": status(content, finish_reason, answer, sound, config["loop"]),
        "thinking": prompt.thinking,
        "attempts": row.attempts if row else ATTEMPTS,
        "seed": prompt.seed,
        "assistant_spans": [len(prompt_ids), len(prompt_ids) + len(ids)],
        "retokenized": None if row is None or config["engine"] == "dataset" else row.retokenized,
    }


def _check_prompt(prompt: Prompt, manifest: Manifest) -> None:
    if manifest.mask_token_id in prompt.ids:
        raise _mask_token_occurs(manifest, prompt.id, prompt.source)
    if len(prompt.ids) + prompt.limit > manifest.max_position_embeddings:
        raise DraftlineError(
            f"prompt {prompt.id} ({prompt.source}): {len(prompt.ids)} tokens and max_new_tokens {prompt.limit} exceed the"
            f" target's context of {manifest.max_position_embeddings}; lower max_new_tokens or prompts.max_tokens"
        )


def _check_mask_token(record: Record, manifest: Manifest) -> None:
    if any((record[name] == manifest.mask_token_id).any() for name in ("prompt_ids", "completion_ids")):
        raise _mask_token_occurs(manifest, record["id"], record["source"])


def _mask_token_occurs(manifest: Manifest, row_id: str, source: str) -> DraftlineError:
    return DraftlineError(
        f"config: target.mask_token_id: {manifest.mask_token_id}: occurs in the data (prompt {row_id} of {source});"
        " give the id of a token that is never used"
    )
