"""torch's compiler, for functions that meet many shapes."""

from collections.abc import Callable
from typing import Any

import torch

VERSIONS = 64
"""Versions of a function that torch may compile, by rank, width and device; beyond them it would run eager and say nothing."""


def compiled(function: Callable[..., Any], whole: bool = True) -> Callable[..., Any]:
    """The function compiled for all lengths, as one graph if it is `whole`."""
    torch._dynamo.config.recompile_limit = VERSIONS  # type: ignore[attr-defined]
    return torch.compile(function, dynamic=True, fullgraph=whole)
