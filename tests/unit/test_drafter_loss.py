"""Anchors, labels, schedule and loss, against float64 and brute force."""

import itertools
import math

import pytest
import torch

from draftline.drafter.anchors import block_labels, draw_anchors, eligible, seeded
from draftline.drafter.loss import block_loss, default_gamma, slot_weights
from draftline.drafter.schedule import learning_rate, total_steps


def mask_of(text):
    return torch.tensor([letter == "x" for letter in text])


# Anchors and labels ---------------------------------------------------------------------------------------------------


def test_anchors_are_supervised_and_followed_by_a_supervised_token():
    assert eligible(mask_of("..xxx.x.xx")).tolist() == [2, 3, 8]


def test_anchors_are_drawn_without_repeats_in_order():
    mask = torch.arange(200) >= 20
    drawn = draw_anchors(mask, 32, seeded(0, 1, "id"))
    assert len(drawn) == 32
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert set(drawn.tolist()) <= set(range(20, 199))


def test_all_eligible_positions_are_anchors_where_there_are_few():
    assert draw_anchors(mask_of("..xxxx"), 32, seeded(0)).tolist() == [2, 3, 4]


def test_draws_follow_from_what_they_are_for():
    mask = torch.arange(200) >= 20
    drawn = [
        draw_anchors(mask, 8, seeded(*parts)).tolist()
        for parts in [(0, 1, "a"), (0, 1, "a"), (0, 2, "a"), (1, 1, "a"), (0, 1, "b")]
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(one) for one in drawn}) == 4


def test_every_eligible_position_is_drawn_equally_often():
    mask = torch.arange(30) >= 10
    counts = torch.zeros(30)
    for n in range(2000):
        counts[draw_anchors(mask, 4, seeded(n))] += 1
    expected = 2000 * 4 / 19
    assert counts[:10].sum() == counts[29] == 0
    assert ((counts[10:29] - expected).abs() < 5 * math.sqrt(expected)).all()


def test_labels_are_the_tokens_at_the_slots_own_positions():
    ids, mask = torch.arange(100, 112), mask_of("...xxxx.xxxx")
    labels, counts = block_labels(ids, mask, torch.tensor([3, 5, 9]), 4)
    assert labels.tolist() == [[104, 105, 106], [106, 0, 108], [110, 111, 0]]
    assert counts.tolist() == [[True, True, True], [True, False, True], [True, True, False]]


# Schedule -------------------------------------------------------------------------------------------------------------


def test_rate_climbs_to_its_peak_and_falls_to_zero():
    rates = [learning_rate(step, 100, 2e-3, 0.04) for step in range(100)]
    assert rates[:4] == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3])
    assert rates[4] == 2e-3
    assert rates[52] == pytest.approx(1e-3)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert 0 < rates[-1] < 1e-5


def test_rate_without_warmup_starts_at_its_peak():
    assert learning_rate(0, 10, 1.0, 0.0) == 1.0


def test_steps_count_batches_over_the_seams_of_epochs():
    assert total_steps(12, 638, 6) == 1276
    assert total_steps(2, 20, 3) == 14


# Loss -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "gamma", "total"), [(16, 7, 6.631), (10, 5, 4.605), (8, 4, 3.735)])
def test_weights_sum_to_the_published_values(block, gamma, total):
    assert default_gamma(block) == gamma
    assert float(slot_weights(block, gamma).sum()) == pytest.approx(total, abs=5e-4)


def test_last_weight_of_a_block_of_16():
    assert float(slot_weights(16, 7)[-1]) == pytest.approx(math.exp(-2), rel=1e-6)


def test_gamma_between_and_beyond_the_published_sizes():
    assert [default_gamma(size) for size in (2, 4, 13, 32)] == pytest.approx([1, 2, 6, 14])


N, B, H, V = 5, 8, 12, 40


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, B - 1, H, generator=generator, requires_grad=True)
    head = torch.randn(V, H, generator=generator)
    labels = torch.randint(V, (N, B - 1), generator=generator)
    counts = torch.rand(N, B - 1, generator=generator) < 0.8
    counts[:, 0] = True
    return hidden, head, labels, counts


def written_out(hidden, head, labels, counts, gamma):
    """The formula, slot by slot, in float64."""
    total = weight = torch.zeros((), dtype=torch.float64)
    for n in range(len(labels)):
        for k in range(1, B):
            if counts[n, k - 1]:
                w = math.exp(-(k - 1) / gamma)
                logits = head.double() @ hidden[n, k - 1].double()
                total = total + w * (logits.exp().sum().log() - logits[labels[n, k - 1]])
                weight = weight + w
    return total / weight


