"""Live: speculative decoding with the target itself, greedy, one sequence.

Every target is exact, by what its layers allow. A full-attention cache is cropped, or, after a tree, gathered along the
accepted path. A recurrent state (gated delta net) cannot forget: its state before the verification is kept and the
committed tokens run again. A tree mask means nothing to a recurrent state nor to a sliding window, so there each path
from the root to a leaf is verified as a row of its own.

Shapes: N tokens of a tree (the root included) or of a prompt, F = K * H features, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from draftline.decode.draft import Marginals, draft
from draftline.decode.replay import Rounds
from draftline.decode.tree import Tree, build_tree
from draftline.loading import decoder_layers

if TYPE_CHECKING:
    from draftline.drafter.model import Drafter
    from draftline.heads import Heads

Propose = Callable[[torch.Tensor, int], Marginals]
"""What drafts: the features [T, F] of all tokens before the anchor, and the anchor's token -> marginals of one anchor."""


def proposer(drafter: "Drafter", heads: "Heads", count: int) -> Propose:
    """A drafter that gives the `count` best tokens per slot: 1 for a chain, the budget for a tree."""

    @torch.no_grad()
    def propose(features_TF: torch.Tensor, anchor: int) -> Marginals:
        context_TH = drafter.context(features_TF)
        place = torch.tensor([len(features_TF)], device=features_TF.device)
        return draft(drafter, heads, context_TH, place, place.new_tensor([anchor]), count)

    return propose


@dataclass
class Decoded:
    """The completion, its stop token included, and its rounds, counted as in `draftline.decode.replay`."""

    completion_ids: list[int]
    rounds: Rounds = field(default_factory=lambda: Rounds([], []))


def decode(
    target: "Target",
    propose: Propose,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    budget: int | None = None,
) -> Decoded:
    """Decode greedily with a chain per round, or a tree of `budget` nodes. The completion is the target's own."""
    token, features_TF = target.prefill(prompt_ids)
    result = Decoded([token])
    while result.completion_ids[-1] not in eos_token_ids and len(result.completion_ids) < max_new_tokens:
        anchor = result.completion_ids[-1]
        tree = _tree(anchor, propose(features_TF, anchor), budget)
        choices, features_NF = target.verify(tree)
        path = tree.walk(choices.__getitem__)
        target.commit(tree, path)
        features_TF = torch.cat([features_TF, features_NF[[0, *path]]])
        committed = [*(tree.tokens[node] for node in path), choices[path[-1] if path else 0]]
        committed = _until_stop(committed, eos_token_ids)[: max_new_tokens - len(result.completion_ids)]
        result.completion_ids += committed
        result.rounds.accepted.append(min(len(path), len(committed)))
        result.rounds.lengths.append(len(committed))
    return result


def _tree(anchor: int, marginals: Marginals, budget: int | None) -> Tree:
    """The round's draft: without a budget the chain, which is a tree of one branch that holds each slot's best token."""
    tokens_SM, log_probs_SM = marginals.tokens[0], marginals.log_probs[0]
    if budget is None:
        tokens_SM, log_probs_SM, budget = tokens_SM[:, :1], log_probs_SM[:, :1], len(tokens_SM)
    return build_tree(anchor, tokens_SM.tolist(), log_probs_SM.tolist(), budget)


