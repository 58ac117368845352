"""From prompt files to the prompts that a run asks: each row is kept, or left out for one counted reason."""

import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from draftline.chat import Chat
from draftline.conversations import NO_PROMPT, Conversation, MalformedError, NoPromptError, normalized
from draftline.errors import DraftlineError
from draftline.overlap import Overlap
from draftline.progress import say
from draftline.prompts import PromptRow, draw_of, prompt_id, shard_of
from draftline.readers import read_records
from draftline.sources import prompt_files

log = logging.getLogger("draftline")

REASONS = {
    "malformed": "not JSON, not UTF-8, a wrong type or an unknown role (prompts.on_error: skip)",
    **NO_PROMPT,
    "weight": "beyond the source's weight",
    "duplicate": "the same prompt as an earlier row of any source",
    "overlap": "overlaps an evaluation set",
    "template": "the chat template refuses it",
    "too_long": "more tokens than prompts.max_tokens",
    "limit": "beyond the source's limit",
}
"""Why a row is left out, in the order in which it is asked: a row counts under the first reason that holds."""

TELL_EVERY = 50_000

Counts = dict[str, int]


class Spool:
    """Rows on disk until all are known, so that memory holds their ids only. The file is gone when the process is."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the spool
        self._offsets: dict[str, int] = {}
        self._end = 0

    def __contains__(self, id: str) -> bool:
        return id in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, row: PromptRow) -> None:
        """Keep `row`, whose id must be new."""
        self._offsets[row.id] = self._end
        self._end += self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def drop(self, id: str) -> None:
        """Forget a row."""
        del self._offsets[id]

    def shards(self, count: int) -> Iterator[Iterator[PromptRow]]:
        """The rows of each of `count` shards, in order of id."""
        ids: list[list[str]] = [[] for _ in range(count)]
        for id in sorted(self._offsets):
            ids[shard_of(id, count)].append(id)
        return map(self._rows, ids)

    def _rows(self, ids: list[str]) -> Iterator[PromptRow]:
        for id in ids:
            self._file.seek(self._offsets[id])
            yield PromptRow(**orjson.loads(self._file.readline()))


class Curation:
    """Fills a `Spool` with the prompts of `settings` (the config's ``prompts``), source after source by name."""

    def __init__(self, settings: Mapping[str, Any], chat: Chat, evaluation: Overlap, spool: Spool) -> None:
        self.settings, self.chat, self.evaluation, self.spool = settings, chat, evaluation, spool
        self.counts: dict[str, Counts] = {}

    def run(self, workflow: Path) -> dict[str, Counts]:
        """Read all sources and give the counts of each: ``read``, ``kept`` and every reason of `REASONS`.

        Raises DraftlineError for a file that cannot be read, a malformed row (unless these are skipped), or no row left.
        """
        # By name: a prompt of two sources goes to the first, and the order in which a config lists them is no setting.
        sources = sorted(self.settings["sources"].items())
        files = {name: prompt_files(source["paths"], workflow) for name, source in sources}
        for name, source in sources:
            self._add_source(name, source, files[name])
        for line in table(self.counts):
            log.info(line)
        if not self.spool:
            first, *others = [path for paths in files.values() for path in paths]
            reasons = {reason: sum(counts[reason] for counts in self.counts.values()) for reason in REASONS}
            found = ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count)
            more = " and the other files" if others else ""
            remedy = "give other files, or a larger prompts.max_tokens or weight"
            raise DraftlineError(f"{first}{more}: no prompt is left ({found}); {remedy}")
        return self.counts

    def _add_source(self, name: str, source: Mapping[str, Any], paths: Iterable[Path]) -> None:
        counts = self.counts[name] = dict.fromkeys(("read", "kept", *REASONS), 0)
        kept: list[str] = []
        for path in paths:
            for conversation in self._conversations(path, counts):
                id = prompt_id(conversation.messages, conversation.tools)
                reason = self._reason_against(conversation, id, source["weight"])
                if reason is not None:
                    counts[reason] += 1
                    continue
                row = (name, conversation.name, conversation.messages, conversation.tools, conversation.response)
                self.spool.add(PromptRow(id, *row))
                kept.append(id)
        # Only now dropped, so that a later source may still bring what this one's limit leaves out.
        beyond = sorted(kept, key=draw_of)[source["limit"] :] if source["limit"] is not None else []
        for id in beyond:
            self.spool.drop(id)
        counts["limit"] = len(beyond)
        counts["kept"] = len(kept) - len(beyond)
        left_out = ", ".join(f"{counts[reason]} {reason}" for reason in REASONS if counts[reason])
        say(f"prompts: {name}: {counts['read']} rows read, {counts['kept']} kept{left_out and f' ({left_out})'}")

    def _conversations(self, path: Path, counts: Counts) -> Iterator[Conversation]:
        """The conversations of a file. Rows without one are counted."""
        number, malformed, cause = 0, 0, ""
        for number, (place, record) in enumerate(read_records(path), 1):
            counts["read"] += 1
            if number % TELL_EVERY == 0:
                say(f"prompts: {path.name}: {number} rows read, {len(self.spool)} prompts kept so far")
            try:
                if isinstance(record, MalformedError):
                    raise record
                yield normalized(record)
            except NoPromptError as error:
                counts[error.reason] += 1
            except MalformedError as error:
                if self.settings["on_error"] == "stop":
                    remedy = "correct it, or count and skip such rows with prompts.on_error: skip"
                    raise DraftlineError(f"{path}: {place}: {error}; {remedy}") from None
                malformed += 1
                cause = f"{place}: {error}"
                log.info(f"{path}: {cause}; skipped")
        if malformed == number:
            raise DraftlineError(f"{path}: all {number} rows are malformed ({cause}); replace the file")
        counts["malformed"] += malformed

    def _reason_against(self, conversation: Conversation, id: str, weight: float) -> str | None:
        if draw_of(id) >= weight:
            return "weight"
        if id in self.spool:
            return "duplicate"
        if self.evaluation.with_any(conversation.user_texts()):
            return "overlap"
        try:
            text = self.chat.render(conversation.messages, conversation.tools, thinking=False)
        except DraftlineError as error:
            log.info(f"prompt {id}: {error}; left out")
            return "template"
        # A token is at least a byte: short prompts need no tokenizer.
        limit = self.settings["max_tokens"]
        if len(text.encode()) > limit and len(self.chat.encode(text)) > limit:
            return "too_long"
        return None


def table(counts: Mapping[str, Counts]) -> list[str]:
    """Lines of a table: a source a row, a reason that occurs a column."""
    columns = ["read", "kept", *(reason for reason in REASONS if any(count[reason] for count in counts.values()))]
    width = max(map(len, ("source", *counts)))
    lines = [f"{'source':{width}}" + "".join(f"{column:>11}" for column in columns)]
    return lines + [
        f"{name:{width}}" + "".join(f"{count[column]:>11}" for column in columns) for name, count in counts.items()
    ]
