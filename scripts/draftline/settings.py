"""Settings files: exactly what makes a rule's artifacts, by content.

``results/settings/{rule}[.{drafter or bench}]/{hash}.json`` holds the config keys that the rule uses, the fingerprint
of its code and the SHA-256 of its source files. The file is never changed: other settings are another file. It is an
input of the rule, and the command reads it instead of any config.
"""

import contextlib
import copy
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftline.errors import DraftlineError
from draftline.provenance import canonical, replacing

ROOT = "results/settings"
RUN_FILE = "DRAFTLINE_RUN"
"""Environment variable with the path of the run file: resolved config and settings files by rule. The main process writes
it and its jobs read it, so that what they do was decided when the run started."""


def cut(config: Mapping[str, Any], keys: list[str]) -> dict[str, Any]:
    """The part of `config` under the dotted `keys`, in config's own nesting. A copy; missing keys are left out."""
    part: dict[str, Any] = {}
    for key in keys:
        value: Any = config
        *parents, last = key.split(".")
        for name in parents:
            value = value.get(name) or {}
        if last not in value:
            continue
        place = part
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = copy.deepcopy(value[last])
    return part


def settings_hash(values: Mapping[str, Any]) -> str:
    """Name of a settings file: 16 hex digits over its content."""
    return hashlib.sha256(canonical(values)).hexdigest()[:16]


def write(values: Mapping[str, Any], folder: Path) -> Path:
    """Write a settings file below `folder` unless it is there, and give its path."""
    path = folder / f"{settings_hash(values)}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".", suffix=".tmp", delete=False) as file:
            json.dump(values, file, indent=1, sort_keys=True, ensure_ascii=False)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    return path


def load(path: str | Path) -> dict[str, Any]:
    """Values of a settings file, checked against its name."""
    path = Path(path)
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DraftlineError(f"{path}: no such settings file; start the run again to write it") from None
    except ValueError as error:
        raise DraftlineError(f"{path}: not a settings file ({error}); delete it and start the run again") from None
    if settings_hash(values) != path.stem:
        raise DraftlineError(f"{path}: was edited (its content is not what its name says); delete it and run again")
    return values


def file_digest(path: Path, cache: Path) -> str:
    """SHA-256 of a source file, remembered under its path, size and time so that large files are read once."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    known = cache / key
    with contextlib.suppress(OSError):
        value = known.read_text()
        if len(value) == 64:  # Else whoever wrote it was killed, or the disk was full.
            return value
    with open(path, "rb") as file:
        value = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # A read-only results folder costs time, not correctness.
        cache.mkdir(parents=True, exist_ok=True)
        with replacing(known) as temporary:
            temporary.write_text(value)
    return value
