"""fla's Triton convolution in the place of transformers' torch one, where causal_conv1d is not installed and the numbers agree.

Shapes: B sequences, D channels, S positions, W taps.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from draftline.agreement import disagreement, failure
from draftline.kernels import Place, places
from draftline.loading import decoder_layers
from draftline.progress import say

NAME = "causal_conv1d_fn"
POSITIONS = 300


def prefer_fla_convolution(model: nn.Module) -> None:
    """Let the model's gated-delta-net layers use fla's convolution, unless there is a better one or it does not agree."""
    found = [place for place in places(model) if place.name == NAME and place.package == "torch"]
    if not found:
        return
    try:
        theirs = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    except (ImportError, AttributeError):
        return
    for place in found:
        ours = _adapted(theirs)
        if reason := _disagreement(ours, place, _weight(model)):
            say(f"convolution: torch, because fla's {reason}")
        else:
            place.choose(ours)


def _adapted(theirs: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """fla's function, which has channels last and gives its state too, with the options of transformers' function."""

    @functools.wraps(theirs)
    def convolution(
        hidden_BDS: torch.Tensor,
        weight_DW: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        output_BSD, _ = theirs(
            hidden_BDS.transpose(1, 2), weight_DW, bias, activation=activation, cu_seqlens=cu_seqlens
        )
        return output_BSD.transpose(1, 2)  # type: ignore[no-any-return]

    return convolution


def _weight(model: nn.Module) -> torch.Tensor:
    """The convolution's weight [D, W] in a layer that has one."""
    modules = (module for layer in decoder_layers(model) for module in layer.children())
    convolution: Any = next(module.conv1d for module in modules if hasattr(module, "conv1d"))
    weight_D1W: torch.Tensor = convolution.weight
    return weight_D1W.detach().squeeze(1)


@torch.no_grad()
def _disagreement(ours: Callable[..., torch.Tensor], place: Place, weight_DW: torch.Tensor) -> str | None:
    """What speaks against `ours` on random input of the model's shape and dtype; None if nothing does."""
    draw = torch.Generator().manual_seed(0)
    hidden_BDS = torch.randn(2, weight_DW.shape[0], POSITIONS, generator=draw).to(weight_DW)
    exact = place.torch_version(hidden_BDS.double(), weight_DW.double(), activation="silu")
    try:
        found = ours(hidden_BDS, weight_DW, activation="silu")
    except Exception as error:  # noqa: BLE001 - a compiler behind it may fail in many ways, and there is another version
        return failure(error)
    return disagreement(found, place.torch_version(hidden_BDS, weight_DW, activation="silu"), exact)
