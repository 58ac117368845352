"""Replay: accepted lengths without the target, from its own completion.

At temperature 0 the target verifies a draft by choosing the very token that its completion holds, so the completion
decides every round. A round starts at an anchor, the last committed token, and commits the accepted draft tokens and one
more, the bonus. The first token of a completion comes from the prefill and belongs to no round.

`LAST_ROUND` is the convention for the end: what a round commits ends with the completion, and no round starts at its last
token. Accepted lengths of a completion of n tokens then add up to n - 1, and `draftline.decode.live` counts alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftline.decode.chain import chain_depths
from draftline.decode.draft import NO_TOKEN, Marginals
from draftline.decode.tree import build_tree, tree_depths

LAST_ROUND = (
    "the last round counts the tokens up to the stop token or the limit, nothing behind it;"
    " a round that would start at the completion's last token is none"
)


@dataclass(frozen=True)
class Rounds:
    """The rounds of one completion: accepted draft tokens, and accepted length (tokens committed, bonus included).

    Neither counts anything behind the completion's end.
    """

    accepted: list[int]
    lengths: list[int]


def truth(completion_ids: Sequence[int], slots: int) -> NDArray[np.int64]:
    """The `slots` tokens after each token of a completion but the last, [A, S]; -1 past the end."""
    padded = np.concatenate([np.asarray(completion_ids[1:], dtype=np.int64), np.full(slots, -1)])
    return np.lib.stride_tricks.sliding_window_view(padded, slots)[: max(len(completion_ids) - 1, 0)]


def depth_table(
    marginals: Marginals, truth_AS: NDArray[np.int64], budgets: Sequence[int]
) -> tuple[NDArray[np.int64], dict[int, NDArray[np.int64]]]:
    """Accepted draft tokens at every anchor [A]: of the chain, and of the tree of each budget."""
    largest = max(budgets)
    chain_A = chain_depths(marginals.tokens[:, :, 0], truth_AS)
    trees_AN = np.zeros((len(truth_AS), len(budgets)), dtype=np.int64)
    for anchor, truth_S in enumerate(truth_AS.tolist()):
        # Anchor by anchor: as Python lists, all at once would take many times the arrays' memory.
        tokens_SM, log_probs_SM = marginals.tokens[anchor].tolist(), marginals.log_probs[anchor].tolist()
        trees_AN[anchor] = tree_depths(build_tree(NO_TOKEN, tokens_SM, log_probs_SM, largest), truth_S, budgets)
    return chain_A, {budget: trees_AN[:, n] for n, budget in enumerate(budgets)}


def walk(depths_A: NDArray[np.int64]) -> Rounds:
    """The rounds through a completion, given the accepted draft tokens at each of its tokens but the last."""
    accepted, lengths, anchor = [], [], 0
    while anchor < len(depths_A):
        accepted.append(int(depths_A[anchor]))
        lengths.append(min(accepted[-1] + 1, len(depths_A) - anchor))
        anchor += lengths[-1]
    return Rounds(accepted, lengths)
