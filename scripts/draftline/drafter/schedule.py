"""Length of training and learning rate by step: linear warm-up, then half a cosine down to zero."""

import math


def total_steps(epochs: int, samples: int, batch: int) -> int:
    """Optimizer steps of a whole training. Batches run over the seams of parts and epochs; only the last may be short."""
    return math.ceil(epochs * samples / batch)


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Rate of step 0..total-1; `warmup` is the share of all steps that climb to `peak`."""
    climb = round(warmup * total)
    if step < climb:
        return peak * (step + 1) / climb
    return peak * 0.5 * (1 + math.cos(math.pi * (step - climb) / (total - climb)))
