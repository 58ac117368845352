"""Norms and gated MLPs of a model with their elementwise steps in one kernel, by torch's compiler.

Eager torch goes through memory at each step. An RMS norm of bf16 states in fp32 moves 48 bytes a value where 4 would do; over all
layers of a 27B target that and the activations between its products take a seventh of the time of a forward.
"""

import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from draftline.agreement import disagreement, failure
from draftline.compiler import compiled
from draftline.progress import say

ROWS = 300
MLP = {"gate_proj", "up_proj", "down_proj"}


def fuse(model: nn.Module) -> None:
    """Compile the norms and gated MLPs of a frozen model, all of a kind together, where the result agrees with float64."""
    kinds: dict[type[nn.Module], list[nn.Module]] = {}
    for module in model.modules():
        if _width(module):
            kinds.setdefault(type(module), []).append(module)
    for kind, modules in kinds.items():
        faster = compiled(kind.forward, whole=False)
        if reason := _disagreement(faster, modules[0]):
            say(f"{kind.__name__}: torch's eager steps, because compiled it {reason}")
            continue
        for module in modules:
            module.forward = types.MethodType(faster, module)


def fused(model: nn.Module) -> list[str]:
    """The kinds of modules in `model` that `fuse` has compiled, by name."""
    return sorted({type(module).__name__ for module in model.modules() if _compiled(module)})


@contextlib.contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Within the block no module runs compiled."""
    held = {module: module.forward for module in model.modules() if _compiled(module)}
    for module in held:
        del module.forward
    try:
        yield
    finally:
        for module, forward in held.items():
            module.forward = forward


def _compiled(module: nn.Module) -> bool:
    return hasattr(getattr(vars(module).get("forward"), "__func__", None), "_torchdynamo_orig_callable")


def _width(module: nn.Module) -> int:
    """Channels of what a norm or a gated MLP takes; 0 for any other module, and for torch's own norms, which are one kernel."""
    parameters = dict(module.named_parameters())
    if dict(module.named_children()).keys() >= MLP:
        return int(module.gate_proj.in_features)  # type: ignore[union-attr, arg-type]
    of_torch = type(module).__module__.startswith("torch.")
    if parameters.keys() == {"weight"} and parameters["weight"].dim() == 1 and not of_torch:
        return len(parameters["weight"])
    return 0


@torch.no_grad()
def _disagreement(faster: Callable[..., Any], module: nn.Module) -> str | None:
    """What speaks against the compiled forward of a module's kind on random input; None if nothing does."""
    some = next(module.parameters())
    draw = torch.Generator().manual_seed(0)
    shape = (1, ROWS, _width(module))
    inputs = [torch.randn(shape, generator=draw).to(some) for _ in inspect.signature(module.forward).parameters]
    try:
        exact = copy.deepcopy(module).double()(*(values.double() for values in inputs))
        found = faster(module, *inputs)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in many ways, and there is another version
        return failure(error)
    return disagreement(found, module(*inputs), exact)
