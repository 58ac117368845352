"""What a drafter must know of the target's build, found by looking at the model itself: built without memory, not by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.checkpoint import Checkpoint
from draftline.errors import DraftlineError

if TYPE_CHECKING:
    from torch import nn

SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier")
"""Config keys of targets whose logits or embeddings are more than a matrix, which drafters do not reproduce."""


@dataclass(frozen=True)
class Architecture:
    """Class of the text model, whether its final norm multiplies by 1 + weight, whether embedding and head are one."""

    name: str
    norm_plus_one: bool
    tie_word_embeddings: bool


def examine(config: Any, text: Any, checkpoint: Checkpoint, trust_remote_code: bool) -> Architecture:
    """Build the text model of `config` on the meta device and compare it with its checkpoint.

    Raises DraftlineError when tensors are missing or of other shapes, or when embedding, final norm and head are not the
    plain ones that a drafter shares.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = checkpoint.folder
    with torch.device("meta"):
        try:
            model: Any = AutoModelForCausalLM.from_config(text, trust_remote_code=trust_remote_code)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise DraftlineError(
                f"{folder}: {text.model_type} is no causal language model ({str(error)[:100]})"
            ) from None
    for key in SCALES:
        if getattr(text, key, None) not in (None, 1.0):
            raise DraftlineError(f"{folder}: config.json: {key}: {getattr(text, key)}: such targets are not supported")
    if type(model.model.embed_tokens) is not torch.nn.Embedding or checkpoint.head_bias:
        raise DraftlineError(f"{folder}: {type(model).__name__}: its embedding or head is not plain; not supported")
    # A wrapper's word counts only where there is no head: what runs is the text model, and some wrappers tie by default.
    tied = bool(text.tie_word_embeddings or (config.tie_word_embeddings and checkpoint.head is None))
    _check_shapes(checkpoint, text, tied)
    return Architecture(type(model).__name__, _norm_plus_one(model.model.norm, text, folder), tied)


def _check_shapes(checkpoint: Checkpoint, text: Any, tied: bool) -> None:
    table = (text.vocab_size, text.hidden_size)
    wanted = {checkpoint.prefix + "embed_tokens.weight": table, checkpoint.prefix + "norm.weight": table[1:]}
    if not tied:
        if checkpoint.head is None:
            raise DraftlineError(
                f"{checkpoint.folder}: no lm_head.weight, and config.json ties no embeddings; complete it"
            )
        wanted[checkpoint.head] = table
    for name, shape in wanted.items():
        found = checkpoint.entries[name].shape
        if found != shape:
            raise DraftlineError(
                f"{checkpoint.folder}: {name}: {list(found)} where config.json says {list(shape)}; the files do not belong together"
            )
    last = f"{checkpoint.prefix}layers.{text.num_hidden_layers - 1}."
    if not any(name.startswith(last) for name in checkpoint.entries):
        raise DraftlineError(
            f"{checkpoint.folder}: no tensors of layer {text.num_hidden_layers - 1}, the last one by config.json;"
            " complete the download"
        )


def _norm_plus_one(norm: "nn.Module", text: Any, folder: Path) -> bool:
    """Which of the two RMS norms the final norm is, by what it computes."""
    import torch

    from draftline.heads import rms_norm

    generator = torch.Generator().manual_seed(0)
    weight_H, hidden_H = torch.randn(2, text.hidden_size, generator=generator)
    hidden_H *= text.rms_norm_eps**0.5  # Small enough that a wrong epsilon shows.
    norm = norm.to_empty(device="cpu")
    norm.load_state_dict({"weight": weight_H}, assign=True)
    with torch.no_grad():
        given = norm(hidden_H[None])[0]
    for plus_one in (False, True):
        if torch.allclose(given, rms_norm(hidden_H, weight_H, text.rms_norm_eps, plus_one), rtol=1e-4, atol=1e-5):
            return plus_one
    raise DraftlineError(f"{folder}: its final norm ({type(norm).__name__}) is no RMS norm; not supported")
