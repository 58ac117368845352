"""The gate on a model folder: what serving engines would not notice, or notice too late.

They ignore tensors of unknown names, fall back on defaults for config keys they do not find, and run what they loaded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import torch
from torch import Tensor

from draftline import provenance
from draftline.drafter.config import SLIDING, DrafterConfig
from draftline.drafter.model import Drafter
from draftline.drafter.state import State
from draftline.drafter.weights import load_drafter
from draftline.errors import DraftlineError
from draftline.gates import close_gate
from draftline.heads import Heads

if TYPE_CHECKING:
    from draftline.manifest import Manifest

ROUNDING = 0.1
"""Largest relative RMS difference of the output between bf16 and fp32 weights. A bf16 weight is off by up to 2^-9, which
adds up to 1 to 4 % in small trained drafters whose attention is sharp. A larger one says that bf16 does not carry this drafter;
that the file holds the rounded weights themselves is checked to the bit."""

CONTEXT = 40
"""Features before the block of the equality test."""


def check_export(
    model: str, state: str, manifest: "Manifest", heads: str, output: str, record: provenance.Record
) -> None:
    """Check model.safetensors and the config.json beside it against the trained state and the target; write the gate."""
    config_path = Path(model).with_name("config.json")
    trained = State.load(state, moments=False)
    figures: dict[str, Any] = {}
    failures = [f"{config_path}: {problem}" for problem in config_problems(config_path, trained.config, manifest)]
    tensors = [f"{model}: {problem}" for problem in tensor_problems(model)]
    try:
        served = load_drafter(model)
    except DraftlineError as error:
        failures.append(str(error))
    else:
        if not failures and not tensors:
            figures = {"tensors": len(served.state_dict()), **differences(served, trained, Heads.load(heads))}
            failures += [f"{model}: {problem}" for problem in difference_problems(figures)]
    failures += tensors
    close_gate(output, record, figures=figures, limits={"relative_difference": ROUNDING}, failures=failures)


def config_problems(path: Path, trained: DrafterConfig, manifest: "Manifest") -> Iterator[str]:
    """What is wrong with a config.json, key by key: as the file says it, and as transformers' parser leaves it."""
    from transformers import Qwen3Config

    try:
        values = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        yield f"not readable ({error})"
        return
    nested = values.get("dflash_config") or {}
    slides = SLIDING in trained.layer_types
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": trained.block_size,
        "num_target_layers": manifest.num_layers,
        "hidden_size": manifest.hidden_size,
        "vocab_size": manifest.vocab_size,
        "num_hidden_layers": trained.num_hidden_layers,
        "num_attention_heads": trained.num_attention_heads,
        "num_key_value_heads": trained.num_key_value_heads,
        "head_dim": trained.head_dim,
        "intermediate_size": trained.intermediate_size,
        "rms_norm_eps": trained.rms_norm_eps,
        "rope_theta": trained.rope_theta,
        "max_position_embeddings": trained.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": list(trained.layer_types),
        "use_sliding_window": slides,
        "sliding_window": trained.sliding_window if slides else None,
    }
    of_block = {
        "block_size": trained.block_size,
        "mask_token_id": manifest.mask_token_id,
        "target_layer_ids": list(trained.target_layer_ids),
    }
    yield from _differing(values, expected, "")
    yield from _differing(nested, of_block, "dflash_config.")
    yield from _differing(values.get("rope_parameters") or {}, {"rope_theta": trained.rope_theta}, "rope_parameters.")
    ids, mask = nested.get("target_layer_ids") or [], nested.get("mask_token_id")
    if not ids or min(ids) < 0 or max(ids) > manifest.num_layers - 2:
        yield f"dflash_config.target_layer_ids: {ids}: not within 0..{manifest.num_layers - 2}"
    if not isinstance(mask, int) or not 0 <= mask < manifest.vocab_size:
        yield f"dflash_config.mask_token_id: {mask}: not below the target's vocab_size {manifest.vocab_size}"

    parsed = Qwen3Config.from_dict(values)
    rope = getattr(parsed, "rope_parameters", None) or {}
    kept = {key: getattr(parsed, key, None) for key in expected} | {"rope_theta": rope.get("rope_theta")}
    kept["dtype"] = str(kept["dtype"]).removeprefix("torch.")
    yield from _differing(kept, expected, "as transformers' Qwen3Config reads it: ")
    yield from _differing(
        getattr(parsed, "dflash_config", None) or {}, of_block, "as Qwen3Config reads it: dflash_config."
    )


def _differing(found: dict[str, Any], expected: dict[str, Any], place: str) -> Iterator[str]:
    for key, value in expected.items():
        if key not in found or found[key] != value:
            yield f"{place}{key}: {found.get(key)!r} where the trained drafter has {value!r}; export again"


def tensor_problems(path: str) -> Iterator[str]:
    """Tensors that are not bf16 or not finite. Names and shapes are the reader's business."""
    from safetensors.torch import load_file

    for name, tensor in load_file(path).items():
        if tensor.dtype != torch.bfloat16:
            yield f"{name}: {tensor.dtype} where engines expect bfloat16; export again"
        if not tensor.isfinite().all():
            yield f"{name}: holds NaN or Inf; the training diverged: lower its lr and train again"


def differences(served: Drafter, trained: State, heads: Heads) -> dict[str, float]:
    """Output of the served drafter on random features against the trained one's.

    `rounded_difference`: largest, from the trained weights rounded to bf16, 0 when the files hold just these;
    `relative_difference`: RMS from the fp32 weights', relative to their RMS.
    """
    exact, rounded = Drafter(trained.config), Drafter(trained.config)
    exact.load_state_dict(trained.weights())
    rounded.load_state_dict({name: tensor.bfloat16().float() for name, tensor in trained.weights().items()})
    output, same, wanted = (_output(drafter, heads) for drafter in (served, rounded, exact))
    return {
        "rounded_difference": float((output - same).abs().max()),
        "relative_difference": float((output - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()),
    }


def difference_problems(figures: dict[str, float]) -> Iterator[str]:
    """Figures of `differences` that are too large. A NaN is too large."""
    if figures["rounded_difference"] != 0:
        yield "does not compute what the trained weights, rounded to bf16, compute; export again"
    if not figures["relative_difference"] <= ROUNDING:
        yield f"output is {figures['relative_difference']:.3g} off the trained weights' (limit {ROUNDING}); export again"


@torch.no_grad()
def _output(drafter: Drafter, heads: Heads) -> Tensor:
    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    features_TF = torch.randn(CONTEXT, config.feature_size, generator=generator)
    tokens_B = torch.full((config.block_size,), config.mask_token_id)
    tokens_B[0] = torch.randint(config.vocab_size, (), generator=generator)
    anchor, start = torch.tensor([CONTEXT]), torch.tensor([0])
    context_TH = drafter.context(features_TF)
    return drafter(context_TH, torch.arange(CONTEXT), heads.embed(tokens_B)[None], anchor, start)  # type: ignore[no-any-return]
