"""Whether a faster version of a function gives the numbers of the one for which it stands in."""

import torch

LARGER_ERROR = 2.0
"""Most that its error to float64 may be, in errors of the other: rounding in another order at times costs a bit."""


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