@pytest.mark.parametrize("chunk", [1, 3 * V, 2**27])
def test_loss_and_gradient_equal_the_formula_for_any_chunk(case, chunk):
    hidden, *_ = case
    (expected,) = torch.autograd.grad(written_out(*case, 4.0), hidden)
    found = block_loss(*case, 4.0, logits=chunk)
    (gradient,) = torch.autograd.grad(3 * found.loss, hidden)
    assert found.loss.item() == pytest.approx(written_out(*case, 4.0).item(), rel=1e-6)
    torch.testing.assert_close(gradient, 3 * expected, atol=1e-6, rtol=1e-5)


def test_gradient_of_the_logits_is_weight_times_softmax_minus_one_hot(case):
    _hidden, _, labels, counts = case
    head = torch.eye(V)
    logits = torch.randn(N, B - 1, V, requires_grad=True)
    (gradient,) = torch.autograd.grad(block_loss(logits, head, labels, counts, 4.0).loss, logits)
    weights = slot_weights(B, 4.0) * counts
    expected = (logits.softmax(-1) - head[labels]) * (weights / weights.sum())[..., None]
    torch.testing.assert_close(gradient, expected.detach(), atol=1e-7, rtol=1e-5)


def test_loss_of_certain_right_logits_is_nothing_and_of_shifted_labels_large():
    labels = torch.randint(V, (N, B - 1), generator=torch.Generator().manual_seed(1))
    everywhere = torch.ones_like(labels, dtype=torch.bool)
    certain = 50 * torch.eye(V)[labels]
    right = block_loss(certain, torch.eye(V), labels, everywhere, 4.0)
    assert float(right.loss) < 1e-6
    assert float(right.accuracy) == 1
    assert float(right.tau) == B
    shifted = block_loss(certain, torch.eye(V), labels.roll(1, dims=1), everywhere, 4.0)
    assert float(shifted.loss) > 30


def test_labels_are_hard_so_only_the_label_and_the_normalizer_matter():
    """Permuting the logits of the other tokens changes nothing, as it would under a soft loss against a teacher."""
    labels = torch.zeros(N, B - 1, dtype=torch.long)
    everywhere = torch.ones_like(labels, dtype=torch.bool)
    logits = torch.randn(N, B - 1, V)
    moved = logits.clone()
    moved[..., 1:] = logits[..., 1:].flip(-1)
    one, other = (block_loss(x, torch.eye(V), labels, everywhere, 4.0).loss for x in (logits, moved))
    assert float(one) == pytest.approx(float(other), rel=1e-6)


def test_slots_that_do_not_count_have_neither_loss_nor_gradient(case):
    hidden, head, labels, counts = case
    loss = block_loss(*case, 4.0).loss
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(gradient[~counts], torch.zeros_like(gradient[~counts]))
    with torch.no_grad():
        moved = hidden.clone()
        moved[~counts] += 5
        assert torch.equal(block_loss(moved, head, labels, counts, 4.0).loss, loss)


def test_one_denominator_for_the_whole_batch(case):
    """A block with few counting slots weighs less: the batch's loss is no mean of the blocks' losses."""
    hidden, head, labels, counts = case
    counts[0, 1:] = False
    weights = slot_weights(B, 4.0) * counts
    losses = torch.stack([block_loss(hidden[[n]], head, labels[[n]], counts[[n]], 4.0).loss for n in range(N)])
    expected = (losses * weights.sum(1)).sum() / weights.sum()
    assert block_loss(*case, 4.0).loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_tau_is_the_mean_right_prefix_plus_one_and_accuracy_counts_slots():
    labels = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    said = torch.tensor([[1, 2, 9], [9, 2, 3], [1, 2, 3]])
    counts = torch.tensor([[True, True, True], [True, True, True], [True, False, True]])
    found = block_loss(torch.eye(V)[said], torch.eye(V), labels, counts, 4.0)
    assert float(found.tau) == pytest.approx((3 + 1 + 2) / 3)  # a slot that does not count ends the prefix
    assert float(found.accuracy) == pytest.approx(6 / 8)


def test_logits_are_never_kept(case):
    """Only the gradient of the hidden states waits for backward, whatever the vocabulary."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        block_loss(*case, 4.0)
    assert max(saved) <= N * (B - 1) * H
