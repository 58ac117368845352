"""Drawing the next token: greedy, or by one uniform number for each row and step.

Shapes: B rows, V vocabulary, K candidates.
"""

from collections.abc import Sequence

import torch

from draftline.engines import Sampling


def draw(logits_BV: torch.Tensor, sampling: Sampling, seeds: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
    """Next ids [B] int64. Row b's draw depends on its logits, seed and step (how many it has sampled) and on nothing else."""
    if sampling.greedy:
        return logits_BV.argmax(-1)
    candidates_BK, probabilities_BK = distribution(logits_BV, sampling)
    uniform_B = torch.tensor([uniform(seed, step) for seed, step in zip(seeds, steps)], dtype=torch.float64)
    cumulative_BK = probabilities_BK.double().cumsum(-1)
    # Scaled by the sum, so that a uniform number below one always lies below the last candidate's.
    aim_B1 = uniform_B.to(logits_BV.device)[:, None] * cumulative_BK[:, -1:]
    place_B1 = torch.searchsorted(cumulative_BK, aim_B1, right=True)
    return candidates_BK.gather(-1, place_B1)[:, 0]


def distribution(logits_BV: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidate ids [B, K] and their weights [B, K], not normalized, likeliest first.

    Temperature, then top-k, then top-p over what is left, then min-p against the likeliest: transformers' order.
    """
    count = min(sampling.top_k or logits_BV.shape[-1], logits_BV.shape[-1])
    scores_BK, candidates_BK = (logits_BV.float() / sampling.temperature).topk(count)
    probabilities_BK = scores_BK.softmax(-1)
    before_BK = probabilities_BK.cumsum(-1) - probabilities_BK
    kept_BK = (before_BK < sampling.top_p) & (probabilities_BK >= sampling.min_p * probabilities_BK[:, :1])
    return candidates_BK, probabilities_BK * kept_BK


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) from a row's seed and step, by SplitMix64: no generator has to be kept or moved with the row."""
    mask = (1 << 64) - 1
    value = (seed + (step + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return ((value ^ (value >> 31)) >> 11) / (1 << 53)
