import numpy as np
import pytest
import small_models
import torch

from draftline.decode.draft import Marginals, draft
from draftline.decode.replay import depth_table, truth, walk
from draftline.decode.tree import build_tree, tree_depths

BUDGETS = [1, 3, 8, 20, 32]


def certain(tokens_AS):
    """Marginals that hold one token per slot with probability one."""
    return Marginals(tokens_AS[..., None], np.zeros((*tokens_AS.shape, 1), dtype=np.float32))


def test_the_truth_behind_each_token_ends_with_the_completion():
    assert truth([7, 8, 9, 10], 2).tolist() == [[8, 9], [9, 10], [10, -1]]
    assert truth([7, 8], 4).tolist() == [[8, -1, -1, -1]]
    assert truth([7], 4).shape == (0, 4)
    assert truth([], 4).shape == (0, 4)


@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 15, 16, 17, 50])
def test_an_oracle_fills_every_round_but_the_last_and_a_wrong_drafter_none(tokens):
    slots, completion = 7, np.random.default_rng(tokens).integers(0, 99, tokens)
    right = truth(completion, slots)
    chain, trees = depth_table(certain(np.maximum(right, 0)), right, [slots, 32])
    for depths in (chain, *trees.values()):
        lengths = walk(depths).lengths
        assert lengths[:-1] == [slots + 1] * (len(lengths) - 1)
        assert sum(lengths) == tokens - 1
    chain, trees = depth_table(certain(right + 1), right, [slots])
    for depths in (chain, *trees.values()):
        assert walk(depths).lengths == [1] * (tokens - 1)


def test_a_round_starts_where_the_last_one_committed():
    depths = np.array([2, 9, 9, 0, 1, 9, 5])
    rounds = walk(depths)
    # Anchors 0, 3, 4 and 6: after the last one a single token is left, whatever was accepted.
    assert rounds.accepted == [2, 0, 1, 5]
    assert rounds.lengths == [3, 1, 2, 1]


@pytest.fixture(scope="module")
def drafted():
    """A random drafter's marginals behind every anchor of a random sequence, as arguments of `draft`, and its truth."""
    model = small_models.build("llama")
    drafter, heads = small_models.random_drafter(), small_models.heads_of(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, small_models.VOCABULARY, (300,), generator=generator)
    features = torch.randn(300, drafter.config.feature_size, generator=generator)
    anchors = torch.arange(10, 299)
    arguments = (drafter, heads, drafter.context(features), anchors, ids[10:299])
    return arguments, truth(ids[10:].tolist(), drafter.config.block_size - 1)


def test_all_anchors_in_one_pass_equal_each_alone(drafted):
    (drafter, heads, context, anchors, tokens), _ = drafted
    together = draft(drafter, heads, context, anchors, tokens, 8)
    for n in range(0, len(anchors), 37):
        alone = draft(drafter, heads, context[: anchors[n]], anchors[n : n + 1], tokens[n : n + 1], 8)
        assert (alone.tokens[0] == together.tokens[n]).all()
        np.testing.assert_allclose(alone.log_probs[0], together.log_probs[n], atol=2e-5)


def test_log_probabilities_are_over_the_full_vocabulary(drafted):
    (drafter, heads, context, anchors, tokens), _ = drafted
    marginals = draft(drafter, heads, context, anchors, tokens, small_models.VOCABULARY)
    np.testing.assert_allclose(np.exp(marginals.log_probs.astype(np.float64)).sum(axis=-1), 1, atol=1e-5)
    assert (np.diff(marginals.log_probs) <= 0).all()


@pytest.mark.parametrize("count", BUDGETS[:-1])
def test_slots_that_are_left_out_change_no_depth(drafted, count):
    arguments, right = drafted
    budgets = [budget for budget in BUDGETS if budget <= count]
    whole = draft(*arguments, count)
    pruned = draft(*arguments, count, torch.tensor(right))
    left_out = (pruned.tokens[:, :, 0] < 0).mean()
    assert 0.05 < left_out < 0.95
    chain, trees = depth_table(pruned, right, budgets)
    whole_chain, whole_trees = depth_table(whole, right, budgets)
    assert (chain == whole_chain).all()
    for budget in budgets:
        assert (trees[budget] == whole_trees[budget]).all()
    assert max(trees[count]) > 0


def test_depths_per_budget_are_those_of_a_tree_of_that_budget(drafted):
    arguments, right = drafted
    marginals = draft(*arguments, 32)
    _, trees = depth_table(marginals, right, BUDGETS)
    for budget in BUDGETS:
        for n in range(0, len(right), 11):
            tree = build_tree(0, marginals.tokens[n].tolist(), marginals.log_probs[n].tolist(), budget)
            assert tree_depths(tree, right[n].tolist(), [budget]) == [trees[budget][n]]
