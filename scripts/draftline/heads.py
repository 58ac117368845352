"""The parts of the target that a drafter shares, frozen: input embedding, final norm, output head.

Shapes: V vocabulary, H hidden size.
"""

from pathlib import Path

import orjson
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from draftline import provenance

EMBED, NORM, HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"


class Heads:
    """Embedding, final norm and head of a target. `lm_head_VH` is `embed_VH` itself when the target ties them."""

    def __init__(self, embed_VH: Tensor, norm_H: Tensor, lm_head_VH: Tensor, norm_plus_one: bool, eps: float) -> None:
        self.embed_VH, self.norm_H, self.lm_head_VH = embed_VH, norm_H, lm_head_VH
        self.norm_plus_one, self.eps = norm_plus_one, eps

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> "Heads":
        """Read heads.safetensors onto `device` as `dtype`. Raises DraftlineError when it is missing or damaged."""
        provenance.read(path)
        with safe_open(path, framework="pt", device=device) as file:
            facts = {name: orjson.loads(text) for name, text in file.metadata().items()}
            embed_VH = file.get_tensor(EMBED).to(dtype)
            norm_H = file.get_tensor(NORM).to(dtype)
            lm_head_VH = embed_VH if facts["tie_word_embeddings"] else file.get_tensor(HEAD).to(dtype)
        return cls(embed_VH, norm_H, lm_head_VH, facts["norm_plus_one"], facts["rms_norm_eps"])

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings of token ids: [...] int -> [..., H]."""
        return functional.embedding(ids, self.embed_VH)

    def logits(self, hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """Head on states that are normed already: [..., H] -> [..., V], or [..., len(vocabulary)] for a choice of ids."""
        head = self.lm_head_VH if vocabulary is None else self.lm_head_VH[vocabulary]
        return functional.linear(hidden, head)

    def normed(self, hidden: Tensor) -> Tensor:
        """The target's final RMS norm, in float32 inside: [..., H] -> [..., H] in the dtype of `hidden`."""
        return rms_norm(hidden, self.norm_H, self.eps, self.norm_plus_one)


def rms_norm(hidden: Tensor, weight_H: Tensor, eps: float, plus_one: bool) -> Tensor:
    """RMS norm over the last dimension, in float32 inside, times `weight_H` or, with `plus_one`, times 1 + `weight_H`."""
    wide = hidden.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal * (weight_H.float() + 1.0 if plus_one else weight_H.float())).to(hidden.dtype)
