"""How far states are from others."""

import pytest
import torch

from draftline.agreement import distance


def test_a_token_far_larger_than_the_others_counts_like_each_of_them():
    """Attention sinks: the error of one token is one token's, and does not hide those of the others."""
    draw = torch.Generator().manual_seed(0)
    exact_TH = torch.randn(100, 48, generator=draw)
    exact_TH[0] *= 1000
    of_the_first, of_the_others = exact_TH.clone(), exact_TH.clone()
    of_the_first[0] *= 1.02
    of_the_others[1:] *= 1.02
    assert distance([of_the_first], [exact_TH]).figures()["relative_rms"] == pytest.approx(0.002, rel=1e-3)
    assert distance([of_the_others], [exact_TH]).figures()["relative_rms"] == pytest.approx(0.0199, rel=1e-3)
