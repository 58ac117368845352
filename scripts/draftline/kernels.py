"""Which kernels a model runs on, found by looking at the functions that its layers call.

transformers takes a layer's kernel from a package (fla, causal_conv1d) where it is installed, else a torch version of its
own, and says so in one warning. Features of the one are not those of the other, so each part's header names what ran.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import nn

from draftline import fusion
from draftline.agreement import failure
from draftline.loading import decoder_layers
from draftline.progress import say

PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
}

STEPS = ("causal_conv1d_update", "torch_recurrent_gated_delta_rule")
"""Functions for one token at a time, which no forward over whole sequences calls."""


def kernels(model: nn.Module, layer_types: list[str]) -> dict[str, Any]:
    """Per layer type of the loaded layers: the attention implementation, or each replaceable function's package.

    For example ``{"full_attention": "sdpa", "linear_attention": {"causal_conv1d_fn": "torch", "chunk_gated_delta_rule":
    "fla"}}``; with the compiled kinds of modules under ``compiled``, where there are any.
    """
    found: dict[str, Any] = {}
    for layer, kind in zip(decoder_layers(model), layer_types):
        if kind not in found:
            attention = model.config._attn_implementation  # type: ignore[union-attr]
            found[kind] = _of_functions(layer) if kind == "linear_attention" else attention
    compiled = fusion.fused(model)
    return {**found, "compiled": compiled} if compiled else found


class Place(NamedTuple):
    """Where a layer's module looks for a replaceable function: under `name` in its file's `names`. `chosen` is what runs."""

    names: dict[str, Any]
    name: str
    function: Callable[..., Any]
    chosen: Callable[..., Any]

    @property
    def package(self) -> str:
        package = (self.chosen.__module__ or "").partition(".")[0]
        return "torch" if package == "transformers" else package

    @property
    def torch_version(self) -> Callable[..., Any]:
        """transformers' own version, for which the others stand in."""
        own: Callable[..., Any] = inspect.unwrap(self.function)
        return own

    def choose(self, implementation: Callable[..., Any]) -> None:
        """Let every model of this kind in the process call `implementation`, and `kernels` find it."""

        @functools.wraps(self.torch_version)
        def function(*arguments: Any, **options: Any) -> Any:
            return implementation(*arguments, **options)

        self.names[self.name] = function


def places(model: nn.Module) -> list[Place]:
    """The replaceable functions that a model's layers call, each once."""
    found = {
        (id(place.names), place.name): place
        for layer in decoder_layers(model)
        for module in layer.children()
        for place in _replaceable(module)
    }
    return list(found.values())


@contextlib.contextmanager
def torch_kernels(model: nn.Module) -> Iterator[None]:
    """Within the block a model's layers run on transformers' own torch versions, step by step, whatever packages are there."""
    before = places(model)
    for place in before:
        place.choose(place.torch_version)
    try:
        with fusion.eager(model):
            yield
    finally:
        for place in before:
            place.names[place.name] = place.function


@torch.no_grad()
def leave_what_fails(model: nn.Module) -> None:
    """Let a model's layers run on torch versions where the packages' kernels, which are written for GPUs, fail on its device."""
    found = [place for place in places(model) if place.package != "torch"]
    if not found:
        return
    try:
        model(torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device), use_cache=False)
    except Exception as error:  # noqa: BLE001 - a compiler behind it may fail in many ways, and there is another version
        packages = " and ".join(sorted({place.package for place in found}))
        say(f"kernels: torch's own, because a forward with {packages} {failure(error)}")
        for place in found:
            place.choose(place.torch_version)


def keep_apart(model: nn.Module) -> bool:
    """Whether the replaceable functions take sequences of any lengths one after the other and keep them apart."""
    return all(place.package != "torch" for place in places(model) if place.name not in STEPS)


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
    found = [place for module in layer.children() for place in _replaceable(module)]
    return {place.name.removeprefix("torch_"): place.package for place in sorted(found, key=lambda place: place.name)}


def _replaceable(module: nn.Module) -> Iterator[Place]:
    """Functions named in a module's forward that transformers, or `Place.choose`, wrapped around an `implementation`."""
    forward = inspect.unwrap(type(module).forward)
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if inspect.isfunction(function):
            chosen = inspect.getclosurevars(function).nonlocals.get("implementation")
            if chosen is not None:
                yield Place(forward.__globals__, name, function, chosen)
