"""A checkpoint's safetensors files by their headers: which tensor lies where, how large, and which are the text model's.

No tensor is read unless it is asked for, and no torch is needed until then.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from draftline.digests import sampled_digest
from draftline.errors import DraftlineError
from draftline.provenance import canonical, safetensors_header

if TYPE_CHECKING:
    import torch

TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
"""Where checkpoints keep the text model's backbone: wrappers first, since some have another ``model.`` part beside it."""
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """Place and shape of one tensor."""

    file: str
    shape: tuple[int, ...]


class Checkpoint:
    """The safetensors files of a folder.

    Raises DraftlineError naming the file when one is missing or cut short, or when the folder holds no text model with
    ``embed_tokens``, ``layers`` and ``norm``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self.files = _weight_files(folder)
        for name in self.files:
            path = folder / name
            try:
                header = safetensors_header(path)
            except FileNotFoundError:
                raise DraftlineError(f"{path}: missing, but {INDEX} names it; complete the download") from None
            except (ValueError, OSError, KeyError) as error:
                raise DraftlineError(f"{path}: damaged or cut short ({error}); download it again") from None
            header.pop("__metadata__", None)
            self.entries.update({key: Entry(name, tuple(value["shape"])) for key, value in header.items()})
        self.prefix = next((p for p in TEXT_PREFIXES if p + "embed_tokens.weight" in self.entries), "")
        for name in ("embed_tokens.weight", "norm.weight"):
            if self.prefix + name not in self.entries:
                raise DraftlineError(
                    f"{folder}: no tensor {name} of a text model; only decoders of the Llama and Qwen build can be targets"
                )
        self.head = next((name for name in HEAD_NAMES if name in self.entries), None)
        self.head_bias = "lm_head.bias" in self.entries

    def read(self, name: str) -> "torch.Tensor":
        """One tensor, in its own dtype, and nothing else."""
        from safetensors import safe_open

        with safe_open(self.folder / self.entries[name].file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def text_parameters(self, last_layer: int | None = None) -> int:
        """Parameters of the text model; without head and without layers above `last_layer` when that is given."""
        return sum(math.prod(entry.shape) for name, entry in self.entries.items() if self._wanted(name, last_layer))

    def blocks(self, last_layer: int | None = None) -> dict[str, int]:
        """Parameters of the same by block, in the order of a forward: embed_tokens, layers.0 .. layers.N, norm, lm_head.

        A tied head counts like any other: on another device than the embedding it is a copy.
        """
        found: dict[str, int] = {}
        for name, entry in self.entries.items():
            if self._wanted(name, last_layer):
                words = ["lm_head"] if name == self.head else name[len(self.prefix) :].split(".")
                block = ".".join(words[: 2 if words[0] == "layers" else 1])
                found[block] = found.get(block, 0) + math.prod(entry.shape)
        if last_layer is None:
            found.setdefault("lm_head", found["embed_tokens"])
        layers = sorted(
            (block for block in found if "." in block), key=lambda block: int(block.removeprefix("layers."))
        )
        last = [block for block in ("norm", "lm_head") if block in found]
        first = [block for block in found if block not in (*layers, *last)]
        return {block: found[block] for block in (*first, *layers, *last)}

    def _wanted(self, name: str, last_layer: int | None) -> bool:
        if name == self.head:
            return last_layer is None
        if not name.startswith(self.prefix):
            return False
        layer = re.match(r"layers\.(\d+)\.", name[len(self.prefix) :])
        return last_layer is None or layer is None or int(layer[1]) <= last_layer


def weights_sha256(checkpoint: Checkpoint) -> str:
    """SHA-256 over the weight files' names and sampled contents: other weights of the same shapes differ."""
    files = {name: sampled_digest(checkpoint.folder / name) for name in checkpoint.files}
    return hashlib.sha256(canonical(files)).hexdigest()


def _weight_files(folder: Path) -> list[str]:
    """Names of the weight files: what the index lists, else model.safetensors."""
    index = folder / INDEX
    if index.is_file():
        return sorted(set(orjson.loads(index.read_bytes())["weight_map"].values()))
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    raise DraftlineError(
        f"{folder}: no model.safetensors and no {INDEX}; give a folder of safetensors (other formats are not read)"
    )
