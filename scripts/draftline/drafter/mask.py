"""What a block's slots see (specs: "Mask"). The rule stands here once; dense masks and kernels are made from it.

A query is slot k of a block whose anchor has position a, so it stands at position a + k.

Context: the features strictly before the anchor. The anchor's own feature does not exist when the block is drafted,
because the target has not processed it; a feature at the anchor or behind it would give the labels away.
Block: the slots of the same block, whatever the positions of other blocks; on causal layers only those up to k.
On a layer with window W, both only at positions above a + k - W.

The functions work on tensors that broadcast against each other, and on single numbers inside a kernel.
"""

import torch
from torch import Tensor


def sees_context(anchor: Tensor, slot: Tensor, position: Tensor, window: int | None) -> Tensor:
    """Whether slot `slot` of a block at `anchor` sees the context feature at `position` of its document."""
    before = position < anchor
    return before if window is None else before & (position > anchor + slot - window)


def sees_slot(slot: Tensor, other: Tensor, causal: bool, window: int | None) -> Tensor:
    """Whether slot `slot` sees slot `other` of its own block."""
    seen = other <= slot if causal else other == other
    return seen if window is None else seen & (other > slot - window)


def dense(anchors_N: Tensor, block_size: int, context: int, causal: bool, window: int | None) -> Tensor:
    """Mask [N, B, context + B], true where seen: the first `context` features of the document, then the own block."""
    anchor_N11 = anchors_N[:, None, None]
    slot_B = torch.arange(block_size, device=anchors_N.device)
    position_S = torch.arange(context, device=anchors_N.device)
    of_context_NBS = sees_context(anchor_N11, slot_B[:, None], position_S, window)
    of_block_BB = sees_slot(slot_B[:, None], slot_B, causal, window).expand(block_size, block_size)
    shape = (len(anchors_N), block_size)
    return torch.cat([of_context_NBS.expand(*shape, context), of_block_BB.expand(*shape, block_size)], dim=-1)
