"""Hard cross-entropy of the slots under the target's head (specs: "Loss").

    loss = sum_k w_k CE(logits_k, x_{a+k}) / sum_k w_k,   w_k = exp(-(k - 1) / gamma), k = 1..B-1,

over all blocks of the batch under one denominator. Early slots weigh more, because a wrong slot wastes all behind it.

Shapes: N blocks, B slots a block, M slots that count, H hidden size, V vocabulary (of the head in use).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from draftline.compiler import compiled

LOGITS = 2**27
"""Logits computed at a time: 512 MB in fp32, whatever the vocabulary."""


def default_gamma(block_size: int) -> float:
    """Decay length of the slot weights: the paper's 4, 5 and 7 for blocks of 8, 10 and 16.

    Linear between 10 and 16; in proportion to the block below (B / 2, which both smaller ones follow) and above (7 B / 16).
    """
    if block_size <= 10:
        return block_size / 2
    return 5 + (block_size - 10) / 3 if block_size <= 16 else block_size * 7 / 16


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """exp(-(k-1)/gamma) for k = 1..B-1, [B-1] fp32."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


@dataclass
class BlockLoss:
    """`loss` with its gradient; `accuracy` over the slots that count; `tau`, mean of each block's right prefix + 1."""

    loss: Tensor
    accuracy: Tensor
    tau: Tensor


def block_loss(
    hidden_NBH: Tensor, head_VH: Tensor, labels_NB: Tensor, counts_NB: Tensor, gamma: float, logits: int = LOGITS
) -> BlockLoss:
    """Loss and figures of slots 1..B-1.

    hidden_NBH: [N, B-1, H], the drafter's output without slot 0, which predicts nothing.
    head_VH: the frozen head, whole or only the rows of the tokens that occur as labels.
    labels_NB, counts_NB: int64 and bool [N, B-1] from `draftline.drafter.anchors.block_labels`, labels as rows of head_VH.
    A slot that does not count has no loss and ends the right prefix.
    """
    weights_NB = slot_weights(counts_NB.shape[1] + 1, gamma).to(counts_NB.device).expand(counts_NB.shape)
    weights_M = weights_NB[counts_NB]
    total, right_M = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_NBH[counts_NB], head_VH, labels_NB[counts_NB], weights_M / weights_M.sum(), logits
    )
    right_NB = torch.zeros_like(counts_NB).masked_scatter(counts_NB, right_M)
    tau = right_NB.long().cumprod(dim=1).sum(dim=1).float().mean() + 1
    return BlockLoss(total, right_M.float().mean(), tau)


class _LinearCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy of hidden @ head.T; the gradient with respect to hidden is made chunk by chunk with it.

    So logits live for one chunk only, and none is kept or computed twice. The head is frozen and gets no gradient.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_MH: Tensor, head_VH: Tensor, labels_M: Tensor, weights_M: Tensor, logits: int
    ) -> tuple[Tensor, Tensor]:
        step = max(1, logits // len(head_VH))
        total = torch.zeros((), device=hidden_MH.device)
        gradient_MH, right = torch.empty_like(hidden_MH), []
        measure = _compiled() if hidden_MH.is_cuda else _measured
        for first in range(0, len(hidden_MH), step):
            rows = slice(first, first + step)
            logits_mV = hidden_MH[rows].to(head_VH.dtype) @ head_VH.T
            loss, right_m, gradient_mV = measure(logits_mV, labels_M[rows, None], weights_M[rows, None])
            total += loss
            right.append(right_m)
            gradient_MH[rows] = (gradient_mV @ head_VH).to(hidden_MH.dtype)
        right_M = torch.cat(right)
        ctx.save_for_backward(gradient_MH)
        ctx.mark_non_differentiable(right_M)
        return total, right_M

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient_MH,) = ctx.saved_tensors
        return upstream * gradient_MH, None, None, None, None


def _measured(logits_mV: Tensor, labels_m1: Tensor, weights_m1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of cross-entropies, whether the label is on top [m], and the gradient [m, V] in the logits' dtype."""
    wide_mV = logits_mV.float()
    right_m = wide_mV.argmax(dim=1) == labels_m1[:, 0]
    wide_mV = functional.log_softmax(wide_mV, dim=1)
    labels_log_m1 = wide_mV.gather(1, labels_m1)
    gradient_mV = wide_mV.exp_().mul_(weights_m1).to(logits_mV.dtype)
    gradient_mV.scatter_(1, labels_m1, (labels_log_m1.expm1() * weights_m1).to(logits_mV.dtype))
    return -(weights_m1 * labels_log_m1).sum(), right_m, gradient_mV


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`_measured` compiled: it reads the logits twice and writes the gradient once; step by step ten times as much is moved."""
    return compiled(_measured)
