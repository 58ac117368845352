"""One step of a drafter's training.

Embedding and head are the target's and frozen; fc, norms and layers learn. Weights and optimizer are fp32; on CUDA the
products run in bf16 under autocast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftline.drafter.batch import Batch, make_batches
from draftline.drafter.data import Sample
from draftline.drafter.loss import block_loss, default_gamma, slot_weights
from draftline.drafter.model import Drafter
from draftline.drafter.schedule import learning_rate
from draftline.drafter.state import Row, State, state_names
from draftline.errors import DraftlineError
from draftline.heads import Heads

BETAS = (0.9, 0.95)
"""AdamW's decay rates. 0.95 forgets a squared gradient after some 20 steps: trainings here may be a few hundred steps
long, where 0.999 would still weigh in the first, much larger gradients at the end."""


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained: the keys of `drafters.{name}` that are not its shape."""

    epochs: int
    batch: int
    anchors: int
    gamma: float
    lr: float
    warmup: float
    weight_decay: float
    clip: float
    head: str
    seed: int

    @classmethod
    def from_settings(cls, values: Mapping[str, Any]) -> "Recipe":
        """From a `drafters.{name}` entry; a null gamma follows from the block size."""
        gamma = default_gamma(values["block_size"]) if values["gamma"] is None else values["gamma"]
        return cls(gamma=gamma, **{name: values[name] for name in cls.__annotations__ if name != "gamma"})


class Share(NamedTuple):
    """A batch's share of a step: of the weight of the slots that count, of their number, and of the blocks."""

    weight: float
    slots: float
    blocks: float


def shares(batches: Sequence[Batch], gamma: float) -> list[Share]:
    """Each batch's share: mean losses weighed by them give the mean over all, under one denominator."""
    sums = [
        (
            float((slot_weights(batch.blocks.shape[1], gamma) * batch.counts).sum()),
            int(batch.counts.sum()),
            len(batch.blocks),
        )
        for batch in batches
    ]
    totals = [sum(column) for column in zip(*sums)]
    return [Share(*(part / total for part, total in zip(row, totals))) for row in sums]


class Trainer:
    """A drafter with its optimizer between the target's embedding and head."""

    def __init__(self, state: State, recipe: Recipe, heads: Heads, vocabulary: Tensor | None, device: str) -> None:
        self.recipe, self.heads, self.vocabulary, self.device = recipe, heads, vocabulary, device
        self.config, self.step, self.total = state.config, state.step, state.total_steps
        self.head_VH = heads.lm_head_VH if vocabulary is None else heads.lm_head_VH[vocabulary.to(device)]
        self.drafter = Drafter(state.config)
        self.drafter.load_state_dict(state.weights())
        self.drafter.to(device).train()
        if device == "cuda":
            self.drafter.fuse()
        named = dict(self.drafter.named_parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in named.values() if p.dim() == 2], "weight_decay": recipe.weight_decay},
                {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
            ],
            betas=BETAS,
            fused=True,
        )
        for name, parameter in named.items():
            _, mean, square = state_names(name)
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(state.step), device=device),
                "exp_avg": state.tensors[mean].to(device),
                "exp_avg_sq": state.tensors[square].to(device),
            }

    def train(self, samples: Sequence[Sample]) -> Row:
        """One step on a batch of samples, and its metrics. Memory holds the forward of a part of them at a time."""
        recipe = self.recipe
        samples = [sample.on(self.device) for sample in samples]
        shape = (recipe.anchors, self.config.block_size, self.config.mask_token_id, recipe.seed)
        batches = make_batches(samples, *shape, self.vocabulary)
        rate = learning_rate(self.step, self.total, recipe.lr, recipe.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        parts = [self._learn(batch, share) for batch, share in zip(batches, shares(batches, recipe.gamma))]
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), recipe.clip)
        loss, accuracy, tau, grad_norm = torch.stack([*torch.stack(parts).sum(0), norm]).tolist()
        if not torch.isfinite(torch.tensor([loss, grad_norm])).all():
            raise DraftlineError(
                f"drafters: lr: {recipe.lr}: training diverged at step {self.step + 1} (loss {loss}, gradient {grad_norm});"
                " lower lr or clip, or raise warmup"
            )
        self.optimizer.step()
        self.step += 1
        return {
            "step": self.step,
            "epoch": samples[0].epoch,
            "loss": loss,
            "accuracy": accuracy,
            "tau": tau,
            "lr": rate,
            "grad_norm": grad_norm,
            "tokens": sum(len(sample.input_ids) for sample in samples),
            "anchors": sum(len(batch.anchors) for batch in batches),
        }

    def _learn(self, batch: Batch, share: Share) -> Tensor:
        """Add the gradient of a part of the step's batch. Gives what it adds to the step's loss, accuracy and tau, [3]."""
        batch = batch.to(self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            hidden_NBH = self.hidden(batch)[:, 1:]
            figures = block_loss(hidden_NBH, self.head_VH, batch.labels, batch.counts, self.recipe.gamma)
        loss = figures.loss * share.weight
        loss.backward()  # type: ignore[no-untyped-call]
        return torch.stack([loss.detach(), figures.accuracy * share.slots, figures.tau * share.blocks])

    def hidden(self, batch: Batch) -> Tensor:
        """The drafter's output [N, B, H] for a batch."""
        blocks_NBH = self.heads.embed(batch.blocks).float()
        context_TH = self.drafter.context(batch.features)
        return self.drafter(context_TH, batch.positions, blocks_NBH, batch.anchors, batch.context_start)  # type: ignore[no-any-return]

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments as `State` holds them; not copies."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.drafter.named_parameters():
            moments = self.optimizer.state[parameter]
            found.update(zip(state_names(name), (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"])))
        return found
