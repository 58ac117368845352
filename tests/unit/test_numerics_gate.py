"""The gate on numerics lets an honest part pass and stops wrong layers, shifted tokens and large errors."""

import json

import numpy as np
import pytest
import torch
from small_models import build
from states_fixtures import RECORD, samples_of, save_target

from draftline import numerics_gate
from draftline.errors import DraftlineError
from draftline.extraction import extract
from draftline.hidden_states import make_states
from draftline.kernels import places
from draftline.numerics_gate import check_part, failures
from draftline.states import StatesReader
from draftline.states_writer import write_states

TAPPED = [0, 2]
CONFIG = {"samples": 4, "mean_cosine": 0.999, "min_cosine": 0.99}
RUN = {"device": "cpu", "batch": 100}


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def target(request, tmp_path_factory):
    return request.param, save_target(request.param, tmp_path_factory.mktemp(request.param))


def check(folder, manifest, config=CONFIG):
    check_part(folder / "gate.json", RECORD, folder / "part.safetensors", manifest, config, RUN)
    return json.loads((folder / "gate.json").read_text())


def write_changed(folder, name, manifest, change, storage="bf16", tapped=TAPPED):
    """A part whose features were computed at the layers `tapped` and went through `change`, but claims TAPPED."""
    samples = samples_of()
    facts = {
        "target": {"name": manifest.name, "weights_sha256": manifest.weights_sha256},
        "kernels": {}, "dtype": "float32", "versions": {},
    }  # fmt: skip
    with write_states(folder / "part.safetensors", RECORD, samples, TAPPED, 48, storage, facts) as writer:
        for n, features_TF in extract(build(name), tapped, [sample.input_ids for sample in samples]):
            writer.put(n, change(features_TF))


def noise(size):
    draw = torch.Generator().manual_seed(0)
    return lambda features: features + size * features.std() * torch.randn(features.shape, generator=draw)


@pytest.mark.parametrize("storage", ["bf16", "fp32", "fp8_e4m3"])
def test_an_honest_part_passes(tmp_path, target, storage):
    _, manifest = target
    make_states(tmp_path / "part.safetensors", RECORD, samples_of(), manifest, TAPPED, storage, RUN)
    gate = check(tmp_path, manifest)
    assert gate["passed"]
    assert set(gate["figures"]["layers"]) == {"0", "2"}
    for fit in gate["figures"]["layers"].values():
        assert fit["best_fit"] == {"layer_offset": 0, "token_shift": 0}
        assert fit["min_cosine"] > (0.999 if storage == "fp8_e4m3" else 0.9999)
    assert gate["figures"]["batch_invariance"] < 1e-5
    assert gate["figures"]["part"]["storage"] == storage
    assert ("kernels" in gate["figures"]) == any(place.package != "torch" for place in places(build(manifest.name[6:])))
    assert len(gate["figures"]["samples"]) == 4


def test_a_bf16_target_is_held_to_limits_that_bf16_can_meet(tmp_path):
    manifest = save_target("llama", tmp_path / "model", dtype="bfloat16")
    make_states(tmp_path / "part.safetensors", RECORD, samples_of(), manifest, TAPPED, "bf16", RUN)
    gate = check(tmp_path, manifest)
    assert gate["passed"]
    assert "relative_rms" not in gate["limits"]
    assert 1e-4 < gate["figures"]["layers"]["2"]["relative_rms"] < 0.05


def test_what_a_batch_may_change_follows_from_the_targets_own_error(tmp_path, monkeypatch):
    monkeypatch.setitem(numerics_gate.BATCH_INVARIANCE, "bfloat16", 0.0)
    manifest = save_target("llama", tmp_path / "model", dtype="bfloat16")
    make_states(tmp_path / "part.safetensors", RECORD, samples_of(), manifest, TAPPED, "bf16", RUN)
    gate = check(tmp_path, manifest)
    assert 1e-4 < gate["figures"]["alone_to_fp32"] < 0.05
    assert gate["limits"]["batch_invariance"] == pytest.approx(2 * gate["figures"]["alone_to_fp32"])


