"""Where blocks start in a sample, and what their slots must say (specs: "Block construction").

Shapes: T tokens of a sample, N anchors, B slots a block.
"""

import hashlib

import torch
from torch import Tensor


def seeded(*parts: object) -> torch.Generator:
    """A CPU generator whose seed is a hash of `parts`: draws depend on what they are for, never on what came before."""
    text = " ".join(map(str, parts))
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def eligible(loss_mask_T: Tensor) -> Tensor:
    """Positions [N] int64 that may be anchors: supervised, and so is the next one, which slot 1 predicts."""
    return torch.nonzero(loss_mask_T[:-1] & loss_mask_T[1:]).flatten()


def draw_anchors(loss_mask_T: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """At most `count` eligible positions [N] int64, without repeats, ascending; all of them where there are fewer."""
    positions = eligible(loss_mask_T)
    order = torch.randperm(len(positions), generator=generator)
    return positions[order[:count]].sort().values


def block_labels(input_ids_T: Tensor, loss_mask_T: Tensor, anchors_N: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Labels [N, B-1] int64 of slots 1..B-1 and bool [N, B-1]: where they count.

    Slot k of a block at a says token a + k itself: there is no shift. Slots that are not supervised or lie behind the
    sample's end do not count (their label is 0); blocks that run over the end stay, so that ends are learned.
    """
    positions_NB = anchors_N[:, None] + torch.arange(1, block_size)
    inside_NB = positions_NB < len(input_ids_T)
    positions_NB = positions_NB.clamp(max=len(input_ids_T) - 1)
    counts_NB = inside_NB & loss_mask_T[positions_NB]
    return input_ids_T[positions_NB].where(counts_NB, 0), counts_NB
