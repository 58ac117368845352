"""Features of many token sequences: the target's forward, cut off at the highest tapped layer.

Sequences of like length share a forward and are padded on the right, without an attention mask: in a causal model, with
attention or a recurrent state, nothing at a position depends on what comes after it, so the pads reach no real token. That
keeps the fast causal kernels (a mask would rule them out, and grouped heads would be copied).

Shapes: B sequences of a batch, S positions, T tokens of one sequence, K tapped layers, H hidden size, F = K * H.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from draftline.loading import backbone, decoder_layers

BATCH_TOKENS = 16384


class _Reached(Exception):  # noqa: N818 - not an error: the highest tapped layer is done
    """Ends a forward."""


def extract(
    model: nn.Module,
    layer_ids: Sequence[int],
    sequences: Sequence[torch.Tensor | list[int]],
    batch_tokens: int = BATCH_TOKENS,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index, features [T, F]) of every sequence of token ids, longest first, in the model's dtype on its device.

    Feature columns are the outputs of the decoder layers `layer_ids` (ascending, 0-based), one after the other. A forward
    takes at most `batch_tokens` positions, pads included, or one sequence. Layers above the highest and the head never run.
    """
    for batch in batches([len(sequence) for sequence in sequences], batch_tokens):
        tapped = _forward(model, layer_ids, _padded([sequences[n] for n in batch]))
        for b, n in enumerate(batch):
            # A model may lie on several devices; the highest layer's takes all.
            rows = [output_BSH[b, : len(sequences[n])].to(tapped[-1].device) for output_BSH in tapped]
            yield n, torch.cat(rows, dim=-1)


@torch.no_grad()
def _forward(model: nn.Module, layer_ids: Sequence[int], ids_BS: torch.Tensor) -> list[torch.Tensor]:
    """Outputs [B, S, H] of the tapped layers."""
    outputs: list[torch.Tensor] = []

    def tap(layer: nn.Module, inputs: object, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)
        if len(outputs) == len(layer_ids):
            raise _Reached

    with ExitStack() as stack:
        for i in layer_ids:
            stack.callback(decoder_layers(model)[i].register_forward_hook(tap).remove)
        stack.enter_context(suppress(_Reached))
        backbone(model)(input_ids=ids_BS.to(next(model.parameters()).device), use_cache=False)
    return outputs


def batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of sequences, longest first, in groups of at most `batch_tokens` padded positions (or one sequence)."""
    groups: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= batch_tokens:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


def _padded(sequences: list[torch.Tensor | list[int]]) -> torch.Tensor:
    """Token ids [B, S] int64, padded on the right with id 0, which no real token sees."""
    rows = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)
