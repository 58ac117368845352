"""What made an artifact, written into the artifact itself, and the only way to write one.

An artifact carries a small record under the name ``draftline``: Parquet schema metadata, safetensors ``__metadata__``,
a JSON field, a PNG text chunk or a JSON script element of an HTML page::

    {"rule": "tokens", "id": "9f...", "settings": "1c...", "inputs": {"results/completions/0000.parquet": "e3..."}}

``settings`` names the settings file (`draftline.settings`), ``inputs`` the records of the artifacts that were read, and
``id`` is a hash over these and the output's path. It holds no time and no host, so equal work gives equal files.

Files are written beside their place and renamed, so a reader never meets half of one, whatever was killed.
"""

import contextlib
import glob
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from draftline.errors import DraftlineError

if TYPE_CHECKING:
    import pyarrow
    import torch

KEY = "draftline"
HTML_OPEN = f'<script type="application/json" id="{KEY}">'

Record = dict[str, Any]


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of `value`'s canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()[:16]


def identity(path: str, settings: str, inputs: Mapping[str, str]) -> str:
    """Id of the job whose first output is `path`, from its settings hash and its inputs' ids (path -> id)."""
    return digest([path, settings, dict(inputs)])


def read(path: str | Path) -> Record:
    """The record inside an artifact.

    Raises DraftlineError with the path when the file is torn, of another kind, or not made by Draftline.
    """
    path = Path(path)
    try:
        record = _READERS[path.suffix](path)
    except FileNotFoundError:
        raise DraftlineError(f"{path}: no such file; make it with: snakemake {path}") from None
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise DraftlineError(f"{path}: damaged or cut short ({error}); delete it and run again") from None
    if not isinstance(record, dict) or not {"rule", "id", "settings", "inputs"} <= record.keys():
        raise DraftlineError(f"{path}: was not made by Draftline (no record inside); move it away and run again")
    return record


TOKENIZER = "tokenizer.json"
"""`tokenizers` refuses further keys at the top of its file, and ignores them inside "model": the record stands there."""


def _read_json(path: Path) -> Any:
    value = orjson.loads(path.read_bytes())
    return (value["model"] if path.name == TOKENIZER else value).get(KEY)


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_schema(path).metadata or {}
    text = metadata.get(KEY.encode())
    return text and orjson.loads(text)


def _read_safetensors(path: Path) -> Any:
    text = safetensors_header(path).get("__metadata__", {}).get(KEY)
    return text and orjson.loads(text)


