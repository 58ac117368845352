"""Which kernels a model runs on, found by looking at the functions that its layers call.

transformers takes a layer's kernel from a package (fla, causal_conv1d) where it is installed, else a torch version of its
own, and says so in one warning. Features of the one are not those of the other, so each part's header names what ran.
"""

import inspect
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from torch import nn

from draftline.loading import decoder_layers

PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
}


def kernels(model: nn.Module, layer_types: list[str]) -> dict[str, Any]:
    """Per layer type of the loaded layers: the attention implementation, or each replaceable function's package.

    For example ``{"full_attention": "sdpa", "linear_attention": {"causal_conv1d_fn": "torch", "chunk_gated_delta_rule":
    "fla"}}``.
    """
    found: dict[str, Any] = {}
    for layer, kind in zip(decoder_layers(model), layer_types):
        if kind not in found:
            attention = model.config._attn_implementation  # type: ignore[union-attr]
            found[kind] = _of_functions(layer) if kind == "linear_attention" else attention
    return found


def versions() -> dict[str, str]:
    """Versions of the installed packages that decide on numerics."""
    installed: dict[str, str] = {}
    for module, distribution in PACKAGES.items():
        try:
            installed[module] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _of_functions(layer: nn.Module) -> dict[str, str]:
    """Package of every function with a replaceable implementation that the layer's own modules call."""
    return {
        name.removeprefix("torch_"): _package(implementation)
        for module in layer.children()
        for name, implementation in sorted(_replaceable(module))
    }


def _replaceable(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions named in a module's forward that transformers wrapped around a chosen `implementation`."""
    forward = inspect.unwrap(type(module).forward)
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if inspect.isfunction(function):
            chosen = inspect.getclosurevars(function).nonlocals.get("implementation")
            if chosen is not None:
                yield name, chosen


def _package(implementation: Callable[..., Any]) -> str:
    package = (implementation.__module__ or "").partition(".")[0]
    return "torch" if package == "transformers" else package
