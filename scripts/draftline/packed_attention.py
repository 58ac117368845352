"""Attention over packed sequences by torch's own (SDPA), sequence by sequence, so that none sees another.

A kernel for packed sequences would need a package, and a mask of blocks rules the fast kernels out and is computed over all pairs. Some
sequences of hundreds of tokens fill a GPU each.

Shapes: N heads, S positions of all sequences, D channels of a head.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftline.kernels import keep_apart

NAME = "packed_sdpa"
KINDS = {"full_attention", "linear_attention"}
FURTHER = ("sliding_window", "position_bias", "softcap", "s_aux")
"""Options of transformers' attention functions that change what a token sees, or how much of it."""


def prefer_packed_attention(model: nn.Module) -> None:
    """Let a model take packed sequences, where its attention is SDPA over everything before a token, and all else keeps them apart."""
    config: Any = model.config
    kinds = getattr(config, "layer_types", None)
    plain = KINDS.issuperset(kinds) if kinds else getattr(config, "sliding_window", None) is None
    if plain and config._attn_implementation == "sdpa" and keep_apart(model):
        config._attn_implementation = NAME


def packs(model: nn.Module) -> bool:
    """Whether a model takes packed sequences with the kernels that it has now."""
    config: Any = model.config
    return bool(config._attn_implementation == NAME) and keep_apart(model)


def packed_sdpa(
    module: nn.Module,
    query_1NSD: torch.Tensor,
    key_1NSD: torch.Tensor,
    value_1NSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    lengths: list[int] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention outputs [1, S, N, D] of sequences of `lengths`; without these, every row is a sequence.

    Raises ValueError for attention that is more than causal.
    """
    more = [name for name, value in {**options, "attention_mask": attention_mask}.items() if value is not None]
    if found := {*FURTHER, "attention_mask"}.intersection(more):
        raise ValueError(f"its attention takes {', '.join(sorted(found))}")
    parts = (torch.split(state, lengths or state.shape[2], dim=2) for state in (query_1NSD, key_1NSD, value_1NSD))
    outputs = [
        sdpa_attention_forward(module, query, key, value, attention_mask=None, scaling=scaling, is_causal=True)[0]
        for query, key, value in zip(*parts)
    ]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(NAME, packed_sdpa)
