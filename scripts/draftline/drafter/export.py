"""The finished drafter as a model folder that SGLang, vLLM and the dflash package load: the layout of released checkpoints."""

import json
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftline import provenance
from draftline.drafter.config import SLIDING
from draftline.drafter.state import State
from draftline.errors import DraftlineError

if TYPE_CHECKING:
    from draftline.manifest import Manifest


def export(
    drafter: str,
    state: str,
    manifest: "Manifest",
    own_template: str | None,
    model: str,
    config: str,
    card: str,
    record: provenance.Record,
) -> None:
    """state.safetensors -> model.safetensors (bf16), config.json, README.md.

    `own_template` is the file that replaced the target's chat template, if one did. Raises DraftlineError for weights
    that are not finite.
    """
    trained = State.load(state, moments=False)
    provenance.write_json(config, trained.config.to_json(), record)
    with provenance.replacing(card) as temporary:
        temporary.write_text(model_card(drafter, trained, manifest, own_template, record), encoding="utf-8")
    # transformers' loaders want to read that the tensors are torch's.
    facts = {"format": "pt", "states": trained.facts["states"]}
    provenance.write_safetensors(model, served_weights(trained, state), record, facts)


def keep_checkpoint(state: str, weights: str, record: provenance.Record) -> None:
    """state.safetensors -> weights.safetensors: the same tensors as an export at this point, with the config inside."""
    trained = State.load(state, moments=False)
    facts = {"config": trained.config.to_json(), "states": trained.facts["states"]}
    provenance.write_safetensors(weights, served_weights(trained, state), record, facts)


def served_weights(state: State, path: str) -> dict[str, Tensor]:
    """The drafter's tensors in bf16. Raises DraftlineError naming the state's `path` and a tensor with NaN or Inf."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in state.weights().items()}
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise DraftlineError(
                f"{path}: {name}: holds NaN or Inf; the training diverged: lower its lr and train again"
            )
    return weights


CARD = Template("""\
---
base_model: $base_model
tags: [dflash, speculative-decoding]
---
# $drafter: a DFlash drafter for $target

Drafts blocks of $block_size tokens for speculative decoding with $target, which verifies them: its output does not change.

| | |
|---|---|
| target | $target, revision $revision, weights $weights |
| tapped layers | $layers of $num_layers (output of the 0-based decoder layer) |
| block size | $block_size: the last sampled token and $drafted drafted ones |
| mask token id | $mask_token_id ($mask_token_rule) |
| draft layers | $layer_types$window |
| chat template | $template |
| trained on | $samples samples, $tokens tokens, $supervised of them supervised, for $epochs epochs in $steps steps |
| sources | $sources |
| recipe | $recipe |

## Serving

The drafter has no embedding and no output head: it uses those of $target, of the revision above. It drafts best for the
chat template it was trained with.

SGLang:

    python -m sglang.launch_server --model-path $target --speculative-algorithm DFLASH \\
        --speculative-draft-model-path PATH_OF_THIS_FOLDER --speculative-num-draft-tokens $block_size$hybrid

vLLM (its count leaves out the token that is already there):

    vllm serve $target --attention-backend flash_attn \\
        --speculative-config '{"method": "dflash", "model": "PATH_OF_THIS_FOLDER", "num_speculative_tokens": $drafted}'

## Provenance

Made by Draftline. Record $id, settings $settings, from:

$inputs
""")


def model_card(
    drafter: str, state: State, manifest: "Manifest", own_template: str | None, record: provenance.Record
) -> str:
    """README.md: what the drafter is for, what it was trained on, how to serve it, and what made it."""
    config, facts = state.config, state.facts
    data, recipe = facts["data"], facts["recipe"]
    sliding = SLIDING in config.layer_types
    return CARD.substitute(
        drafter=drafter,
        base_model=json.dumps(manifest.name),
        target=manifest.name,
        revision=manifest.revision or "not given",
        weights=manifest.weights_sha256[:16],
        layers=", ".join(map(str, config.target_layer_ids)),
        num_layers=config.num_target_layers,
        block_size=config.block_size,
        drafted=config.block_size - 1,
        mask_token_id=config.mask_token_id,
        mask_token_rule=manifest.mask_token_rule,
        layer_types=", ".join(config.layer_types),
        window=f", window {config.sliding_window}" if sliding else "",
        template=_template(manifest, own_template),
        samples=data["samples"],
        tokens=data["tokens"],
        supervised=data["supervised"],
        epochs=recipe["epochs"],
        steps=state.step,
        sources=", ".join(f"{name} {count}" for name, count in data["sources"].items()),
        recipe=", ".join(f"{name} {_plain(value)}" for name, value in recipe.items() if name != "epochs"),
        hybrid=" \\\n        --mamba-scheduler-strategy extra_buffer"
        if "linear_attention" in manifest.layer_types
        else "",
        id=record["id"],
        settings=record["settings"],
        inputs="\n".join(f"- {path}: {made_by}" for path, made_by in record["inputs"].items()),
    )


def _template(manifest: "Manifest", own_template: str | None) -> str:
    source = (
        "the target's own" if own_template is None else f"replaced by {Path(own_template).name}; serve with that file"
    )
    return f"{source}, SHA-256 {manifest.chat_template_sha256}"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
