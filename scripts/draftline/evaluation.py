"""One evaluation: a drafter, or what stands for one, replayed over the target's completions of an evaluation set.

Shapes: T tokens of prompt and completion, F = K * H features, A anchors, S drafted slots, M best tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from draftline import provenance
from draftline.decode.draft import Marginals, draft
from draftline.decode.replay import LAST_ROUND, Rounds, depth_table, truth, walk
from draftline.drafter.model import Drafter
from draftline.drafter.weights import load_drafter
from draftline.errors import DraftlineError
from draftline.heads import Heads
from draftline.manifest import Manifest
from draftline.progress import Progress
from draftline.states import STATES_FACTS, StatesReader, difference
from draftline.statistics import bootstrap_interval

CHAIN = "chain"
COMPUTED_BY = ("dtype", "kernels")
"""Facts in which the states of training and evaluation must agree. Their storage may differ: `draftline.storage.of_bench`."""
BLOCKS = 128
"""Blocks drafted at once; run.evaluate.batch of the config."""


class Proposer(Protocol):
    """What drafts: the marginals of `slots` slots behind every token of a completion but the last."""

    @property
    def slots(self) -> int: ...

    def propose(
        self, features_TF: torch.Tensor, input_ids_T: torch.Tensor, start: int, truth_AS: NDArray[np.int64], count: int
    ) -> Marginals:
        """The `count` best tokens per slot behind the A anchors from position `start` on. `truth_AS`: what stands there."""
        ...


@dataclass(frozen=True)
class DrafterProposer:
    """A drafter with its target's embedding and head, on their device."""

    drafter: Drafter
    heads: Heads
    blocks: int = BLOCKS

    @property
    def slots(self) -> int:
        return self.drafter.config.block_size - 1

    @torch.no_grad()
    def propose(
        self, features_TF: torch.Tensor, input_ids_T: torch.Tensor, start: int, truth_AS: NDArray[np.int64], count: int
    ) -> Marginals:
        device = self.heads.embed_VH.device
        anchors_A = torch.arange(start, start + len(truth_AS), device=device)
        context_TH = self.drafter.context(features_TF[: start + len(truth_AS)].to(device))
        tokens_A, right_AS = input_ids_T.to(device)[anchors_A], torch.tensor(truth_AS, device=device)
        return draft(self.drafter, self.heads, context_TH, anchors_A, tokens_A, count, right_AS, self.blocks)


@dataclass(frozen=True)
class Prompt:
    """A prompt of an evaluation set. `sample` is its place among the hidden states, `start` where its completion begins."""

    id: str
    sample: int
    start: int
    completion_ids: list[int]


class Bench:
    """Completions of an evaluation set with their hidden states.

    `prompts` are those with something to draft: completions of two tokens or more. Raises DraftlineError with both paths
    when the files do not belong together, and when the completions are not greedy: only at temperature 0 do they say what
    the target would accept.
    """

    def __init__(self, completions: str | Path, states: str | Path, manifest: Manifest) -> None:
        self.states = StatesReader(states, manifest)
        self.engine = {name: provenance.parquet_facts(completions, name) for name in ("engine", "engine_version")}
        temperature = provenance.parquet_facts(completions, "sampling")["temperature"]
        if temperature != 0:
            raise DraftlineError(
                f"{completions}: sampled at temperature {temperature}; replay needs greedy completions"
            )
        columns = ["id", "prompt_ids", "completion_ids", "status", "thinking"]
        rows = {row["id"]: row for row in provenance.read_parquet(completions, columns).to_pylist()}
        if rows.keys() != set(self.states.ids):
            raise DraftlineError(f"{states}: holds other samples than {completions}; delete the former and run again")
        self.prompts: list[Prompt] = []
        for n, sample in enumerate(self.states.ids):
            row = rows[sample]
            if self.states.input_ids(n).tolist() != row["prompt_ids"] + row["completion_ids"]:
                raise DraftlineError(
                    f"{states}: sample {sample}: other tokens than in {completions}; delete the former and run again"
                )
            if row["status"] != "error" and len(row["completion_ids"]) > 1:
                self.prompts.append(Prompt(sample, n, len(row["prompt_ids"]), row["completion_ids"]))
        if not self.prompts:
            raise DraftlineError(
                f"{completions}: no completion of two tokens, so there is nothing to draft; raise evaluate.max_new_tokens"
            )
        self.without_rounds = len(rows) - len(self.prompts)
        self.looping_share = sum(row["status"] == "repetition" for row in rows.values()) / len(rows)
        self.thinking_share = sum(row["thinking"] for row in rows.values()) / len(rows)


