"""A target's files on a RAM disk or local disk: copied there once per node by the first job that loads the model.

`target.stage_to` names a folder; a copy is `{stage_to}/{first digits of weights_sha256}`, beside it lies its lock file. A job
holds the lock shared from loading until it ends, one that copies or removes holds it alone, and the kernel frees it however
the process ends. The list of files with their SHA-256 is written last, so a copy without it was killed and is made again.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import orjson
import psutil

from draftline import memory, sources
from draftline.checkpoint import Checkpoint, weights_sha256
from draftline.digests import CODE
from draftline.errors import DraftlineError
from draftline.manifest import Manifest
from draftline.progress import say

DIGITS = 16
"""So many digits of weights_sha256 are a copy's name."""
COPY = re.compile(f"[0-9a-f]{{{DIGITS}}}")
LIST = "draftline-copy.json"
"""A copy's files: name -> [bytes, SHA-256]."""
SMALL_FILES = (*sources.SMALL_FILES, CODE)
"""What a model folder has beside its weights that transformers or a server reads."""
IN_MEMORY = ("tmpfs", "ramfs")
BLOCK = 1 << 24

_held: list[TextIO] = []
"""Locks of copies that this process uses, until it ends."""


def staged(manifest: Manifest, stage_to: str | None) -> Manifest:
    """The manifest with its copy below `stage_to` as its model, made now if it is not there; itself for None.

    The copy cannot be removed while this process lives. Raises DraftlineError when there is too little room or memory, when
    the source is not the manifest's model, and when the copy comes back different or is not the whole model.
    """
    if stage_to is None:
        return manifest
    copy = Path(stage_to) / manifest.weights_sha256[:DIGITS]
    copy.parent.mkdir(parents=True, exist_ok=True)
    lock = _open(copy)
    _take(lock, fcntl.LOCK_SH, copy)
    while not _whole(copy, manifest):
        _take(lock, fcntl.LOCK_EX, copy)
        if not _whole(copy, manifest):  # Another job may have copied while this one waited.
            _copy(manifest, copy)
            if not _whole(copy, manifest):  # It would be copied again and again.
                shutil.rmtree(copy)
                raise DraftlineError(
                    f"{manifest.model}: its copy {copy} is not the whole model; keep all weight files of the model in one"
                    " folder and change none while it is copied, or set target.stage_to: null"
                )
        _take(lock, fcntl.LOCK_SH, copy)
    _held.append(lock)
    return replace(manifest, model=str(copy))


def unstage(stage_to: str) -> list[Path]:
    """Remove all copies below `stage_to`, whole or not, and nothing else that has a lock file there.

    Raises DraftlineError, naming the processes, when one is in use.
    """
    removed = []
    for path in sorted(Path(stage_to).glob("*.lock")):
        copy = path.with_suffix("")
        if not COPY.fullmatch(copy.name):
            continue
        with _open(copy) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DraftlineError(
                    f"{copy}: in use by {_holders(lock)}; wait until they end, or end them, and try again"
                ) from None
            if copy.exists():
                shutil.rmtree(copy)
                removed.append(copy)
    return removed


def _open(copy: Path) -> TextIO:
    return open(copy.with_suffix(".lock"), "a+", encoding="utf-8")


def _take(lock: TextIO, how: int, copy: Path) -> None:
    """Change to a shared lock or one alone, waiting for the jobs that stand in the way."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"{copy}: waiting for {_holders(lock)}")
        fcntl.flock(lock, how)


def _holders(lock: TextIO) -> str:
    """The processes that hold a lock, as the kernel lists them."""
    inode = os.fstat(lock.fileno()).st_ino
    rows = [line.split() for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines()]
    pids = {row[4] for row in rows if row[1] == "FLOCK" and row[5].endswith(f":{inode}")} - {str(os.getpid())}
    return f"process {', '.join(sorted(pids, key=int))}" if pids else "another process"


def _whole(copy: Path, manifest: Manifest) -> bool:
    """Whether the copy is complete and the model as it is now: by its list, sizes, samples of its weights, and the small files.

    A config beside the same weights may be another one by now. A source that is out of reach counts as unchanged.
    """
    try:
        files = orjson.loads((copy / LIST).read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return False
    paths = {copy / name: size for name, (size, _) in files.items()}
    if not all(path.is_file() and path.stat().st_size == size for path, size in paths.items()):
        return False
    for path in _small_files(Path(manifest.model)):
        if path.name not in files or files[path.name][1] != hashlib.sha256(path.read_bytes()).hexdigest():
            return False
    try:
        return weights_sha256(Checkpoint(copy)) == manifest.weights_sha256
    except DraftlineError:
        return False


def _copy(manifest: Manifest, copy: Path) -> None:
    """Copy the model's folder, comparing what was read with what came to lie there."""
    source = Checkpoint(Path(manifest.model))
    if weights_sha256(source) != manifest.weights_sha256:
        raise DraftlineError(
            f"{manifest.model}: other weights than results/target/manifest.json names; bring them back, or delete"
            " results/target and run again"
        )
    shutil.rmtree(copy, ignore_errors=True)  # What a killed job left.
    paths = {path.name: path for path in _needed(source)}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    _require_room(copy, sum(sizes.values()), manifest.model)
    say(f"copying {manifest.model} to {copy}: {sum(sizes.values()) / 1e9:.3g} GB")
    copy.mkdir()
    try:
        with ThreadPoolExecutor(4) as pool:
            digests = dict(zip(paths, pool.map(lambda path: _copy_file(path, copy / path.name), paths.values())))
        listed = {name: [sizes[name], digests[name]] for name in paths}
        temporary = copy / f".{LIST}"
        temporary.write_bytes(orjson.dumps(listed, option=orjson.OPT_INDENT_2))
        temporary.replace(copy / LIST)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)  # Memory or disk that nobody would know of.
        raise


def _needed(source: Checkpoint) -> Iterator[Path]:
    """The weight files that are in use, and the small files. A folder may hold the weights in other formats too."""
    yield from (source.folder / name for name in source.files)
    yield from _small_files(source.folder)


def _small_files(folder: Path) -> Iterator[Path]:
    for pattern in SMALL_FILES:
        yield from sorted(folder.glob(pattern))


def _copy_file(source: Path, place: Path) -> str:
    """SHA-256 of a file, copied to `place` and read again there."""
    read = hashlib.sha256()
    with open(source, "rb") as old, open(place, "wb") as new:
        while block := old.read(BLOCK):
            read.update(block)
            new.write(block)
        new.flush()
        os.fsync(new.fileno())
    with open(place, "rb") as new:
        written = hashlib.file_digest(new, "sha256")
    if written.digest() != read.digest():
        raise DraftlineError(f"{place}: came back different from {source}; check that disk or memory, then run again")
    return read.hexdigest()


def _require_room(copy: Path, needed: int, model: str) -> None:
    """Raise DraftlineError when a copy does not fit on its disk, or in memory where that disk is memory."""
    free, what = shutil.disk_usage(copy.parent).free, "room"
    if _file_system(copy.parent) in IN_MEMORY and memory.available() < free:
        free, what = memory.available(), "memory, in which this folder lies,"
    if needed > free:
        raise DraftlineError(
            f"{copy}: a copy of {model} takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB of {what} are free;"
            " free some (make unstage removes old copies), or let target.stage_to name a folder with more"
        )


def _file_system(folder: Path) -> str:
    """Type of the file system that a folder lies on."""
    places = [folder.resolve(), *folder.resolve().parents]
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[place] for place in places if place in mounts), "")
