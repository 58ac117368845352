"""How far numbers are from others, and whether a faster version of a function gives those of the one for which it stands in.

Shapes: T tokens, H hidden size.
"""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

LARGER_ERROR = 2.0
"""Most that its error to float64 may be, in errors of the other: rounding in another order at times costs a bit."""


class Distance:
    """How far states are from others, over all samples, token by token.

    Each token counts alike. The first token of a chat can have states hundreds of times as large as the others': added up by size,
    its rounding alone would be the error of a model.
    """

    def __init__(self) -> None:
        self.errors: list[torch.Tensor] = []
        self.cosines: list[torch.Tensor] = []

    def add(self, ours_TH: torch.Tensor, theirs_TH: torch.Tensor) -> None:
        """Take in a sample: one layer's states [T, H], and those that they are held against."""
        ours_TH, theirs_TH = ours_TH.double(), theirs_TH.double()
        self.errors.append((ours_TH - theirs_TH).square().sum(1) / theirs_TH.square().sum(1))
        self.cosines.append(functional.cosine_similarity(ours_TH, theirs_TH, dim=1))

    def figures(self) -> dict[str, float]:
        """`relative_rms`, a token's error by its own size, and `mean_cosine` and `min_cosine` by token."""
        cosines = torch.cat(self.cosines)
        return {
            "relative_rms": math.sqrt(torch.cat(self.errors).mean()),
            "mean_cosine": float(cosines.mean()),
            "min_cosine": float(cosines.min()),
        }


def distance(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> Distance:
    """Distance of states [T, H] from others, sample by sample."""
    found = Distance()
    for ours_TH, theirs_TH in zip(ours, theirs, strict=True):
        found.add(ours_TH, theirs_TH)
    return found


def disagreement(found: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> str | None:
    """What speaks against `found`, where `own` is the other's result and `exact` the float64 one; None if nothing does."""
    if found.shape != exact.shape:
        return f"gives {tuple(found.shape)} for {tuple(exact.shape)}"
    theirs, ours = (float((result.double() - exact).norm() / exact.norm()) for result in (found, own))
    allowed = LARGER_ERROR * max(ours, torch.finfo(own.dtype).eps)
    return None if theirs <= allowed else f"is off by {theirs:.1e}, over {allowed:.1e}"


def failure(error: Exception) -> str:
    """What speaks against a version that ended with `error`: its kind and first line."""
    return f"fails ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]})"