@pytest.mark.parametrize("step", [-1, 1])
def test_features_of_the_neighbouring_layer_are_stopped(tmp_path, target, step):
    name, manifest = target
    wrong = [1, 3] if step == 1 else [0, 1]
    write_changed(tmp_path, name, manifest, lambda features: features, tapped=wrong)
    with pytest.raises(
        DraftlineError, match=rf"layer {0 if step == 1 else 2}: fits best \{step:+d} layers and \+0 tokens"
    ):
        check(tmp_path, manifest)
    failed = json.loads((tmp_path / "gate.failed.json").read_text())
    assert not failed["passed"]
    assert not (tmp_path / "gate.json").exists()


@pytest.mark.parametrize("shift", [-1, 1])
def test_features_of_the_neighbouring_token_are_stopped(tmp_path, target, shift):
    name, manifest = target
    write_changed(tmp_path, name, manifest, lambda features: features.roll(-shift, dims=0))
    with pytest.raises(
        DraftlineError, match=rf"layer 0: fits best \+0 layers and \{shift:+d} tokens away; mean cosine"
    ):
        check(tmp_path, manifest)


def test_a_large_error_is_stopped_with_figures_and_remedy(tmp_path, target):
    name, manifest = target
    write_changed(tmp_path, name, manifest, noise(0.3))
    with pytest.raises(DraftlineError, match=r"layer 0: too far.*mean cosine 0\.9\d+ \(limit 0\.999\).*target\.dtype"):
        check(tmp_path, manifest)


@pytest.mark.parametrize("storage", ["bf16", "fp32"])
def test_an_error_beyond_rounding_is_stopped_although_the_cosine_allows_it(tmp_path, target, storage):
    name, manifest = target
    write_changed(tmp_path, name, manifest, noise(0.01), storage)
    with pytest.raises(DraftlineError, match=r"layer 0: too far.*mean cosine 0\.9998\d \(limit 0\.999\)"):
        check(tmp_path, manifest)


def test_an_error_beyond_fp8_is_stopped_although_the_cosine_allows_it(tmp_path, target):
    name, manifest = target
    write_changed(tmp_path, name, manifest, noise(0.022), "fp8_e4m3")
    with pytest.raises(DraftlineError, match=r"layer 0: too far.*mean cosine 0\.999\d+ \(limit 0\.999\)"):
        check(tmp_path, manifest)


def test_figures_are_those_of_a_float64_computation(tmp_path, target):
    name, manifest = target
    write_changed(tmp_path, name, manifest, noise(0.001))
    part, model = StatesReader(tmp_path / "part.safetensors"), build(name)
    stored, reference = [], []
    for n in range(len(part)):
        with torch.no_grad():
            states = model(part.input_ids(n)[None], output_hidden_states=True).hidden_states
        reference.append(states[3][0].double().numpy())
        stored.append(part.features(n)[:, 48:].double().numpy())
    x, y = np.concatenate(stored), np.concatenate(reference)
    cosine = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    fit = check(tmp_path, manifest, {**CONFIG, "samples": len(part)})["figures"]["layers"]["2"]
    relative = np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)
    assert fit["relative_rms"] == pytest.approx(np.sqrt((relative**2).mean()), rel=1e-3)
    assert 1 - fit["mean_cosine"] == pytest.approx(1 - cosine.mean(), rel=1e-2)
    assert 1 - fit["min_cosine"] == pytest.approx(1 - cosine.min(), rel=1e-2)


@pytest.mark.parametrize("figure", ["mean_cosine", "min_cosine", "relative_rms", "batch_invariance"])
def test_a_figure_that_is_no_number_does_not_pass(figure):
    fit = {
        "mean_cosine": 1.0,
        "min_cosine": 1.0,
        "relative_rms": 0.0,
        "best_fit": {"layer_offset": 0, "token_shift": 0},
    }
    part = {"dtype": "float32", "storage": "bf16", "kernels": {}}
    limits = {"mean_cosine": 0.999, "min_cosine": 0.99, "relative_rms": 1e-2, "batch_invariance": 1e-4}
    right = {"layers": {"0": fit}, "part": part, "batch_invariance": 0.0}
    assert failures("part", right, limits) == []
    wrong = (
        {**right, figure: float("nan")}
        if figure in right
        else {**right, "layers": {"0": {**fit, figure: float("nan")}}}
    )
    assert len(failures("part", wrong, limits)) == 1


def test_a_part_of_another_target_is_refused(tmp_path, target):
    name, manifest = target
    write_changed(tmp_path, name, save_target(name, tmp_path / "other", seed=1), lambda features: features)
    with pytest.raises(DraftlineError, match="hidden states of another target"):
        check(tmp_path, manifest)
