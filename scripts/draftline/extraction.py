"""Features of many token sequences: the target's forward, cut off at the highest tapped layer.

Sequences of like length share a forward and are padded on the right, without an attention mask: in a causal model, with
attention or a recurrent state, nothing at a position depends on what comes after it, so the pads reach no real token. That
keeps the fast causal kernels (a mask would rule them out, and grouped heads would be copied). Where every layer's kernel takes
packed sequences, and a look shows that it keeps them apart, they stand one after the other in one row, without pads, and each row
is filled as far as can be.

Shapes: B sequences of a batch, S positions, T tokens of one sequence, K tapped layers, H hidden size, F = K * H.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from draftline.agreement import distance, failure
from draftline.convolution import prefer_fla_convolution
from draftline.cpu_linear import pack
from draftline.fusion import fuse
from draftline.loading import backbone, decoder_layers
from draftline.packed_attention import packs, prefer_packed_attention
from draftline.progress import say

BATCH_TOKENS = 16384

LOOK_TOKENS = 100
"""Tokens of each sequence in a look at whether packing keeps them apart: the second begins within a chunk of the kernels."""
APART = 1e-2
"""Most, relative to its states, that a packed sequence may change with the one before it. Nothing at all changes as a rule."""


class _Reached(Exception):  # noqa: N818 - not an error: the highest tapped layer is done
    """Ends a forward."""


def prepare(model: nn.Module) -> nn.Module:
    """Choose, in place, the fastest kernels for whole sequences that a frozen model's device has and that keep its numbers."""
    pack(model)
    prefer_fla_convolution(model)
    prefer_packed_attention(model)
    if packs(model) and (reason := _mixing(model)):
        model.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
        say(f"{type(model).__name__}: sequences are padded, because a packed forward {reason}")
    if next(model.parameters()).is_cuda:
        fuse(model)
    return model


def _mixing(model: nn.Module) -> str | None:
    """What speaks against packed rows: the second sequence of one changes with the first, or there is an error. None if nothing does."""
    draw = torch.Generator().manual_seed(0)
    vocabulary: Any = backbone(model).embed_tokens.num_embeddings  # type: ignore[union-attr]
    *firsts, second = torch.randint(int(vocabulary), (3, LOOK_TOKENS), generator=draw)
    device, top = next(model.parameters()).device, len(decoder_layers(model)) - 1
    try:
        rows = [_forward(model, [top], _packed([first, second], device)[0])[0] for first in firsts]
    except Exception as error:  # noqa: BLE001 - a model's own code may know nothing of packed rows in many ways
        return failure(error)
    change = distance(*([row_1SH[0, LOOK_TOKENS:]] for row_1SH in rows)).figures()["relative_rms"]
    return None if change <= APART else f"lets a sequence see the one before it (states change by {change:.1e})"


def extract(
    model: nn.Module,
    layer_ids: Sequence[int],
    sequences: Sequence[torch.Tensor | list[int]],
    batch_tokens: int = BATCH_TOKENS,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index, features [T, F]) of every sequence of token ids, in any order, in the model's dtype on its device.

    Feature columns are the outputs of the decoder layers `layer_ids` (ascending, 0-based), one after the other. A forward
    takes at most `batch_tokens` positions, pads included, or one sequence. Layers above the highest and the head never run.
    """
    packed = packs(model)
    device = next(model.parameters()).device
    for batch in (filled if packed else batches)([len(sequence) for sequence in sequences], batch_tokens):
        rows = [torch.as_tensor(sequences[n], dtype=torch.int64) for n in batch]
        inputs, places = (_packed if packed else _padded)(rows, device)
        tapped = _forward(model, layer_ids, inputs)
        for n, (b, where) in zip(batch, places):
            # A model may lie on several devices; the highest layer's takes all.
            yield n, torch.cat([output_BSH[b, where].to(tapped[-1].device) for output_BSH in tapped], dim=-1)


@torch.no_grad()
def _forward(model: nn.Module, layer_ids: Sequence[int], inputs: Mapping[str, Any]) -> list[torch.Tensor]:
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
        backbone(model)(**inputs, use_cache=False)
    return outputs


def batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of sequences, longest first, in groups of at most `batch_tokens` positions, pads included (or one sequence)."""
    groups: list[list[int]] = []
    for n in _longest_first(lengths):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= batch_tokens:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


def filled(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of sequences in groups of at most `batch_tokens` tokens (or one sequence): each in the first that has room."""
    groups: list[list[int]] = []
    rooms: list[int] = []
    for n in _longest_first(lengths):
        g = next((g for g, room in enumerate(rooms) if room >= lengths[n]), len(groups))
        if g == len(groups):
            groups.append([])
            rooms.append(batch_tokens)
        groups[g].append(n)
        rooms[g] -= lengths[n]
    return groups


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))


Places = list[tuple[int, slice]]
"""Row and positions of each sequence in a batch."""


def _padded(rows: list[torch.Tensor], device: torch.device) -> tuple[dict[str, Any], Places]:
    """A sequence a row, padded on the right with id 0, which no real token sees."""
    ids_BS = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids_BS.to(device)}, [(b, slice(len(row))) for b, row in enumerate(rows)]


def _packed(rows: list[torch.Tensor], device: torch.device) -> tuple[dict[str, Any], Places]:
    """All sequences in one row; each begins at position 0, and attention, convolution and state begin anew with it."""
    lengths = [len(row) for row in rows]
    ends = [0, *itertools.accumulate(lengths)]
    whose_T = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(lengths))
    inputs = {
        "input_ids": torch.cat(rows)[None].to(device),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        "lengths": lengths,  # draftline.packed_attention
        "cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32, device=device),  # fla
        "seq_idx": whose_T[None].to(device),  # causal_conv1d
    }
    return inputs, [(0, slice(start, end)) for start, end in itertools.pairwise(ends)]
