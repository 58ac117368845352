"""What goes through a drafter at once: the blocks of some samples and the context that they see, one sample after the other.

Shapes: T context rows, F feature width, N blocks, B slots a block.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from draftline.drafter.anchors import block_labels, draw_anchors, seeded
from draftline.drafter.data import Sample
from draftline.errors import DraftlineError

SLOTS = 8192
"""Slots of a forward: 512 anchors of 16, enough for products at full speed. What a forward keeps for its gradient grows with them: 12 GB
for a drafter of Qwen3.6-27B."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What `Drafter.forward` and `block_loss` take.

    `features` [T, F] in storage dtype, `positions` [T], `blocks` [N, B] token ids, `anchors` [N], `context_start` [N],
    `labels` [N, B-1] and `counts` bool [N, B-1] of slots 1..B-1.
    """

    features: Tensor
    positions: Tensor
    blocks: Tensor
    anchors: Tensor
    context_start: Tensor
    labels: Tensor
    counts: Tensor

    def to(self, device: str) -> "Batch":
        """The batch on a device."""
        return Batch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


def make_batches(
    samples: Sequence[Sample],
    anchors: int,
    block_size: int,
    mask_token_id: int,
    seed: int,
    vocabulary: Tensor | None,
    slots: int = SLOTS,
) -> list[Batch]:
    """Blocks of at most `anchors` anchors a sample, drawn by (seed, epoch, sample id), in batches of at most `slots` slots or one sample.

    Of a sample's features only those before its last anchor are taken: no block sees the others. `vocabulary` is an
    ascending int64 tensor of the ids that the head is restricted to; labels then are indices into it.
    """
    groups: list[list[Batch]] = []
    room = 0
    for sample in samples:
        batch = _blocks(sample, anchors, block_size, mask_token_id, seed)
        if vocabulary is not None:
            _restrict(batch, vocabulary)
        if batch.blocks.numel() > room:
            groups.append([])
            room = slots
        groups[-1].append(batch)
        room -= batch.blocks.numel()
    return [_packed(group) for group in groups]


def _blocks(sample: Sample, anchors: int, block_size: int, mask_token_id: int, seed: int) -> Batch:
    """One sample's blocks."""
    anchors_N = draw_anchors(sample.loss_mask, anchors, seeded(seed, sample.epoch, sample.id))
    if not len(anchors_N):
        raise DraftlineError(
            f"hidden states: sample {sample.id}: no two supervised tokens in a row; tokens/ is to drop it"
        )
    labels_NB, counts_NB = block_labels(sample.input_ids, sample.loss_mask, anchors_N, block_size)
    blocks_NB = torch.full((len(anchors_N), block_size), mask_token_id)
    blocks_NB[:, 0] = sample.input_ids[anchors_N]
    context = int(anchors_N[-1])
    return Batch(
        sample.features[:context],
        torch.arange(context),
        blocks_NB,
        anchors_N,
        torch.zeros_like(anchors_N),
        labels_NB,
        counts_NB,
    )


def _packed(batches: Sequence[Batch]) -> Batch:
    """Several in one, their context rows one after the other."""
    starts = itertools.accumulate((len(batch.positions) for batch in batches), initial=0)
    moved = [replace(batch, context_start=batch.context_start + start) for batch, start in zip(batches, starts)]
    return Batch(*(torch.cat([getattr(batch, field.name) for batch in moved]) for field in fields(Batch)))


def _restrict(batch: Batch, vocabulary: Tensor) -> None:
    """Turn the labels, which are ours alone, from token ids into places in `vocabulary`."""
    places_NB = torch.searchsorted(vocabulary, batch.labels).clamp(max=len(vocabulary) - 1)
    unknown_NB = batch.counts & (vocabulary[places_NB] != batch.labels)
    if unknown_NB.any():
        token = int(batch.labels[unknown_NB][0])
        raise DraftlineError(
            f"stats/tokens.parquet: token {token}: is a label but is not listed; delete stats/ and run again"
        )
    batch.labels.copy_(places_NB)
