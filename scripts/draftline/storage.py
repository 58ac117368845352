"""How features lie in a file: plain bf16 or fp32, or fp8 (e4m3) with a scale per token and tapped layer.

The scale brings a token's largest state in a layer to the largest number of fp8, so the outlier channels of real models keep
their value and the others keep three mantissa bits down to 1/28,672 of it (docs/decisions.md 19).

Shapes: T tokens, K tapped layers, H hidden size, F = K * H.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FP8 = "fp8_e4m3"
VALUE_BYTES = {"bf16": 2, "fp32": 4, FP8: 1}
SCALE_BYTES = 4
"""A scale is float32: in bf16 the error is the same and 2 bytes in some thousands are saved, but a scale can be rounded down."""
FP8_MAX = 448.0


def layer_bytes(storage: str, hidden_size: int) -> int:
    """Bytes of one token's state in one layer."""
    return hidden_size * VALUE_BYTES[storage] + (SCALE_BYTES if storage == FP8 else 0)


def of_bench(storage: str) -> str:
    """Storage of an evaluation set's states: what serving has, which never sees fp8 states (docs/decisions.md 19)."""
    return "bf16" if storage == FP8 else storage


def tensor_dtypes(storage: str) -> "dict[str, torch.dtype]":
    """The tensors that hold features, by name: `features` [T, F], for fp8 `scales` [T, K] too."""
    import torch

    if storage == FP8:
        return {"scales": torch.float32, "features": torch.float8_e4m3fn}
    return {"features": {"bf16": torch.bfloat16, "fp32": torch.float32}[storage]}


def encode(features_TF: "torch.Tensor", storage: str, layers: int) -> "dict[str, torch.Tensor]":
    """The tensors to store, made on the device of the features.

    In fp8 a state is off by at most 1/16 of itself, or 1/458,752 of its token's largest in that layer where that is more; over
    a token this is a relative RMS of 2 to 3%. A NaN or Inf makes its token's states of that layer NaN.
    """
    import torch

    if storage != FP8:
        return {name: features_TF.to(dtype) for name, dtype in tensor_dtypes(storage).items()}
    features_TKH = features_TF.view(len(features_TF), layers, -1).float()
    # The least normal float32 instead of zero: a token of zeros stays one.
    scales_TK = (features_TKH.abs().amax(-1) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    stored_TKH = (features_TKH / scales_TK[..., None]).to(torch.float8_e4m3fn)
    return {"scales": scales_TK, "features": stored_TKH.view_as(features_TF)}


def decode(stored: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
    """Features [T, F]: fp8 as bf16, whose rounding is 16 times finer, anything else as it is stored."""
    features_TF = stored["features"]
    if "scales" not in stored:
        return features_TF
    scales_TK = stored["scales"]
    features_TKH = features_TF.float().view(*scales_TK.shape, -1) * scales_TK[..., None]
    return features_TKH.bfloat16().view(features_TF.shape)
