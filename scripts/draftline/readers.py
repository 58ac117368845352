"""Prompt files, row by row: JSON, JSON Lines (plain, gzip, zstd) and Parquet."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from draftline.conversations import KEYS, MalformedError
from draftline.errors import DraftlineError

Record = dict[str, Any]

EXTENSIONS = (".json", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BUFFER_BYTES = 1 << 20
PARQUET_ROWS = 1000


def read_records(path: Path) -> Iterator[tuple[str, Record | MalformedError]]:
    """The rows of a file with their place in it ("line 3", "row 7"); what cannot be read comes as the `MalformedError` it is.

    Files are streamed. Raises DraftlineError with the path for a file that is missing, empty, of an unknown kind, or cut.
    """
    kind = next((extension for extension in EXTENSIONS if path.name.endswith(extension)), None)
    if kind is None:
        if path.is_dir():
            raise DraftlineError(f"{path}: is a folder; name its files, for example {path}/*.jsonl")
        raise DraftlineError(f"{path}: unknown kind of prompt file; known: {', '.join(EXTENSIONS)}")
    read = {".json": _json, ".parquet": _parquet}.get(kind, _lines)
    empty = True
    try:
        for record in read(path):
            empty = False
            yield record
    except FileNotFoundError:
        raise DraftlineError(f"{path}: no such file; correct the path in the config or put the file there") from None
    except OSError as error:
        raise DraftlineError(f"{path}: cannot be read, damaged or cut short ({error}); replace the file") from None
    if empty:
        raise DraftlineError(f"{path}: is empty; replace the file or take it out of the config")


def _lines(path: Path) -> Iterator[tuple[str, Record | MalformedError]]:
    import pyarrow

    # Arrow decompresses by the file's extension and, unlike other readers, tells when a compressed stream ends too early.
    with pyarrow.input_stream(str(path), buffer_size=BUFFER_BYTES) as stream, io.BufferedReader(stream) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if line.strip():
                yield f"line {number}", _record(line)


def _record(line: bytes) -> Record | MalformedError:
    try:
        return _object(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        return MalformedError(_not_utf8(line) or f"not JSON ({error})")


def _object(value: Any) -> Record | MalformedError:
    return (
        value if isinstance(value, dict) else MalformedError(f"a row must be a JSON object, not {type(value).__name__}")
    )


def _not_utf8(text: bytes) -> str | None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte 0x{text[error.start]:02x} at position {error.start})"
    return None


def _json(path: Path) -> Iterator[tuple[str, Record | MalformedError]]:
    text = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    if not text.strip():
        return
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        cause = _not_utf8(text) or f"line {error.lineno}: not JSON ({error.msg})"
        remedy = "name it .jsonl if it holds a row a line" if text.lstrip().startswith(b"{") else "correct the file"
        raise DraftlineError(f"{path}: {cause}; {remedy}") from None
    for number, value in enumerate(content if isinstance(content, list) else [content], 1):
        yield f"row {number}", _object(value)


def _parquet(path: Path) -> Iterator[tuple[str, Record | MalformedError]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if name in KEYS]
            number = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=names):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", _without_nulls(row)
    except pyarrow.ArrowException as error:
        raise DraftlineError(f"{path}: damaged or cut short ({error}); replace the file") from None


def _without_nulls(value: Any) -> Any:
    """Without the keys that are null: a Parquet column gives every row all keys that any row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
