"""The gate on numerics: samples of a part against a separate forward (specs/dflash.md 6.3).

The reference runs in fp32, one sample at a time, without hooks: transformers' own `output_hidden_states`. Beside the
distance it is asked where the stored features fit best, among neighbouring layers and tokens: rounding moves a state a
little, a wrong layer or a shifted token moves the best fit. Where a package's kernels are there (fla on a GPU), they are compared
with transformers' torch versions and with fp32, which the torch versions compute.

Shapes: T tokens, K tapped layers, H hidden size, F = K * H.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftline import provenance
from draftline.agreement import Distance, distance
from draftline.errors import DraftlineError
from draftline.extraction import extract, prepare
from draftline.fusion import fused
from draftline.gates import close_gate
from draftline.kernels import kernels, places, torch_kernels, versions
from draftline.loading import backbone, load_model
from draftline.manifest import Manifest
from draftline.progress import say
from draftline.states import StatesReader
from draftline.storage import FP8

OFFSETS = list(itertools.product((-1, 0, 1), (-1, 0, 1)))
"""(layer offset, token shift) pairs that are compared."""

ROUNDING = {"bf16": 2.0**-8, "fp32": 1e-4, FP8: 2.0**-3 / math.sqrt(12)}
"""Largest relative RMS error of an fp32 target by storage: one bf16 step, other orders of summation, and the RMS of errors spread
evenly over fp8's widest step, 0.036 (real states have 0.02 to 0.03)."""

OWN_ERROR = 2.0
"""Largest relative RMS difference between two ways to compute the same states, in errors of one of them to fp32 (6.3.2)."""

BATCH_INVARIANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
"""What is let pass in any case between samples that share a forward and single ones, by dtype of the target (6.1, 6.3.4)."""

KERNEL_FLOOR = 5e-3
"""The same between kernels and the torch versions (6.3.1): where the target is fp32 the torch versions have no error."""


class LayerFit:
    """How one layer's stored features fit the reference, over all samples."""

    def __init__(self) -> None:
        self.fits = {offset: Distance() for offset in OFFSETS}

    def add(self, stored_TH: torch.Tensor, states: Sequence[torch.Tensor], layer: int) -> None:
        """Take in a sample: features of `layer`, and all of the reference's hidden states [T, H], embeddings first."""
        for (offset, shift), fit in self.fits.items():
            first, last = max(0, -shift), len(stored_TH) - max(0, shift)
            fit.add(stored_TH[first:last], states[layer + 1 + offset][first + shift : last + shift])

    def figures(self) -> dict[str, Any]:
        """`Distance.figures` at the layer itself; mean cosines and best fit among neighbours."""
        means = {offset: fit.figures()["mean_cosine"] for offset, fit in self.fits.items()}
        best = max(means, key=means.__getitem__)
        return {
            **self.fits[0, 0].figures(),
            "best_fit": {"layer_offset": best[0], "token_shift": best[1]},
            "neighbours": {f"layer {offset:+d}, token {shift:+d}": means[offset, shift] for offset, shift in OFFSETS},
        }


