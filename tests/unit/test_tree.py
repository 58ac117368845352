import itertools

import numpy as np
import pytest

from draftline.decode.chain import chain_depths
from draftline.decode.tree import build_tree, tree_depths

ANCHOR = 99


def marginals(seed, slots, vocabulary):
    """Random slot marginals as tokens and log-probabilities [slots][vocabulary], best first."""
    logits = np.random.default_rng(seed).normal(scale=2.0, size=(slots, vocabulary))
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-log_probs, axis=1)
    return order.tolist(), np.take_along_axis(log_probs, order, axis=1).tolist()


def prefix(tree, node):
    tokens = []
    while node > 0:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(tokens[::-1])


def all_prefixes(tokens, log_probs):
    """Every prefix with its log-probability, the most probable first."""
    found = []
    for depth in range(1, len(tokens) + 1):
        for choice in itertools.product(*(range(len(slot)) for slot in tokens[:depth])):
            score = sum(log_probs[slot][rank] for slot, rank in enumerate(choice))
            found.append((-score, tuple(tokens[slot][rank] for slot, rank in enumerate(choice))))
    return [prefix for _, prefix in sorted(found)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("budget", [1, 2, 6, 17, 84])
def test_a_tree_holds_the_most_probable_prefixes_in_their_order(seed, budget):
    tokens, log_probs = marginals(seed, slots=3, vocabulary=4)
    tree = build_tree(ANCHOR, tokens, log_probs, budget)
    assert [prefix(tree, node) for node in range(1, len(tree))] == all_prefixes(tokens, log_probs)[:budget]
    assert tree.depths == [len(prefix(tree, node)) for node in range(len(tree))]
    assert tree.tokens[0] == ANCHOR


@pytest.mark.parametrize("budget", [1, 3, 10, 30])
def test_as_many_tokens_per_slot_as_the_budget_are_enough(budget):
    tokens, log_probs = marginals(1, slots=4, vocabulary=64)
    few = build_tree(ANCHOR, [slot[:budget] for slot in tokens], [slot[:budget] for slot in log_probs], budget)
    assert few == build_tree(ANCHOR, tokens, log_probs, budget)


def test_a_smaller_budget_gives_the_beginning_of_the_tree_even_among_equals():
    tokens, log_probs = [[3, 1, 2]] * 4, [[-1.0, -1.0, -1.0]] * 4
    large = build_tree(ANCHOR, tokens, log_probs, 40)
    for budget in range(1, 40):
        small = build_tree(ANCHOR, tokens, log_probs, budget)
        assert small.tokens == large.tokens[: budget + 1]
        assert small.parents == large.parents[: budget + 1]
    assert large.depths[1:] == sorted(large.depths[1:])


def test_certain_slots_give_the_chain_and_no_impossible_node():
    tokens = [[7, 1], [8, 2], [9, 3]]
    for log_probs in ([[0.0, -np.inf]] * 3, [[0.0, -50.0]] * 3):
        tree = build_tree(ANCHOR, tokens, log_probs, budget=3)
        assert tree.tokens == [ANCHOR, 7, 8, 9]
        assert tree.parents == [-1, 0, 1, 2]
    assert len(build_tree(ANCHOR, tokens, [[0.0, -np.inf]] * 3, budget=20)) == 4


def test_a_node_attends_to_its_ancestors_and_itself():
    tokens, log_probs = marginals(3, slots=4, vocabulary=5)
    tree = build_tree(ANCHOR, tokens, log_probs, 25)
    mask = tree.ancestors()
    for node, other in itertools.product(range(len(tree)), repeat=2):
        is_ancestor = prefix(tree, other) == prefix(tree, node)[: tree.depths[other]]
        assert mask[node, other] == is_ancestor


def test_paths_lead_from_the_root_to_every_leaf():
    tokens, log_probs = marginals(4, slots=4, vocabulary=5)
    tree = build_tree(ANCHOR, tokens, log_probs, 25)
    paths = tree.paths()
    assert {node for path in paths for node in path} == set(range(len(tree)))
    for path in paths:
        assert [tree.parents[node] for node in path] == [-1, *path[:-1]]
        assert path[-1] not in tree.parents
    assert len(paths) == sum(node not in tree.parents for node in range(len(tree)))


def test_the_walk_takes_the_child_that_the_target_chose_until_there_is_none():
    tree = build_tree(ANCHOR, [[10, 20], [30, 40]], [[-0.4, -1.2], [-0.4, -1.2]], 6)
    choice = {0: 20}
    first = tree.walk(lambda node: choice.get(node, 40))
    assert [tree.tokens[node] for node in first] == [20, 40]
    assert tree.walk(lambda node: 77) == []


@pytest.mark.parametrize("seed", range(30))
def test_depths_of_all_budgets_equal_those_of_their_own_trees(seed):
    tokens, log_probs = marginals(seed, slots=4, vocabulary=6)
    truth = np.random.default_rng(seed).integers(0, 6, 4).tolist()[: 1 + seed % 4]
    budgets = [1, 2, 5, 12, 40, 200]
    expected = []
    for budget in budgets:
        prefixes = all_prefixes(tokens, log_probs)[:budget]
        depth = 0
        while depth < len(truth) and tuple(truth[: depth + 1]) in prefixes:
            depth += 1
        expected.append(depth)
    assert tree_depths(build_tree(ANCHOR, tokens, log_probs, 200), truth, budgets) == expected


@pytest.mark.parametrize("seed", range(30))
def test_a_tree_that_holds_the_greedy_chain_is_never_worse_than_it(seed):
    tokens, log_probs = marginals(seed, slots=4, vocabulary=3)
    chain = [slot[0] for slot in tokens]
    budget = all_prefixes(tokens, log_probs).index(tuple(chain)) + 1
    tree = build_tree(ANCHOR, tokens, log_probs, budget)
    for truth in itertools.product(range(3), repeat=4):
        (depth,) = tree_depths(tree, truth, [budget])
        assert depth >= chain_depths(np.array([chain]), np.array([truth]))[0]


def test_a_thousand_nodes_keep_parents_before_children():
    tokens, log_probs = marginals(5, slots=15, vocabulary=1024)
    tree = build_tree(ANCHOR, tokens, log_probs, 1024)
    assert len(tree) == 1025
    assert all(parent < node for node, parent in enumerate(tree.parents))
