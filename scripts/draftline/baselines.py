"""What any drafter must beat: an untrained one, and the labels' own frequencies.

`unigram` knows how often each token stands in each slot behind an anchor of the training data, and nothing of the context:
it proposes the same block everywhere.

Shapes: T tokens of a sample, F features, A anchors, S drafted slots, V vocabulary, M best tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftline import provenance
from draftline.decode.draft import NO_TOKEN, Marginals
from draftline.drafter.anchors import block_labels, eligible
from draftline.drafter.config import DrafterConfig
from draftline.drafter.model import Drafter
from draftline.evaluation import BLOCKS, Bench, DrafterProposer, Proposer, evaluate
from draftline.heads import Heads
from draftline.manifest import Manifest
from draftline.tokens import Ragged


def evaluate_baseline(
    baseline: str,
    manifest: str,
    heads: str,
    tokens: Sequence[str],
    completions: str,
    states: str,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """Evaluate ``untrained`` or ``unigram`` in the shape of ``config["drafter"]``. `config` is the rule's settings slice.

    The labels of `tokens` are what ``unigram`` counts; ``untrained`` needs none.
    """
    target, shape = Manifest.load(manifest), config["drafter"]
    bench = Bench(completions, states, target)
    proposer: Proposer
    if baseline == "unigram":
        proposer = Unigram(label_counts(tokens, shape["block_size"] - 1, target.vocab_size))
    else:
        drafter = Drafter.initialized(
            DrafterConfig.from_settings(shape, target, bench.states.layers), shape["seed"]
        ).requires_grad_(False)
        device = run["device"]
        proposer = DrafterProposer(drafter.eval().to(device), Heads.load(heads, device), run.get("batch", BLOCKS))
    return evaluate(proposer, bench, config["evaluate"])


def label_counts(paths: Sequence[str | Path], slots: int, vocab_size: int) -> torch.Tensor:
    """How often each token is a slot's label [S, V] int64, over every anchor that training may draw from tokens shards."""
    counts_SV = torch.zeros(slots, vocab_size, dtype=torch.int64)
    place_S = torch.arange(slots) * vocab_size
    for path in paths:
        table = provenance.read_parquet(path, columns=["input_ids", "spans"])
        rows, spans = Ragged.of(table["input_ids"]), Ragged.of(table["spans"])
        for n in range(len(table)):
            ids_T = torch.tensor(rows[n], dtype=torch.int64)
            mask_T = torch.zeros(len(ids_T), dtype=torch.bool)
            for start, end in spans[n].reshape(-1, 2).tolist():
                mask_T[start:end] = True
            labels_AS, counted_AS = block_labels(ids_T, mask_T, eligible(mask_T), slots + 1)
            labels = (labels_AS + place_S)[counted_AS]
            counts_SV.view(-1).index_add_(0, labels, torch.ones_like(labels))
    return counts_SV


class Unigram:
    """Proposes slot marginals of the training labels, the same at every anchor, from their counts [S, V]."""

    def __init__(self, counts_SV: torch.Tensor) -> None:
        counts = counts_SV.numpy()
        self.slots = len(counts)
        # Equally frequent tokens in order of their ids.
        self._tokens_SV = np.argsort(-counts, axis=1, kind="stable")
        descending_SV = np.take_along_axis(counts, self._tokens_SV, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_probs_SV = np.log(descending_SV / descending_SV.sum(axis=1, keepdims=True))
        self._log_probs_SV = np.where(descending_SV > 0, log_probs_SV, -np.inf).astype(np.float32)
        self._tokens_SV[descending_SV == 0] = NO_TOKEN

    def propose(
        self, features_TF: torch.Tensor, input_ids_T: torch.Tensor, start: int, truth_AS: NDArray[np.int64], count: int
    ) -> Marginals:
        """The `count` most frequent tokens per slot. Of the sequence nothing but the number of anchors is used."""
        shape = (len(truth_AS), self.slots, min(count, self._tokens_SV.shape[1]))
        return Marginals(
            np.broadcast_to(self._tokens_SV[:, :count], shape), np.broadcast_to(self._log_probs_SV[:, :count], shape)
        )
