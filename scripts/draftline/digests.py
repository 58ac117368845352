"""The identity of files too large to be read whole at every start.

A module of its own, because the code of hidden states and completions depends on it and on nothing else about sources.
"""

import hashlib
from pathlib import Path

CODE = "*.py"
"""Files of a model's own code, beside its weights."""
SAMPLES = 16
SAMPLE_BYTES = 65536


def sampled_digest(path: Path) -> str:
    """SHA-256 over a large file's size, its beginning and `SAMPLES` evenly spaced blocks: retrained weights differ in all."""
    size = path.stat().st_size
    value = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        value.update(file.read(1 << 20))
        for n in range(SAMPLES):
            file.seek(size * n // SAMPLES)
            value.update(file.read(SAMPLE_BYTES))
    return value.hexdigest()


def code_sha256(folder: Path) -> str:
    """SHA-256 over the code that a model's folder holds, with its files' names."""
    value = hashlib.sha256()
    for path in sorted(folder.glob(CODE)):
        value.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return value.hexdigest()
