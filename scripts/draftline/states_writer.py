"""Making a file of hidden states: samples are fetched and written by a thread while the target computes.

Lengths are known before the first forward, so every sample has its place in the file from the start: samples are computed in
any order and written where they belong, and memory holds a few samples whatever the size of the part. The header comes last,
into space kept for it (JSON may end in spaces), because it holds the statistics of what was written.

Shapes: N samples, T tokens (of one sample, or of all), K tapped layers, H hidden size, F = K * H.
"""

import contextlib
import hashlib
import itertools
import os
import queue
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from draftline import provenance
from draftline.errors import DraftlineError
from draftline.host_copies import HostCopies, computed
from draftline.layer_statistics import LayerStatistics, measure, refuse_broken
from draftline.states import CONVENTION, StatesReader, layout
from draftline.storage import decode, encode

QUEUE = 8
"""Samples computed but not yet on disk; the forward waits when there are more."""

FIGURES = "figures"
"""Name under which a sample's statistics travel beside its tensors."""

READ_BACK = 8
"""Samples of a part that are read again from the disk and compared with what was computed."""


@dataclass(frozen=True)
class Sample:
    """A row whose hidden states are wanted: `input_ids` [T] int32, `loss_mask` [T] bool, `id` 32 hex digits."""

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor


@contextlib.contextmanager
def write_states(
    path: str | Path,
    record: provenance.Record,
    samples: Sequence[Sample],
    layers: Sequence[int],
    hidden_size: int,
    storage: str,
    facts: Mapping[str, Any],
) -> "Iterator[StatesWriter]":
    """A writer that takes the features of `samples` in any order; the file appears when the block ends without error.

    `facts` are the header's, without `layers`, `convention`, `storage` and `statistics`, which are added. Raises
    DraftlineError for too small a disk before anything is computed, for a layer that is broken (`refuse_broken`) and for
    samples that come back from the disk different; OSError with the path when writing fails.
    """
    path = Path(path)
    with provenance.replacing(path) as temporary, open(temporary, "wb") as file:
        writer = StatesWriter(path, file.fileno(), record, samples, layers, hidden_size, storage, facts)
        try:
            yield writer
        except BaseException as error:
            writer.abandon(error)
            raise
        finally:
            writer.join()
        writer.finish()
        writer.compare(StatesReader(temporary))


