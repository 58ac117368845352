"""Completions: each prompt's answer, from the row store where it is known, else from an engine.

    complete(rows, chat, manifest, config, run, what="completions") -> pyarrow.Table

`rows` are rows of prompts.parquet as dictionaries (``table.to_pylist()``), `config` the ``completions`` part of the config
(``job.config["completions"]``), `run` the job's ``job.run``. The table has `COMPLETIONS_SCHEMA`, in the order of `rows`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow

from draftline.chat import Chat
from draftline.manifest import Manifest

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
    ]
)


def complete(
    rows: Sequence[Mapping[str, Any]],
    chat: Chat,
    manifest: Manifest,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
    what: str = "completions",
) -> pyarrow.Table:
    """A table of `COMPLETIONS_SCHEMA`, one row for each of `rows`, in their order. `what` heads the progress lines."""
    raise NotImplementedError
