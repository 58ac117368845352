"""Files of hidden states: written by a thread while the target computes, read memory-mapped.

A part is one safetensors file (docs/artifacts.md). Lengths are known before the first forward, so every sample has its
place in the file from the start: samples are computed in any order and written where they belong, and memory holds a few
samples whatever the size of the part. The header comes last, into space kept for it (JSON may end in spaces), because it
holds the statistics of what was written.

Shapes: N samples, T tokens (of one sample, or of all), K tapped layers, H hidden size, F = K * H.
"""

import hashlib
import os
import queue
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson
import torch
from safetensors import safe_open

from draftline import provenance
from draftline.errors import DraftlineError

if TYPE_CHECKING:
    from draftline.manifest import Manifest

CONVENTION = "output of decoder layer i, 0-based, before any final norm; Hugging Face hidden_states[i+1]"
STORAGE = {"bf16": torch.bfloat16, "fp32": torch.float32}
CODES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}

QUEUE = 8
"""Samples computed but not yet on disk; the forward waits when there are more."""

READ_BACK = 8
"""Samples of a part that are read again from the finished file and compared with what was computed."""


@dataclass(frozen=True)
class Sample:
    """A row whose hidden states are wanted: `input_ids` [T] int32, `loss_mask` [T] bool, `id` 32 hex digits."""

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor


class StatesReader:
    """A part of hidden states, memory-mapped: opening costs nothing, tensors are views of the file.

    Raises DraftlineError with the path for a file that is cut, not ours, of another target than `manifest`'s, or with
    other tapped layers than `layers`.
    """

    def __init__(
        self, path: str | Path, manifest: "Manifest | None" = None, layers: Sequence[int] | None = None
    ) -> None:
        self.path = Path(path)
        self.record = provenance.read(path)
        header = provenance.safetensors_header(path)
        try:
            self.facts: dict[str, Any] = {
                name: orjson.loads(text) for name, text in header["__metadata__"].items() if name != provenance.KEY
            }
            with safe_open(str(path), framework="pt") as file:
                self._tensors = {name: file.get_tensor(name) for name in _layout(0, 0, 0, torch.bfloat16)}
            self.layers: list[int] = self.facts["layers"]
            target = self.facts["target"]
        except (KeyError, ValueError) as error:
            raise DraftlineError(f"{path}: no file of hidden states (no {error}); delete it and run again") from None
        if manifest is not None and target["weights_sha256"] != manifest.weights_sha256:
            raise DraftlineError(
                f"{path}: hidden states of another target ({target['name']}, weights {target['weights_sha256'][:12]};"
                f" wanted {manifest.name}, {manifest.weights_sha256[:12]}); delete it and run again"
            )
        if layers is not None and list(layers) != self.layers:
            raise DraftlineError(
                f"{path}: tapped layers {self.layers}, wanted {list(layers)}; delete it and run again"
            )
        self._offsets: list[int] = self._tensors["offsets"].tolist()
        self.ids: list[str] = [bytes(row).hex() for row in self._tensors["ids"].tolist()]
        self.lengths: list[int] = [end - start for start, end in zip(self._offsets, self._offsets[1:])]

    def __len__(self) -> int:
        return len(self.ids)

    def features(self, n: int) -> torch.Tensor:
        """Sample n's features [T, F] in storage dtype, layers in ascending order."""
        return self._rows("features", n)

    def input_ids(self, n: int) -> torch.Tensor:
        """Sample n's token ids, int64 [T]."""
        return self._rows("input_ids", n).long()

    def loss_mask(self, n: int) -> torch.Tensor:
        """Which of sample n's tokens are supervised, bool [T]."""
        return self._rows("loss_mask", n).bool()

    def _rows(self, name: str, n: int) -> torch.Tensor:
        return self._tensors[name][self._offsets[n] : self._offsets[n + 1]]