class StatesWriter:
    """Takes features sample by sample (`put`); a thread of its own writes them. Made by `write_states`."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        record: provenance.Record,
        samples: Sequence[Sample],
        layers: Sequence[int],
        hidden_size: int,
        storage: str,
        facts: Mapping[str, Any],
    ) -> None:
        self._path, self._descriptor, self._record = path, descriptor, record
        self._samples, self._layers = samples, list(layers)
        self._facts = {**facts, "layers": self._layers, "convention": CONVENTION, "storage": storage}
        self._storage, self._width = storage, len(layers) * hidden_size
        self._starts = [0, *itertools.accumulate(len(sample.input_ids) for sample in samples)]
        self._layout = layout(len(samples), self._starts[-1], len(layers), hidden_size, storage)
        self._statistics = LayerStatistics(len(samples), len(layers))
        self._reserved = len(self._header()) + 128 * len(layers)  # four numbers of at most 24 digits come in later
        self._digests = dict.fromkeys(range(0, len(samples), max(len(samples) // READ_BACK, 1)), b"")
        self._copies = HostCopies()
        self._flusher = ThreadPoolExecutor(1, "states-flusher")
        self._flush: Future[None] = self._flusher.submit(lambda: None)
        self._written = 0
        self._error: BaseException | None = None
        self._require_space()
        self._queue: queue.Queue[tuple[int, dict[str, torch.Tensor], torch.cuda.Event | None] | None] = queue.Queue(
            QUEUE
        )
        self._thread = threading.Thread(target=self._work, name="states-writer", daemon=True)
        self._thread.start()

    def put(self, n: int, features_TF: torch.Tensor) -> None:
        """Hand over the features [T, F] of sample n, any float dtype and device. Waits while the queue is full."""
        if self._error is not None:
            raise self._error
        expected = (len(self._samples[n].input_ids), self._width)
        if features_TF.shape != expected:
            raise ValueError(f"sample {n}: features {tuple(features_TF.shape)}, expected {expected}")
        stored = encode(features_TF, self._storage, len(self._layers))
        stored[FIGURES] = measure(decode(stored), len(self._layers))
        self._queue.put((n, stored, computed(features_TF)))

    def abandon(self, error: BaseException) -> None:
        """Write nothing more: the file is not wanted."""
        self._error = self._error or error

    def join(self) -> None:
        """Wait for the writing thread to end, and for the disk."""
        self._queue.put(None)
        self._thread.join()
        self._flusher.shutdown()

    def finish(self) -> None:
        """Write everything but the features, the header last. Raises what stopped the writing thread, or the disk."""
        if self._error is not None:
            raise self._error
        self._flush.result()
        if self._written != len(self._samples):
            raise ValueError(f"{self._path}: {self._written} of {len(self._samples)} samples were put")
        empty = [torch.empty(0)]
        self._write_tensor("offsets", torch.tensor(self._starts))
        self._write_tensor("input_ids", torch.cat([s.input_ids.int() for s in self._samples] or empty))
        self._write_tensor("loss_mask", torch.cat([s.loss_mask.to(torch.uint8) for s in self._samples] or empty))
        self._write_tensor("ids", torch.tensor([list(bytes.fromhex(s.id)) for s in self._samples], dtype=torch.uint8))
        header = self._header().ljust(self._reserved)
        if len(header) != self._reserved:
            raise ValueError(f"{self._path}: header of {len(header)} bytes in a space of {self._reserved}")
        self._pwrite(len(header).to_bytes(8, "little") + header, 0)
        self._sync()

    def compare(self, written: StatesReader) -> None:
        """Raise DraftlineError if samples of the finished file are not what was computed."""
        for n, expected in self._digests.items():
            if _digest(written.stored(n)) != expected:
                raise DraftlineError(
                    f"{self._path}: sample {self._samples[n].id}: came back from the disk different from what was"
                    " computed; check the disk, then run again"
                )

    def _work(self) -> None:
        """The writing thread. After an error it goes on emptying the queue, so that `put` never waits for nobody."""
        while (item := self._queue.get()) is not None:
            if self._error is not None:
                continue
            try:
                self._write_sample(*item)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that computes
                self._error = error

    def _write_sample(self, n: int, stored: dict[str, torch.Tensor], ready: "torch.cuda.Event | None") -> None:
        stored = self._copies.fetch(stored, ready)
        figures = stored.pop(FIGURES)
        refuse_broken(figures, self._layers, str(self._path), self._samples[n].id)
        self._statistics.add(n, figures, stored["features"].numel() // len(self._layers))
        if n in self._digests:
            self._digests[n] = _digest(stored)
        for name, rows in stored.items():
            self._write_tensor(name, rows, self._starts[n] * rows.shape[1] * rows.itemsize)
        self._written += 1
        self._keep_flushing()

    def _keep_flushing(self) -> None:
        """Have the disk take what is written while more is computed: all of it at the end would take half as long again."""
        if self._flush.done():
            self._flush.result()
            self._flush = self._flusher.submit(self._sync)

    def _sync(self) -> None:
        """Bring to the disk what is written, and out of memory: a part is larger than what should be there instead."""
        with self._named():
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _header(self) -> bytes:
        facts = {**self._facts, "statistics": self._statistics.by_layer()}
        metadata = {name: orjson.dumps(value).decode() for name, value in facts.items()}
        metadata[provenance.KEY] = provenance.canonical(self._record).decode()
        text = orjson.dumps({"__metadata__": metadata, **self._layout})
        return text.ljust(-(-len(text) // 8) * 8)

    def _require_space(self) -> None:
        needed = 8 + self._reserved + max(entry["data_offsets"][1] for entry in self._layout.values())
        free = shutil.disk_usage(self._path.parent).free
        if needed > free:
            raise DraftlineError(
                f"{self._path}: takes {needed / 1e9:.3g} GB, its disk has {free / 1e9:.3g} GB free; free some space or"
                " move results/ to a larger disk"
            )

    def _write_tensor(self, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        """Write `tensor` from byte `start` of the place of the file's tensor `name` on."""
        self._pwrite(_bytes(tensor), 8 + self._reserved + self._layout[name]["data_offsets"][0] + start)

    def _pwrite(self, data: bytes | memoryview, start: int) -> None:
        rest = memoryview(data)
        with self._named():
            while rest:
                count = os.pwrite(self._descriptor, rest, start)
                rest, start = rest[count:], start + count

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the disk get the path of the part: a descriptor has none."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's memory."""
    array: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)


def _digest(stored: Mapping[str, torch.Tensor]) -> bytes:
    """SHA-256 over a sample's tensors as they are stored."""
    digest = hashlib.sha256()
    for tensor in stored.values():
        digest.update(_bytes(tensor))
    return digest.digest()
