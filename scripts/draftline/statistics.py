"""Means with the uncertainty that the choice of prompts leaves."""

import numpy as np
from numpy.typing import ArrayLike


def bootstrap_interval(values: ArrayLike, resamples: int, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values` [N]: `resamples` draws of N values with replacement."""
    values_N = np.asarray(values, dtype=np.float64)
    draw = np.random.default_rng(seed)
    means = [draw.choice(values_N, size=len(values_N)).mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