def evaluate_drafter(
    weights: str,
    manifest: str,
    heads: str,
    completions: str,
    states: str,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """Evaluate the drafter of a weights file. `config` is the config's ``evaluate``, `run` the job's run options."""
    target = Manifest.load(manifest)
    bench = Bench(completions, states, target)
    drafter = load_drafter(weights)
    training = training_states(weights)
    shape = (drafter.config.hidden_size, drafter.config.vocab_size, drafter.config.num_target_layers)
    trained_on = training["target"]["weights_sha256"] if training else target.weights_sha256
    if shape != (target.hidden_size, target.vocab_size, target.num_layers) or trained_on != target.weights_sha256:
        raise DraftlineError(f"{weights}: was trained for another target than {states}; make both for one target")
    if list(drafter.config.target_layer_ids) != bench.states.layers:
        raise DraftlineError(
            f"{weights}: reads layers {list(drafter.config.target_layer_ids)}, but {states} holds {bench.states.layers};"
            " make both with one hidden_states.layers"
        )
    mismatch = training and difference("training", bench.states.facts, training, COMPUTED_BY)
    if mismatch and not config["allow_kernel_mismatch"]:
        raise DraftlineError(
            f"{states}: not computed like what {weights} learned from: {mismatch}; make both on one kind of machine, or set"
            " evaluate.allow_kernel_mismatch: true to measure all the same"
        )
    device = run["device"]
    proposer = DrafterProposer(drafter.to(device), Heads.load(heads, device), run.get("batch", BLOCKS))
    found = evaluate(proposer, bench, config, training)
    found["harness"]["kernel_mismatch"] = mismatch
    return found


def training_states(weights: str) -> dict[str, Any] | None:
    """Facts of the hidden states that a drafter learned from, where its file tells them."""
    text = provenance.safetensors_header(weights)["__metadata__"].get("states")
    return orjson.loads(text) if text is not None else None


def evaluate(
    proposer: Proposer, bench: Bench, config: Mapping[str, Any], training: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The content of an evaluation file (docs/artifacts.md), without the drafter's and the bench's name.

    `config` is the config's ``evaluate``; `training` are facts of the hidden states that the drafter learned from.
    """
    budgets = sorted(config["budgets"])
    methods = [CHAIN, *map(str, budgets)]
    found: dict[str, list[Rounds]] = {method: [] for method in methods}
    progress = Progress("evaluate", len(bench.prompts), "prompts")
    for prompt in bench.prompts:
        features_TF, input_ids_T = bench.states.features(prompt.sample), bench.states.input_ids(prompt.sample)
        truth_AS = truth(prompt.completion_ids, proposer.slots)
        marginals = proposer.propose(features_TF, input_ids_T, prompt.start, truth_AS, budgets[-1])
        chain_A, trees = depth_table(marginals, truth_AS, budgets)
        for method, depths_A in zip(methods, [chain_A, *trees.values()], strict=True):
            found[method].append(walk(depths_A))
        progress.add()
    summaries = {method: summarize(rounds, proposer.slots, config) for method, rounds in found.items()}
    chain = summaries.pop(CHAIN)
    return {
        "prompts": len(bench.prompts),
        "rounds": chain["rounds"],
        "chain": {**chain, "per_position": per_position(found[CHAIN], proposer.slots)},
        "ddtree": summaries,
        "looping_share": bench.looping_share,
        "per_prompt": [
            {
                "id": prompt.id,
                "tokens": len(prompt.completion_ids),
                "tau": {method: float(np.mean(found[method][n].lengths)) for method in methods},
                "rounds": {method: len(found[method][n].lengths) for method in methods},
            }
            for n, prompt in enumerate(bench.prompts)
        ],
        "harness": harness(proposer, bench, config, training),
    }


def summarize(rounds: Sequence[Rounds], slots: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Both means, interval and histogram of one method; `rounds` holds each prompt's.

    `histogram[n]` counts the rounds of accepted length n, n = 0..B (0 never occurs).
    """
    lengths = np.concatenate([of_prompt.lengths for of_prompt in rounds])
    means = [float(np.mean(of_prompt.lengths)) for of_prompt in rounds]
    return {
        "tau": float(np.mean(means)),
        "tau_pooled": float(np.mean(lengths)),
        "ci95": list(bootstrap_interval(means, config["bootstrap"], config["seed"])),
        "rounds": len(lengths),
        "histogram": np.bincount(lengths, minlength=slots + 2).tolist(),
    }


def per_position(rounds: Sequence[Rounds], slots: int) -> list[float]:
    """Share of all rounds in which slot k = 1..S was accepted."""
    accepted = np.concatenate([of_prompt.accepted for of_prompt in rounds])
    return [float(np.mean(accepted >= slot)) for slot in range(1, slots + 1)]


def harness(
    proposer: Proposer, bench: Bench, config: Mapping[str, Any], training: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything that one must know to compare these figures with others."""
    facts = bench.states.facts
    return {
        "mode": "replay",
        "temperature": 0,
        "thinking": {0.0: False, 1.0: True}.get(bench.thinking_share, bench.thinking_share),
        "max_new_tokens": config["max_new_tokens"],
        "block_size": proposer.slots + 1,
        "budgets": sorted(config["budgets"]),
        "budget": "nodes without the root",
        "draft": "chain: argmax of each slot; tree: most probable prefixes under the slots' marginals; full vocabulary",
        "acceptance": "a draft token is accepted when it is the target's argmax",
        "bonus_token": "counted",
        "first_token": "not counted: the prefill gives it, no round",
        "last_round": LAST_ROUND,
        "estimator": "tau: mean over prompts of the mean accepted length of a prompt's rounds; tau_pooled: over all rounds",
        "ci95": f"percentile bootstrap over prompts, {config['bootstrap']} resamples, seed {config['seed']}",
        "prompts_without_rounds": bench.without_rounds,
        "completions": bench.engine,
        "target": facts["target"],
        "states": {name: facts[name] for name in STATES_FACTS},
        "training_states": training and {name: training[name] for name in STATES_FACTS},
    }