def safetensors_header(path: str | Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, checked against the file's size. ValueError when the file is cut."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        size = os.fstat(file.fileno()).st_size
        if length > size - 8:
            raise ValueError("header longer than the file")
        header: dict[str, Any] = orjson.loads(file.read(length))
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if size != 8 + length + end:
        raise ValueError(f"{size} bytes where its header says {8 + length + end}")
    return header


PNG = b"\x89PNG\r\n\x1a\n"
PNG_KEY = KEY.encode() + b"\0"


def _read_png(path: Path) -> Any:
    data = path.read_bytes()
    chunk = _png_chunk(data)
    return chunk and orjson.loads(data[chunk.start + 8 + len(PNG_KEY) : chunk.stop - 4])


def _png_chunk(data: bytes) -> slice | None:
    """Where the record's chunk stands in a PNG, length and checksum included."""
    if not data.startswith(PNG):
        raise ValueError("not a PNG")
    start = len(PNG)
    while True:
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + 12 + length
        if kind == b"tEXt" and data.startswith(PNG_KEY, start + 8):
            return slice(start, end)
        if kind == b"IEND":
            return None
        start = end


def _read_html(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if not text.rstrip().endswith("</html>"):
        raise ValueError("the page has no end")
    start = text.index(HTML_OPEN) + len(HTML_OPEN)
    return orjson.loads(text[start : text.index("</script>", start)])


_READERS = {
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".safetensors": _read_safetensors,
    ".png": _read_png,
    ".html": _read_html,
}


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`; what is written there takes `path`'s place when the block ends without error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp{path.suffix}"):
        left.unlink(missing_ok=True)  # by a writer that was killed: a path has one writer at a time
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        os.chmod(temporary, mode)  # safetensors makes its files readable for their owner alone
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: Mapping[str, Any], record: Record) -> None:
    """Write a JSON artifact: `value`'s keys, then the record."""
    with replacing(path) as temporary:
        options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
        temporary.write_bytes(orjson.dumps({**value, KEY: record}, option=options))


def write_tokenizer(path: str | Path, value: Mapping[str, Any], record: Record) -> None:
    """Write a tokenizer.json: `value` as `tokenizers` gives it, with the record inside."""
    with replacing(path) as temporary:
        whole = {**value, "model": {**value["model"], KEY: record}}
        temporary.write_bytes(orjson.dumps(whole, option=orjson.OPT_APPEND_NEWLINE))


def write_parquet(
    path: str | Path, table: "pyarrow.Table", record: Record, facts: Mapping[str, Any] | None = None
) -> None:
    """Write a Parquet artifact (zstd). `facts` become further JSON values of the schema metadata."""
    import pyarrow.parquet

    metadata = {name: orjson.dumps(value) for name, value in {**(facts or {}), KEY: record}.items()}
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), temporary, compression="zstd")


def read_parquet(path: str | Path, columns: list[str] | None = None) -> "pyarrow.Table":
    """A Parquet artifact as a table; DraftlineError with the path when it is torn or not ours."""
    import pyarrow
    import pyarrow.parquet

    read(path)
    try:
        # Not read_table, which imports pyarrow.dataset and pandas: most of a second in every job.
        with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
            return file.read(columns)
    except (OSError, pyarrow.ArrowException) as error:
        raise DraftlineError(f"{path}: damaged or cut short ({error}); delete it and run again") from None


def parquet_facts(path: str | Path, name: str) -> Any:
    """The value that `write_parquet` stored as ``facts[name]``; None when there is none."""
    import pyarrow.parquet

    read(path)
    text = (pyarrow.parquet.read_schema(path).metadata or {}).get(name.encode())
    return orjson.loads(text) if text is not None else None


def write_safetensors(
    path: str | Path, tensors: "Mapping[str, torch.Tensor]", record: Record, facts: Mapping[str, Any] | None = None
) -> None:
    """Write a safetensors artifact. `facts` become further JSON values of ``__metadata__`` (strings stay as they are)."""
    from safetensors.torch import save_file

    metadata = {n: v if isinstance(v, str) else orjson.dumps(v).decode() for n, v in (facts or {}).items()}
    metadata[KEY] = canonical(record).decode()
    with replacing(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)
        _sort_header(temporary)


def _sort_header(path: Path) -> None:
    """Put a safetensors header's metadata in order, in place: the library writes it in the order of a random hash."""
    header = safetensors_header(path)
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    with open(path, "r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        file.write(orjson.dumps(header).ljust(length))


def restamp(path: str | Path, record: Record) -> None:
    """Replace the record inside an artifact and leave the rest as it is."""
    path = Path(path)
    read(path)
    if path.name == TOKENIZER:
        write_tokenizer(path, orjson.loads(path.read_bytes()), record)
    elif path.suffix == ".json":
        write_json(
            path, {name: value for name, value in orjson.loads(path.read_bytes()).items() if name != KEY}, record
        )
    elif path.suffix == ".parquet":
        table = read_parquet(path)
        facts = {name.decode(): orjson.loads(value) for name, value in table.schema.metadata.items()}
        write_parquet(path, table, record, facts | {KEY: record})
    elif path.suffix == ".safetensors":
        _restamp_safetensors(path, record)
    elif path.suffix == ".png":  # Its job makes others besides, from which much may have been made.
        _restamp_png(path, record)
    else:
        raise DraftlineError(f"{path}: a {path.suffix} file is cheap to make again; delete it instead of accepting it")


def _restamp_safetensors(path: Path, record: Record) -> None:
    header = safetensors_header(path)
    header["__metadata__"][KEY] = canonical(record).decode()
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, open(path, "rb") as old, open(temporary, "wb") as new:
        (length,) = struct.unpack("<Q", old.read(8))
        old.seek(8 + length)
        new.write(struct.pack("<Q", len(text)) + text)
        shutil.copyfileobj(old, new, 1 << 24)


def _restamp_png(path: Path, record: Record) -> None:
    data = path.read_bytes()
    chunk = _png_chunk(data)
    assert chunk  # The record was read.
    text = b"tEXt" + PNG_KEY + json.dumps(record, sort_keys=True).encode()
    new = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    with replacing(path) as temporary:
        temporary.write_bytes(data[: chunk.start] + new + data[chunk.stop :])
