"""DDTree: the most probable prefixes under a drafter's slot marginals, as one tree (arXiv 2604.12989).

A block drafter gives one distribution per slot, independent of each other given the context, so the probability of a
prefix is the product of its slots' probabilities. Adding prefixes from the most to the least probable keeps parents
before children and maximises the expected accepted length under these marginals, for every budget at once: the tree of
a budget is the beginning of the tree of any larger one.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tree:
    """Nodes in order of probability, the root (the anchor, depth 0) first; a parent always precedes its children."""

    tokens: list[int]
    parents: list[int]
    """Node index of the parent; -1 for the root."""
    depths: list[int]
    _children: dict[tuple[int, int], int] = field(repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`."""
        return self._children.get((node, token))

    def walk(self, choice: Callable[[int], int]) -> list[int]:
        """Nodes that the target accepts, root excluded: from the root to the child that holds `choice(node)`, until none does.

        `choice` gives the token that the target puts after a node. The choice at the last node is the bonus token.
        """
        path: list[int] = []
        node: int | None = 0
        while node is not None:
            node = self.child(node, choice(node))
            if node is not None:
                path.append(node)
        return path

    def ancestors(self) -> NDArray[np.bool_]:
        """[n, n], n = len(tree): row i is true at node i and at all its ancestors, the tokens that node i may attend to."""
        mask_NN = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask_NN[node] |= mask_NN[parent]
        return mask_NN

    def paths(self) -> list[list[int]]:
        """Every path from the root to a leaf, as node indices, root included."""
        leaves = sorted(set(range(len(self))) - set(self.parents))
        paths = []
        for node in leaves:
            path = []
            while node >= 0:
                path.append(node)
                node = self.parents[node]
            paths.append(path[::-1])
        return paths


def build_tree(
    anchor: int, tokens_SM: Sequence[Sequence[int]], log_probs_SM: Sequence[Sequence[float]], budget: int
) -> Tree:
    """The `budget` most probable prefixes (root not counted) of the slots 1..S, each given by its M best tokens.

    `log_probs_SM` descend along M, and M >= min(budget, vocabulary) makes the result exact. Prefixes of probability zero
    are left out, so a tree may be smaller than its budget. Equal probabilities: the shorter prefix first, then the earlier
    parent, then the better rank. O(budget log budget).
    """
    tokens, parents, depths = [anchor], [-1], [0]
    children: dict[tuple[int, int], int] = {}
    # Cost (negative log-probability), depth, parent, rank of the token in its slot, cost of the parent.
    heap: list[tuple[float, int, int, int, float]] = []

    def offer(depth: int, parent: int, rank: int, base: float) -> None:
        if depth <= len(log_probs_SM) and rank < len(log_probs_SM[depth - 1]):
            cost = base - log_probs_SM[depth - 1][rank]
            if cost < float("inf"):
                heapq.heappush(heap, (cost, depth, parent, rank, base))

    offer(1, 0, 0, 0.0)
    while heap and len(tokens) <= budget:
        cost, depth, parent, rank, base = heapq.heappop(heap)
        node, token = len(tokens), tokens_SM[depth - 1][rank]
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        children[parent, token] = node
        offer(depth, parent, rank + 1, base)
        offer(depth + 1, node, 0, cost)
    return Tree(tokens, parents, depths, children)


def tree_depths(tree: Tree, truth_S: Sequence[int], budgets: Sequence[int]) -> list[int]:
    """Number of accepted nodes when the target continues with `truth_S`, for the first `budget` nodes of `tree` each."""
    path = tree.walk(lambda node: truth_S[tree.depths[node]] if tree.depths[node] < len(truth_S) else -1)
    return [sum(node <= budget for node in path) for budget in budgets]
