"""A batch: the blocks of some samples and the context that they see, packed one sample after the other.

Shapes: T context rows, F feature width, N blocks, B slots a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftline.drafter.anchors import block_labels, draw_anchors, seeded
from draftline.drafter.data import Sample
from draftline.errors import DraftlineError


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


def make_batch(
    samples: Sequence[Sample], anchors: int, block_size: int, mask_token_id: int, seed: int, vocabulary: Tensor | None
) -> Batch:
    """Blocks of at most `anchors` anchors a sample, drawn by (seed, epoch, sample id).

    Of a sample's features only those before its last anchor are taken: no block sees the others. `vocabulary` is an
    ascending int64 tensor of the ids that the head is restricted to; labels then are indices into it.
    """
    rows: list[Batch] = []
    start = 0
    for sample in samples:
        generator = seeded(seed, sample.epoch, sample.id)
        anchors_N = draw_anchors(sample.loss_mask, anchors, generator)
        if not len(anchors_N):
            raise DraftlineError(
                f"hidden states: sample {sample.id}: no two supervised tokens in a row; tokens/ is to drop it"
            )
        labels_NB, counts_NB = block_labels(sample.input_ids, sample.loss_mask, anchors_N, block_size)
        blocks_NB = torch.full((len(anchors_N), block_size), mask_token_id)
        blocks_NB[:, 0] = sample.input_ids[anchors_N]
        context = int(anchors_N[-1])
        rows.append(
            Batch(
                sample.features[:context],
                torch.arange(context),
                blocks_NB,
                anchors_N,
                torch.full_like(anchors_N, start),
                labels_NB,
                counts_NB,
            )
        )
        start += context
    batch = Batch(*(torch.cat([getattr(row, field.name) for row in rows]) for field in fields(Batch)))
    if vocabulary is not None:
        _restrict(batch, vocabulary)
    return batch


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
