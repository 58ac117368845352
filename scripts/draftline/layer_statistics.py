"""What is looked at in every sample of hidden states: figures for the header, and layers that cannot be right.

Shapes: T tokens, K tapped layers, H hidden size, F = K * H, N samples.
"""

import math

import torch

from draftline.errors import DraftlineError

SUM, SQUARES, ZEROS, ABSMAX, CONSTANT = range(5)


def measure(features_TF: torch.Tensor, layers: int) -> torch.Tensor:
    """Figures [K, 5] float64 of one sample, on its device: sum, sum of squares, zeros, absmax, and 1 where constant.

    A layer is constant when all its tokens have the same state; a sample of one token, when its state is all zero. A NaN
    or an Inf in a layer makes its sum NaN or Inf.
    """
    features_TKH = features_TF.view(len(features_TF), layers, -1).double()
    low_KH, high_KH = features_TKH.amin(0), features_TKH.amax(0)
    absmax_K = torch.maximum(low_KH.abs(), high_KH.abs()).amax(1)
    constant_K = (low_KH == high_KH).all(1) if len(features_TF) > 1 else absmax_K == 0
    zeros_TKH = (features_TKH == 0).double()  # torch sums doubles several times faster than truth values
    sums = [figure_TKH.sum(2).sum(0) for figure_TKH in (features_TKH, features_TKH.square(), zeros_TKH)]
    return torch.stack([*sums, absmax_K, constant_K.double()], dim=1)


def refuse_broken(figures: torch.Tensor, layers: list[int], path: str, sample: str) -> None:
    """Raise DraftlineError with path, layer and sample id if a sample's figures [K, 5] cannot be a working model's."""
    for layer, figures_of_layer in zip(layers, figures.tolist()):
        if not math.isfinite(figures_of_layer[SUM]):
            problem = "holds NaN or Inf"
        elif figures_of_layer[ABSMAX] == 0:
            problem = "is all zero"
        elif figures_of_layer[CONSTANT]:
            problem = "has one state for all tokens"
        else:
            continue
        raise DraftlineError(
            f"{path}: layer {layer} {problem} in sample {sample}; look at target.dtype (float16 overflows), the kernels"
            " in the log and the weights"
        )


class LayerStatistics:
    """Figures of a part's samples, summed in the samples' order, whatever order they were computed in."""

    def __init__(self, samples: int, layers: int) -> None:
        self._figures_NKM = torch.zeros(samples, layers, 5, dtype=torch.float64)
        self._values = 0

    def add(self, n: int, figures: torch.Tensor, values: int) -> None:
        """Take in sample n: its figures [K, 5], of `values` numbers a layer."""
        self._figures_NKM[n] = figures
        self._values += values

    def by_layer(self) -> list[dict[str, float]]:
        """`mean`, `std`, `absmax` and `zero_fraction` of each layer; zeros for a part without samples."""
        count = max(self._values, 1)
        statistics = []
        for figures_NM in self._figures_NKM.unbind(1):
            mean, square, zero = (float(figures_NM[:, which].sum()) / count for which in (SUM, SQUARES, ZEROS))
            absmax = max(figures_NM[:, ABSMAX].tolist(), default=0.0)
            std = math.sqrt(max(square - mean**2, 0.0))
            statistics.append({"mean": mean, "std": std, "absmax": absmax, "zero_fraction": zero})
        return statistics