class StatesWriter:
    """Writes a part: `put` samples in any order inside a ``with`` block; the file appears when the block ends well.

    `facts` are the header's, without `layers`, `convention`, `storage` and `statistics`, which the writer adds. Samples
    with NaN or Inf, or with a layer that is constant, are refused (DraftlineError with path, layer and sample). Errors
    of the writing thread, a full disk say, surface in `put` or at the end as OSError with the path.
    """

    def __init__(
        self,
        path: str | Path,
        record: provenance.Record,
        samples: Sequence[Sample],
        layers: Sequence[int],
        hidden_size: int,
        storage: str,
        facts: Mapping[str, Any],
    ) -> None:
        self.path, self.record, self.samples, self.layers = Path(path), record, samples, list(layers)
        self.dtype = STORAGE[storage]
        self.facts = {**facts, "layers": self.layers, "convention": CONVENTION, "storage": storage}
        self._starts = [0]
        for sample in samples:
            self._starts.append(self._starts[-1] + len(sample.input_ids))
        self._width = len(self.layers) * hidden_size
        self._layout = _layout(len(samples), self._starts[-1], self._width, self.dtype)
        statistics = [dict.fromkeys(("mean", "std", "absmax", "zero_fraction"), -2.2250738585072014e-308)] * len(layers)
        self._reserved = len(self._header(statistics))
        self._statistics = Statistics(len(samples), len(self.layers))
        spread = (len(samples) * k // READ_BACK for k in range(READ_BACK))
        self._digests: dict[int, bytes] = dict.fromkeys(spread, b"")
        self._queue: queue.Queue[tuple[int, torch.Tensor, torch.Tensor] | None] = queue.Queue(QUEUE)
        self._error: BaseException | None = None
        self._written = 0

    def __enter__(self) -> Self:
        self._require_space()
        with ExitStack() as stack:
            self._temporary = stack.enter_context(provenance.replacing(self.path))
            self._file = stack.enter_context(open(self._temporary, "wb"))
            self._thread = threading.Thread(target=self._work, name="states-writer", daemon=True)
            self._thread.start()
            self._stack = stack.pop_all()
        return self

    def put(self, n: int, features_TF: torch.Tensor) -> None:
        """Hand over the features [T, F] of sample n, any float dtype and device. Waits while the queue is full."""
        if self._error is not None:
            raise self._error
        expected = (len(self.samples[n].input_ids), self._width)
        if features_TF.shape != expected:
            raise ValueError(f"sample {n}: features {tuple(features_TF.shape)}, expected {expected}")
        stored_TF = features_TF.to(self.dtype)
        self._queue.put((n, stored_TF, measure(stored_TF, len(self.layers))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)
        self._thread.join()
        # `replacing` drops the temporary file when the stack is closed by an error.
        with self._stack:
            if error is not None:
                raise error
            if self._error is not None:
                raise self._error
            self._finish()

    def _work(self) -> None:
        """The writing thread: after an error it keeps emptying the queue, so that `put` never waits for nobody."""
        while (item := self._queue.get()) is not None:
            if self._error is not None:
                continue
            try:
                self._write(*item)
            except BaseException as error:  # noqa: BLE001 - raised again by put or __exit__
                self._error = error

    def _write(self, n: int, stored_TF: torch.Tensor, measured_KM: torch.Tensor) -> None:
        sample = self.samples[n]
        refuse_broken(measured_KM := measured_KM.cpu(), self.layers, f"{self.path}", sample.id)
        self._statistics.add(n, measured_KM, stored_TF.numel() // len(self.layers))
        data = _bytes(stored_TF.cpu())
        if n in self._digests:
            self._digests[n] = hashlib.sha256(data).digest()
        self._pwrite(data, "features", self._starts[n] * self._width * self.dtype.itemsize)
        self._written += 1

    def _finish(self) -> None:
        """Everything but the features, the header, and the look at what has arrived on disk."""
        if self._written != len(self.samples):
            raise ValueError(f"{self.path}: {self._written} of {len(self.samples)} samples were put")
        empty = [torch.empty(0)]
        self._pwrite(_bytes(torch.tensor(self._starts)), "offsets")
        self._pwrite(_bytes(torch.cat([s.input_ids.int() for s in self.samples] or empty)), "input_ids")
        self._pwrite(_bytes(torch.cat([s.loss_mask.to(torch.uint8) for s in self.samples] or empty)), "loss_mask")
        self._pwrite(b"".join(bytes.fromhex(sample.id) for sample in self.samples), "ids")
        header = self._header(self._statistics.by_layer()).ljust(self._reserved)
        if len(header) > self._reserved:
            raise ValueError(f"{self.path}: header of {len(header)} bytes in a space of {self._reserved}")
        self._pwrite(len(header).to_bytes(8, "little") + header, None)
        self._file.close()
        self._read_back()

    def _read_back(self) -> None:
        written = StatesReader(self._temporary)
        for n, expected in self._digests.items():
            if len(written) and hashlib.sha256(_bytes(written.features(n))).digest() != expected:
                raise DraftlineError(
                    f"{self.path}: sample {self.samples[n].id}: was read back different from what was computed;"
                    " check the disk, then run again"
                )

    def _header(self, statistics: list[dict[str, float]]) -> bytes:
        metadata = {name: orjson.dumps(value).decode() for name, value in self.facts.items()}
        metadata["statistics"] = orjson.dumps(statistics).decode()
        metadata[provenance.KEY] = provenance.canonical(self.record).decode()
        text = orjson.dumps({"__metadata__": metadata, **self._layout})
        return text.ljust(-(-len(text) // 8) * 8)

    def _require_space(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        needed = 8 + self._reserved + max(entry["data_offsets"][1] for entry in self._layout.values())
        free = shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise DraftlineError(
                f"{self.path}: takes {needed / 1e9:.3g} GB, its disk has {free / 1e9:.3g} GB free; free some space or"
                " move results/ to a larger disk"
            )

    def _pwrite(self, data: bytes | memoryview, tensor: str | None, start: int = 0) -> None:
        """Write `data` at byte `start` of a tensor's place, or of the file."""
        if tensor is not None:
            start += 8 + self._reserved + self._layout[tensor]["data_offsets"][0]
        rest = memoryview(data)
        try:
            while rest:
                count = os.pwrite(self._file.fileno(), rest, start)
                rest, start = rest[count:], start + count
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def _layout(samples: int, tokens: int, width: int, storage: torch.dtype) -> dict[str, dict[str, Any]]:
    """The tensors' entries in a safetensors header. Wider types come first, so that all are aligned in memory."""
    shapes = {
        "offsets": (torch.int64, [samples + 1]),
        "input_ids": (torch.int32, [tokens]),
        "features": (storage, [tokens, width]),
        "ids": (torch.uint8, [samples, 16]),
        "loss_mask": (torch.uint8, [tokens]),
    }
    layout: dict[str, dict[str, Any]] = {}
    start = 0
    for name, (dtype, shape) in shapes.items():
        end = start + torch.Size(shape).numel() * dtype.itemsize
        layout[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    return layout


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's memory."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