def _until_stop(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    ends = [n + 1 for n, token in enumerate(tokens) if token in eos_token_ids]
    return tokens[: min(ends, default=len(tokens))]


class Target:
    """A causal language model of transformers with its cache over one sequence, and taps on `layer_ids`."""

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self.model, self.layer_ids = model, list(layer_ids)
        self.device = next(model.parameters()).device
        self.cache: Any = DynamicCache()

    def prefill(self, prompt_ids: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Start a sequence: the first token of its completion, and the prompt's features [N, F]."""
        self.cache = DynamicCache(config=self.model.config)
        for layer in self.cache.layers:
            # Otherwise a window drops what a crop would have to bring back.
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()  # type: ignore[no-untyped-call]
        logits_1NV, features_1NF = self._forward([list(prompt_ids)], self.cache)
        self._crop(0)
        return int(logits_1NV[0, -1].argmax()), features_1NF[0]

    def verify(self, tree: Tree) -> tuple[list[int], torch.Tensor]:
        """The token that the target puts after each node, and each node's features [N, F]. `commit` must follow."""
        if _is_chain(tree):
            self._before = [copy.deepcopy(layer) for layer in self._recurrent()]
            logits_1NV, features_1NF = self._forward([tree.tokens], self.cache)
            logits_NV, features_NF = logits_1NV[0], features_1NF[0]
        elif self._full_attention():
            logits_NV, features_NF = self._verify_masked(tree)
        else:
            logits_NV, features_NF = self._verify_paths(tree)
        return logits_NV.argmax(dim=-1).tolist(), features_NF

    def commit(self, tree: Tree, path: Sequence[int]) -> None:
        """Leave in the cache what it held before `verify`, the anchor, and the accepted nodes of `path`."""
        kept = [0, *path]
        if _is_chain(tree):
            self._commit_chain(tree.tokens, len(kept))
        elif self._full_attention():
            start = self.cache.get_seq_length() - len(tree)
            rows = torch.tensor([*range(start), *(start + node for node in kept)], device=self.device)
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]
        else:
            self._forward([[tree.tokens[node] for node in kept]], self.cache)
            self._crop(0)

    def _commit_chain(self, tokens: list[int], kept: int) -> None:
        if not self._before or kept == len(tokens):
            self._crop(len(tokens) - kept)
            return
        self._crop(len(tokens))
        before = iter(self._before)
        self.cache.layers = [next(before) if _recurrent(layer) else layer for layer in self.cache.layers]
        self._forward([tokens[:kept]], self.cache)
        self._crop(0)

    def _verify_masked(self, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        """All nodes in one row: each sees the committed tokens, its ancestors and itself."""
        start, dtype = self.cache.get_seq_length(), self.model.dtype
        own_NN = torch.from_numpy(tree.ancestors()).to(self.device)
        seen = torch.cat([own_NN.new_ones(len(tree), start), own_NN], dim=1)
        # Added to the scores, so that it holds for every attention implementation.
        mask = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill(~seen, torch.finfo(dtype).min)
        positions = start + torch.tensor([tree.depths], device=self.device)
        logits_1NV, features_1NF = self._forward(
            [tree.tokens], self.cache, attention_mask=mask[None, None], position_ids=positions
        )
        return logits_1NV[0], features_1NF[0]

    def _verify_paths(self, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        """Each path in a row of a copied cache. Rows are filled up behind their ends, where nothing real looks."""
        paths = tree.paths()
        length = max(map(len, paths))
        rows = [[tree.tokens[node] for node in path] + [tree.tokens[0]] * (length - len(path)) for path in paths]
        cache = copy.deepcopy(self.cache)
        cache.reorder_cache(torch.zeros(len(paths), dtype=torch.int64, device=self.device))
        logits, features = self._forward(rows, cache)
        place = {node: (row, depth) for row, path in enumerate(paths) for depth, node in enumerate(path)}
        row_N, depth_N = torch.tensor([place[node] for node in range(len(tree))], device=self.device).T
        return logits[row_N, depth_N], features[row_N, depth_N]

    @torch.no_grad()
    def _forward(self, rows: list[list[int]], cache: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, N, V] and features [R, N, F] of rows behind what `cache` holds, which grows by them."""
        with self._tapped() as outputs:
            result = self.model(torch.tensor(rows, device=self.device), cache=cache, use_cache=True, **options)
        return result.logits, torch.cat([outputs[layer] for layer in self.layer_ids], dim=-1)

    @contextmanager
    def _tapped(self) -> Iterator[dict[int, torch.Tensor]]:
        """Collects the outputs of the tapped layers by layer id."""
        outputs: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                outputs[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        layers = decoder_layers(self.model)
        handles = [layers[layer].register_forward_hook(keep(layer)) for layer in self.layer_ids]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    def _crop(self, tokens: int) -> None:
        """Take `tokens` off the attention layers. 0 lets sliding windows drop what they no longer need."""
        for layer in self.cache.layers:
            if not _recurrent(layer):
                layer.crop(-tokens)

    def _recurrent(self) -> list[Any]:
        return [layer for layer in self.cache.layers if _recurrent(layer)]

    def _full_attention(self) -> bool:
        return not any(_recurrent(layer) or layer.is_sliding for layer in self.cache.layers)


def _recurrent(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _is_chain(tree: Tree) -> bool:
    return tree.parents == list(range(-1, len(tree) - 1))