def check_part(
    path: str | Path,
    record: provenance.Record,
    states: str | Path,
    manifest: Manifest,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
) -> None:
    """Write the gate's JSON to `path` for the part `states`; `config` is hidden_states_gate's.

    Raises DraftlineError when the part is of another target, holds no samples, or does not pass.
    """
    reader = StatesReader(states, manifest)
    if not len(reader):
        raise DraftlineError(f"{states}: has no samples to check; lower hidden_states.parts_per_shard")
    chosen = sorted({n * len(reader) // config["samples"] for n in range(config["samples"])})
    model = load_model(manifest, run, torch.float32, last_layer=reader.layers[-1] + 1)
    fits = {layer: LayerFit() for layer in reader.layers}
    references = []
    with torch_kernels(model):
        for n in chosen:
            reference = reference_states(model, reader.input_ids(n))
            for layer, stored_TH in zip(fits, reader.features(n).chunk(len(fits), dim=1)):
                fits[layer].add(stored_TH, reference, layer)
            references.append(torch.cat([reference[layer + 1] for layer in fits], dim=1))
            say(f"sample {reader.ids[n]}: {reader.lengths[n]} tokens compared")
        reference_kernels = kernels(model, manifest.layer_types)
    if manifest.dtype != "float32":
        del model
        model = load_model(manifest, run, last_layer=reader.layers[-1])
    prepare(model)
    sequences = [reader.input_ids(n) for n in chosen]
    alone = each_alone(model, reader.layers, sequences)
    figures: dict[str, Any] = {
        "samples": [reader.ids[n] for n in chosen],
        "layers": {str(layer): fit.figures() for layer, fit in fits.items()},
        "batch_invariance": batch_invariance(model, reader.layers, sequences, alone),
        "alone_to_fp32": distance(alone, references).figures()["relative_rms"],
        "part": {name: reader.facts[name] for name in ("dtype", "storage", "kernels", "versions")},
        "reference": {"dtype": "float32", "kernels": reference_kernels, "versions": versions()},
    }
    if any(place.package != "torch" for place in places(model)) or fused(model):
        figures["kernels"] = compare_kernels(model, reader.layers, sequences, alone, references)
    limits = {name: config[name] for name in ("mean_cosine", "min_cosine")}
    limits["batch_invariance"] = max(BATCH_INVARIANCE[manifest.dtype], OWN_ERROR * figures["alone_to_fp32"])
    if reader.facts["dtype"] == "float32":
        limits["relative_rms"] = ROUNDING[reader.facts["storage"]]
    close_gate(path, record, figures=figures, limits=limits, failures=failures(str(states), figures, limits))


def reference_states(model: nn.Module, input_ids_T: torch.Tensor) -> list[torch.Tensor]:
    """Hidden states [T, H] of one sample on the CPU: the embeddings, then each layer's output (the last one normed)."""
    device = next(model.parameters()).device
    with torch.no_grad():
        output = backbone(model)(input_ids=input_ids_T[None].to(device), output_hidden_states=True, use_cache=False)
    return [state_BTH[0].cpu() for state_BTH in output.hidden_states]


def each_alone(model: nn.Module, layers: Sequence[int], sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Features [T, F] of each sequence by itself, on the CPU."""
    return [features_TF.cpu() for _, features_TF in sorted(extract(model, layers, sequences, batch_tokens=1))]


def batch_invariance(
    model: nn.Module, layers: Sequence[int], sequences: list[torch.Tensor], alone: list[torch.Tensor]
) -> float:
    """Relative RMS difference between features of all `sequences` in one forward and of each alone."""
    together = extract(model, layers, sequences, batch_tokens=max(map(len, sequences)) * len(sequences))
    return distance([features_TF.cpu() for _, features_TF in sorted(together)], alone).figures()["relative_rms"]


def compare_kernels(
    model: nn.Module,
    layers: Sequence[int],
    sequences: list[torch.Tensor],
    alone: list[torch.Tensor],
    references: list[torch.Tensor],
) -> dict[str, Any]:
    """By layer, how far the model's kernels, transformers' torch versions and fp32 are from each other (`Distance`).

    `alone` [T, F] are the features of each sequence by the model's kernels, `references` those in fp32 by the torch versions.
    """
    with torch_kernels(model):
        plain = each_alone(model, layers, sequences)
    pairs = {
        "found_to_torch": (alone, plain),
        "found_to_fp32": (alone, references),
        "torch_to_fp32": (plain, references),
    }
    figures: dict[str, Any] = {str(layer): {} for layer in layers}
    for name, pair in pairs.items():
        by_layer = (zip(*(features_TF.chunk(len(layers), dim=1) for features_TF in side)) for side in pair)
        for layer, ours, theirs in zip(layers, *by_layer):
            figures[str(layer)][name] = distance(ours, theirs).figures()
    return figures


def failures(states: str, figures: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    """What the figures break, in words: wiring first, then distance, then the batch."""
    wiring, apart = [], []
    part = figures["part"]
    made = f"dtype {part['dtype']}, storage {part['storage']}, kernels {part['kernels']}"
    for layer, fit in figures["layers"].items():
        measured = (
            f"mean cosine {fit['mean_cosine']:.5f} (limit {limits['mean_cosine']}), least {fit['min_cosine']:.5f}"
            f" (limit {limits['min_cosine']}), relative RMS {fit['relative_rms']:.2e}"
        )
        offset, shift = fit["best_fit"].values()
        if offset or shift:
            wiring.append(
                f"{states}: layer {layer}: fits best {offset:+d} layers and {shift:+d} tokens away; {measured};"
                " the features are of the wrong layer or token: make them again with this code and target"
            )
        elif (
            not fit["mean_cosine"] >= limits["mean_cosine"]  # So that no NaN passes.
            or not fit["min_cosine"] >= limits["min_cosine"]
            or not fit["relative_rms"] <= limits.get("relative_rms", math.inf)
        ):
            apart.append(
                f"{states}: layer {layer}: too far from an fp32 forward: {measured}; made with {made}: check these,"
                " or raise target.dtype or hidden_states.storage"
            )
    for layer, between in figures.get("kernels", {}).items():
        found, own = between["found_to_torch"], between["torch_to_fp32"]["relative_rms"]
        allowed = max(OWN_ERROR * own, KERNEL_FLOOR)
        if (
            not found["mean_cosine"] >= limits["mean_cosine"]
            or not found["min_cosine"] >= limits["min_cosine"]
            or not found["relative_rms"] <= allowed
        ):
            apart.append(
                f"{states}: layer {layer}: the kernels found here are too far from transformers' torch versions: mean cosine"
                f" {found['mean_cosine']:.5f} (limit {limits['mean_cosine']}), least {found['min_cosine']:.5f} (limit"
                f" {limits['min_cosine']}), relative RMS {found['relative_rms']:.2e} (limit {allowed:.2e}, {OWN_ERROR:g}"
                f" times the torch versions' own to fp32); made with {made}: repair, remove or update that package"
            )
    if not figures["batch_invariance"] <= limits["batch_invariance"]:
        apart.append(
            f"{states}: samples that share a forward differ from single ones by {figures['batch_invariance']:.2e} (relative"
            f" RMS, limit {limits['batch_invariance']:.2e}); set run.hidden_states.batch to 1 or repair the kernels ({made})"
        )
    return wiring + apart
