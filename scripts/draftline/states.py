"""Files of hidden states, read memory-mapped. `draftline.states_writer` makes them.

A part is one safetensors file (docs/artifacts.md).

Shapes: N samples, T tokens (of one sample, or of all), K tapped layers, H hidden size, F = K * H.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import torch
from safetensors import SafetensorError, safe_open

from draftline import provenance
from draftline.errors import DraftlineError
from draftline.storage import decode, tensor_dtypes

if TYPE_CHECKING:
    from draftline.manifest import Manifest

CONVENTION = "output of decoder layer i, 0-based, before any final norm; Hugging Face hidden_states[i+1]"
CODES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}

STATES_FACTS = ("layers", "convention", "storage", "dtype", "kernels", "versions")
"""Facts of hidden states that a drafter takes along and an evaluation states, of its own states and of training's."""

PARTS_AGREE = ("convention", "storage", "dtype", "kernels")
"""Facts in which all states that a drafter learns from must agree, besides target and layers."""


def difference(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], facts: Sequence[str]) -> str | None:
    """In which of `facts` the states `ours` and those called `name` differ, with both values; None where they agree."""
    differing = [fact for fact in facts if ours[fact] != theirs[fact]]
    return "; ".join(f"{fact} {ours[fact]}, in {name} {theirs[fact]}" for fact in differing) or None


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
            self.layers: list[int] = self.facts["layers"]
            with safe_open(str(path), framework="pt") as file:
                self._tensors = {name: file.get_tensor(name) for name in layout(0, 0, 0, 0, self.facts["storage"])}
            target = self.facts["target"]
        except (KeyError, ValueError, SafetensorError) as error:
            raise DraftlineError(f"{path}: no file of hidden states ({error}); move it away and run again") from None
        if manifest is not None and target["weights_sha256"] != manifest.weights_sha256:
            raise DraftlineError(
                f"{path}: hidden states of another target ({target['name']}, weights {target['weights_sha256'][:12]};"
                f" wanted {manifest.name}, {manifest.weights_sha256[:12]}); delete it and run again"
            )
        if layers is not None and list(layers) != self.layers:
            raise DraftlineError(f"{path}: tapped layers {self.layers}, wanted {list(layers)}; delete it and run again")
        self._offsets: list[int] = self._tensors["offsets"].tolist()
        self.ids: list[str] = [bytes(row).hex() for row in self._tensors["ids"].tolist()]
        self.lengths: list[int] = [end - start for start, end in zip(self._offsets, self._offsets[1:])]

    def __len__(self) -> int:
        return len(self.ids)

    def features(self, n: int) -> torch.Tensor:
        """Sample n's features [T, F] in storage dtype (fp8 as bf16), layers in ascending order."""
        return decode(self.stored(n))

    def stored(self, n: int) -> dict[str, torch.Tensor]:
        """Sample n's features as they lie in the file, by tensor."""
        return {name: self._rows(name, n) for name in tensor_dtypes(self.facts["storage"])}

    def input_ids(self, n: int) -> torch.Tensor:
        """Sample n's token ids, int64 [T]."""
        return self._rows("input_ids", n).long()

    def loss_mask(self, n: int) -> torch.Tensor:
        """Which of sample n's tokens are supervised, bool [T]."""
        return self._rows("loss_mask", n).bool()

    def _rows(self, name: str, n: int) -> torch.Tensor:
        rows: torch.Tensor = self._tensors[name][self._offsets[n] : self._offsets[n + 1]]
        return rows


def layout(samples: int, tokens: int, layers: int, hidden_size: int, storage: str) -> dict[str, dict[str, Any]]:
    """The tensors' entries in a safetensors header. Wider types come first, so that all are aligned in memory."""
    widths = {"scales": layers, "features": layers * hidden_size}
    shapes = {
        "offsets": (torch.int64, [samples + 1]),
        "input_ids": (torch.int32, [tokens]),
        **{name: (dtype, [tokens, widths[name]]) for name, dtype in tensor_dtypes(storage).items()},
        "ids": (torch.uint8, [samples, 16]),
        "loss_mask": (torch.uint8, [tokens]),
    }
    entries: dict[str, dict[str, Any]] = {}
    start = 0
    for name, (dtype, shape) in shapes.items():
        end = start + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    return entries
