"""Attention of draft blocks over their context and themselves.

Shapes: T packed context rows, N blocks, B slots, S context rows of one document, n blocks of one document,
Q = n*B queries, A attention heads, K key-value heads, G = A/K heads a group, D head size.

The mask is block-sparse: n blocks of one document share its context, and see no other block. On the CPU each document
is one pair of products: all its queries against the shared context, and each block against itself, under one softmax.
On CUDA flex_attention skips the empty tiles of the same rule.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftline.compiler import compiled
from draftline.drafter.mask import dense, sees_context, sees_slot
from draftline.errors import DraftlineError

LEAST_HEAD = 16
"""Least head size of flex_attention's kernels."""
FEW_QUERIES_TOO = {"FORCE_USE_FLEX_ATTENTION": True}
"""For fewer than 128 queries torch takes a kernel of its own, which cannot be made for all numbers of them."""
BACKWARD = {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32, "bwd_num_warps": 4}
"""Tiles of flex_attention's backward: of 13 choices the fastest on an H200 with heads of 128, where torch's own take 1.4 times as long."""


class Document(NamedTuple):
    """`blocks` blocks over rows `start`..`end`, of which the first `context` are before the last anchor."""

    blocks: int
    start: int
    end: int
    context: int


class Layout:
    """Which context rows belong to which block: anchors [N] int64, context starts [N] int64, T rows in all.

    Blocks of one document stand side by side. Masks are kept per kind of layer, for all layers of a forward pass.
    """

    def __init__(self, anchors_N: Tensor, context_start_N: Tensor, block_size: int, rows: int) -> None:
        self.anchors_N, self.context_start_N = anchors_N, context_start_N
        self.block_size, self.rows = block_size, rows
        self._masks: dict[tuple[bool, int | None], Any] = {}

    @functools.cached_property
    def documents(self) -> list[Document]:
        """Documents in the order of their rows."""
        starts, counts = torch.unique_consecutive(self.context_start_N, return_counts=True)
        ends = [*starts.tolist()[1:], self.rows]
        longest = [int(anchors.max()) for anchors in torch.split(self.anchors_N, counts.tolist())]
        return [Document(*numbers) for numbers in zip(counts.tolist(), starts.tolist(), ends, longest, strict=True)]

    def dense_masks(self, causal: bool, window: int | None) -> list[Tensor]:
        """Per document what is added to the scores, [n, B, S+B] fp32: 0 where seen, else -inf."""
        kind = (causal, window)
        if kind not in self._masks:
            anchors = torch.split(self.anchors_N, [document.blocks for document in self.documents])
            self._masks[kind] = [
                torch.where(dense(anchors_n, self.block_size, document.context, causal, window), 0.0, float("-inf"))
                for anchors_n, document in zip(anchors, self.documents, strict=True)
            ]
        return self._masks[kind]  # type: ignore[no-any-return]

    def rule(self, causal: bool, window: int | None) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
        """flex_attention's mask function over queries 0..N*B-1 and keys: T context rows, then N*B slots."""
        anchors_N, start_N, size, rows = self.anchors_N, self.context_start_N, self.block_size, self.rows

        def seen(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
            block, slot = query // size, query % size
            position = key - start_N[block]
            of_context = (key < rows) & (position >= 0) & sees_context(anchors_N[block], slot, position, window)
            other = key - rows
            of_block = (other >= 0) & (other // size == block) & sees_slot(slot, other % size, causal, window)
            return of_context | of_block

        return seen

    def block_mask(self, causal: bool, window: int | None) -> Any:
        """flex_attention's mask, tile by tile."""
        kind = (causal, window)
        if kind not in self._masks:
            make, _ = _flex()
            queries = len(self.anchors_N) * self.block_size
            self._masks[kind] = make(
                self.rule(causal, window), None, None, queries, self.rows + queries, device=self.anchors_N.device
            )
        return self._masks[kind]


def attend(
    query_NBAD: Tensor,
    key_NBKD: Tensor,
    value_NBKD: Tensor,
    context_key_TKD: Tensor,
    context_value_TKD: Tensor,
    layout: Layout,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Attention output [N, B, A, D]; softmax in fp32, scale D^-0.5. Raises DraftlineError for heads that a GPU's kernel cannot take."""
    if query_NBAD.is_cuda:
        if query_NBAD.shape[-1] < LEAST_HEAD:
            raise DraftlineError(
                f"drafters: head_dim: {query_NBAD.shape[-1]}: on a GPU a head has {LEAST_HEAD} elements at least; set that, or"
                " run.device: cpu"
            )
        return _attend_flex(
            query_NBAD, key_NBKD, value_NBKD, context_key_TKD, context_value_TKD, layout.block_mask(causal, window)
        )
    # split and not slices: the gradient of a slice is a zero tensor of the whole, once for every document.
    blocks = [document.blocks for document in layout.documents]
    rows = [document.end - document.start for document in layout.documents]
    first = layout.documents[0].start
    pieces = zip(
        layout.documents,
        torch.split(query_NBAD * query_NBAD.shape[-1] ** -0.5, blocks),
        torch.split(key_NBKD, blocks),
        torch.split(value_NBKD, blocks),
        torch.split(context_key_TKD[first:], rows),
        torch.split(context_value_TKD[first:], rows),
        layout.dense_masks(causal, window),
        strict=True,
    )
    return torch.cat(
        [
            _attend_document(query, key, value, context_key[: of.context], context_value[: of.context], mask)
            for of, query, key, value, context_key, context_value, mask in pieces
        ]
    )


def _attend_document(
    query_nBAD: Tensor,
    key_nBKD: Tensor,
    value_nBKD: Tensor,
    context_key_SKD: Tensor,
    context_value_SKD: Tensor,
    mask_nBs: Tensor,
) -> Tensor:
    n, B, A, D = query_nBAD.shape
    S, K, _ = context_key_SKD.shape
    G = A // K
    query_KnGBD = query_nBAD.view(n, B, K, G, D).permute(2, 0, 3, 1, 4).reshape(K, n, G * B, D)
    context_scores = query_KnGBD.view(K, n * G * B, D) @ context_key_SKD.permute(1, 2, 0)
    own_scores = query_KnGBD @ key_nBKD.permute(2, 0, 3, 1)
    scores_KnGBs = torch.cat([context_scores.view(K, n, G, B, S), own_scores.view(K, n, G, B, B)], dim=-1)
    scores_KnGBs += mask_nBs[:, None]
    shares_KnGBs = scores_KnGBs.softmax(dim=-1, dtype=torch.float32).to(value_nBKD.dtype)
    context_shares, own_shares = torch.split(shares_KnGBs, [S, B], dim=-1)
    result_KnGBD = (context_shares.reshape(K, n * G * B, S) @ context_value_SKD.transpose(0, 1)).view(K, n, G * B, D)
    result_KnGBD = result_KnGBD + own_shares.reshape(K, n, G * B, B) @ value_nBKD.permute(2, 0, 1, 3)
    return result_KnGBD.view(K, n, G, B, D).permute(1, 3, 0, 2, 4).reshape(n, B, A, D)


@functools.cache
def _flex() -> tuple[Any, Any]:
    """flex_attention's mask builder and kernel, compiled once for all lengths. Uncompiled they would hold the whole mask and all scores."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return compiled(create_block_mask), compiled(flex_attention)


def _attend_flex(
    query_NBAD: Tensor,
    key_NBKD: Tensor,
    value_NBKD: Tensor,
    context_key_TKD: Tensor,
    context_value_TKD: Tensor,
    mask: Any,
) -> Tensor:
    def heads_first(rows: Tensor) -> Tensor:
        return rows.transpose(0, 1)[None]

    _, kernel = _flex()
    result_1AQD = kernel(
        heads_first(query_NBAD.flatten(0, 1)),
        heads_first(torch.cat([context_key_TKD, key_NBKD.flatten(0, 1)])),
        heads_first(torch.cat([context_value_TKD, value_NBKD.flatten(0, 1)])),
        block_mask=mask,
        enable_gqa=query_NBAD.shape[2] != key_NBKD.shape[2],
        kernel_options={**FEW_QUERIES_TOO, **BACKWARD},
    )
    return result_1AQD[0].transpose(0, 1).reshape(query_NBAD.shape)  # type: ignore[no-any-return]
