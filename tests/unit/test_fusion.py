"""Compiled norms and gated MLPs: the numbers of the eager ones, named in the header, and only where they work."""

import shutil

import pytest
import torch
from small_models import build
from states_fixtures import samples_of

from draftline import fusion
from draftline.extraction import extract
from draftline.kernels import kernels, torch_kernels

KINDS = ["Qwen3_5MLP", "Qwen3_5RMSNorm", "Qwen3_5RMSNormGated"]
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, with which torch compiles for the CPU")


def features(model):
    sequences = [sample.input_ids for sample in samples_of()]
    return torch.cat([features_TF for _, features_TF in sorted(extract(model, [0, 2], sequences))]).double()


@needs_compiler
def test_compiled_kinds_keep_the_numbers_and_are_named_while_they_run():
    model = build("hybrid").bfloat16().requires_grad_(False)
    exact_TF, eager_TF = features(build("hybrid").bfloat16().float()), features(model)
    fusion.fuse(model)
    assert kernels(model, model.config.layer_types)["compiled"] == KINDS
    own, found = (float((ours_TF - exact_TF).norm()) for ours_TF in (eager_TF, features(model)))
    assert found <= 1.2 * own
    with torch_kernels(model):
        assert "compiled" not in kernels(model, model.config.layer_types)
        assert torch.equal(features(model), eager_TF)
    assert fusion.fused(model) == KINDS


def test_what_does_not_compile_stays_eager(monkeypatch):
    said = []
    monkeypatch.setattr(fusion, "say", said.append)
    model = build("llama").bfloat16().requires_grad_(False)
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        fusion.fuse(model)
    assert fusion.fused(model) == []
    assert sorted(line.partition(": torch's eager steps, because compiled it fails")[0] for line in said) == [
        "LlamaMLP",
        "LlamaRMSNorm",
    ]
