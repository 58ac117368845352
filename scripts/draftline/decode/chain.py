"""The chain: one token per slot, accepted up to the first that the target would not have chosen (DFlash, 2602.06036)."""

import numpy as np
from numpy.typing import NDArray


def chain_depths(draft_AS: NDArray[np.int64], truth_AS: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of accepted draft tokens per anchor [A]: the longest prefix in which draft and target agree.

    Both are token ids of the slots 1..S after A anchors. A truth of -1 (past the completion's end) agrees with nothing.
    """
    agree_AS = (draft_AS == truth_AS) & (truth_AS >= 0)
    depths_A: NDArray[np.int64] = np.logical_and.accumulate(agree_AS, axis=1).sum(axis=1)
    return depths_A
