"""One drafter pass per anchor: the best tokens of every slot, with their probabilities.

What a drafter proposes at an anchor depends on nothing but the features before it and the anchor's token, so the anchors
of a whole completion can be drafted in one pass.

Shapes: T context tokens, H hidden size, A anchors, B block size, S = B - 1 drafted slots, V vocabulary, M best tokens.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from draftline.drafter.model import Drafter
    from draftline.heads import Heads

LOGITS = 1 << 26
"""Logits held at once (fp32): 256 MiB."""

NO_TOKEN = -1
"""Stands, with log-probability -inf, where a slot proposes nothing."""


class Marginals(NamedTuple):
    """The M most probable tokens of the slots after each anchor [A, S, M], best first; [..., 0] is the chain."""

    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float32]


@torch.no_grad()
def draft(
    drafter: "Drafter",
    heads: "Heads",
    context_TH: torch.Tensor,
    anchors_A: torch.Tensor,
    tokens_A: torch.Tensor,
    count: int,
    truth_AS: torch.Tensor | None = None,
    blocks: int = 128,
) -> Marginals:
    """The `count` best tokens per slot, over the full vocabulary, for blocks behind `anchors_A`.

    `context_TH` is `drafter.context` of the positions 0..T-1 of one sequence, `anchors_A` are positions in it (int64, at
    most T), `tokens_A` the tokens there. `blocks` go through the drafter at once. With `truth_AS`, the target's own
    tokens behind the anchors, slots that cannot change the accepted length of a chain or a tree of up to `count` nodes
    are left out (`Needed`): the head is the larger part of the cost.
    """
    config = drafter.config
    slots, count = config.block_size - 1, min(count, config.vocab_size)
    positions_T = torch.arange(len(context_TH), device=context_TH.device)
    tokens_ASM = np.full((len(anchors_A), slots, count), NO_TOKEN, dtype=np.int64)
    log_probs_ASM = np.full((len(anchors_A), slots, count), -np.inf, dtype=np.float32)
    for start in range(0, len(anchors_A), blocks):
        part = slice(start, start + blocks)
        anchors_A_ = anchors_A[part]
        ids_AB = torch.full((len(anchors_A_), slots + 1), config.mask_token_id, device=context_TH.device)
        ids_AB[:, 0] = tokens_A[part]
        hidden_ABH = drafter(context_TH, positions_T, heads.embed(ids_AB), anchors_A_, torch.zeros_like(anchors_A_))
        needed = Needed(len(anchors_A_), hidden_ABH.device)
        for slot in range(slots):
            rows_R = needed.rows()
            tokens_RM, log_probs_RM = _best(heads, hidden_ABH[rows_R, slot + 1], count)
            tokens_ASM[start + rows_R.cpu().numpy(), slot] = tokens_RM.cpu().numpy()
            log_probs_ASM[start + rows_R.cpu().numpy(), slot] = log_probs_RM.cpu().numpy()
            if truth_AS is not None:
                needed.narrow(rows_R, tokens_RM, log_probs_RM, truth_AS[part][rows_R, slot])
    return Marginals(tokens_ASM, log_probs_ASM)


class Needed:
    """Anchors whose next slot can still matter for what the target accepts, slot after slot.

    It matters while the true continuation may be accepted so far (its token was among the best of every slot), and else
    while a longer prefix could be more probable than the true one and take its place in a tree: the most probable prefix
    bounds all of its length and beyond.
    """

    def __init__(self, anchors: int, device: torch.device) -> None:
        self._needed_A = torch.ones(anchors, dtype=torch.bool, device=device)
        self._alive_A = self._needed_A.clone()
        # Log-probability of the true prefix as far as it is alive, and of the most probable prefix.
        self._true_A = torch.zeros(anchors, dtype=torch.float64, device=device)
        self._best_A = self._true_A.clone()

    def rows(self) -> torch.Tensor:
        """Indices [R] of the anchors whose next slot is needed."""
        return self._needed_A.nonzero()[:, 0]

    def narrow(
        self, rows_R: torch.Tensor, tokens_RM: torch.Tensor, log_probs_RM: torch.Tensor, truth_R: torch.Tensor
    ) -> None:
        """Take in one slot's best tokens and the true token there."""
        found_RM = tokens_RM == truth_R[:, None]
        alive_R = self._alive_A[rows_R] & found_RM.any(dim=1)
        true_R = torch.where(found_RM, log_probs_RM, 0).sum(dim=1).double()
        self._true_A[rows_R] += torch.where(alive_R, true_R, 0)
        self._best_A[rows_R] += log_probs_RM[:, 0].double()
        self._alive_A[rows_R] = alive_R
        self._needed_A[rows_R] = alive_R | (self._best_A[rows_R] > self._true_A[rows_R])


def _best(heads: "Heads", hidden_RH: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities [R, count] of R slots, the head taken in chunks."""
    tokens, log_probs = [], []
    for rows_RH in torch.split(hidden_RH, max(1, LOGITS // heads.embed_VH.shape[0])):
        logits_RV = heads.logits(rows_RH).float()
        top = logits_RV.topk(count, dim=-1)
        tokens.append(top.indices)
        log_probs.append(top.values - logits_RV.logsumexp(dim=-1, keepdim=True))
    return torch.cat(tokens), torch.cat(log_probs)
