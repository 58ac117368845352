"""fp8 features: their error against float64, what outliers and tiny states do to it, and what an evaluation set is stored in."""

from pathlib import Path

import pytest
import torch
import yaml
from snakemake.utils import validate

from draftline import plan
from draftline.storage import FP8, decode, encode, layer_bytes, tensor_dtypes

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HIDDEN, TOKENS = 3, 512, 64


def states(kind):
    """Features [T, F] float32 of a kind of states that targets have, or could have."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(TOKENS, LAYERS * HIDDEN, generator=draw)
    if kind == "outlier":
        features.view(TOKENS, LAYERS, HIDDEN)[:, 1:, 7] *= 1000
    if kind == "heavy_tails":
        features = features.sign() * features.abs().pow(4)
    if kind == "log_uniform":
        features = features.sign() * torch.exp2(torch.rand(features.shape, generator=draw) * 12)
    return features


def reference(features, scales):
    """float64: each state over its scale, rounded to the nearest of the 127 numbers of e4m3, ties to even."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    scaled = features.double().view(len(features), LAYERS, -1) / scales.double()[..., None]
    above = torch.searchsorted(grid, scaled.abs().contiguous()).clamp(1, 126)
    low, high = scaled.abs() - grid[above - 1], grid[above] - scaled.abs()
    nearest = torch.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (grid[nearest] * scaled.sign() * scales.double()[..., None]).view_as(features)


def relative_rms(found, expected):
    """Per token and layer [T, K]."""
    shape = (len(found), LAYERS, -1)
    error = (found.double() - expected.double()).view(shape).square().mean(-1)
    return (error / expected.double().view(shape).square().mean(-1)).sqrt()


@pytest.mark.parametrize("kind", ["normal", "outlier", "heavy_tails", "log_uniform"])
def test_fp8_rounds_as_a_float64_reference_does_and_is_off_by_two_to_three_percent(kind):
    features = states(kind)
    stored = encode(features, FP8, LAYERS)
    exact = (stored["features"].double().view(TOKENS, LAYERS, -1) * stored["scales"].double()[..., None]).view_as(
        features
    )
    # A state in the middle between two numbers may fall to either: the quotient is computed in float32.
    torch.testing.assert_close(reference(features, stored["scales"]), exact, rtol=2**-3, atol=0)
    assert (reference(features, stored["scales"]) != exact).float().mean() < 1e-3
    found = decode(stored)
    assert found.dtype == torch.bfloat16
    assert relative_rms(found, features).mean() < 0.028
    assert relative_rms(found, features).max() < 2**-4
    assert torch.cosine_similarity(found.double(), features.double()).min() > 0.999


@pytest.mark.parametrize("kind", ["normal", "outlier", "heavy_tails"])
def test_each_state_is_within_a_sixteenth_of_itself_or_a_step_of_its_token(kind):
    features = states(kind)
    largest = (
        features.view(TOKENS, LAYERS, -1).abs().amax(-1, keepdim=True).expand(-1, -1, HIDDEN).reshape(features.shape)
    )
    bound = torch.maximum(features.abs() / 16, largest / 458_752).double() * (1 + 2**-20)  # quotients are of float32,
    bound += (features.double().abs() + bound) * 2**-8  # and what is read is bf16
    assert ((decode(encode(features, FP8, LAYERS)).double() - features.double()).abs() <= bound).all()


def test_states_beside_an_outlier_a_thousand_times_larger_keep_their_digits():
    features = states("outlier")
    rest = torch.arange(LAYERS * HIDDEN) % HIDDEN != 7
    found = decode(encode(features, FP8, LAYERS))
    shape = (TOKENS, LAYERS, -1)
    error = (found - features)[:, rest].double().view(shape).square().mean(-1)
    assert (error / features[:, rest].double().view(shape).square().mean(-1)).sqrt().max() < 0.03
    assert torch.equal(found[:, ~rest][:, 1:], features[:, ~rest][:, 1:].bfloat16())


def test_zero_tokens_stay_zero_and_tiny_ones_finite():
    features = states("normal")
    features[3] = 0
    features[5] *= 1e-36
    features[7] = 1e-44  # subnormal in float32
    found = decode(encode(features, FP8, LAYERS))
    assert (found[3] == 0).all()
    assert found.isfinite().all()
    assert relative_rms(found[5:6], features[5:6]).max() < 0.04


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_that_is_no_number_is_not_hidden_by_the_conversion(value):
    features = states("normal")
    features[2, HIDDEN + 3] = value
    found = decode(encode(features, FP8, LAYERS)).view(TOKENS, LAYERS, -1)
    assert found[2, 1].isnan().any()
    assert found[2, ::2].isfinite().all()


def test_the_largest_number_of_bf16_does_not_overflow():
    features = states("normal").bfloat16()
    features[0, 0] = torch.finfo(torch.bfloat16).max
    assert decode(encode(features, FP8, LAYERS))[0, 0] == torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("storage", ["bf16", "fp32", FP8])
def test_a_layer_of_a_token_takes_the_bytes_that_are_announced(storage):
    stored = encode(states("normal"), storage, LAYERS)
    assert {name: tensor.dtype for name, tensor in stored.items()} == tensor_dtypes(storage)
    assert sum(tensor.nbytes for tensor in stored.values()) == TOKENS * LAYERS * layer_bytes(storage, HIDDEN)


@pytest.mark.parametrize(("storage", "of_bench"), [("bf16", "bf16"), ("fp32", "fp32"), (FP8, "bf16")])
def test_an_evaluation_set_is_stored_as_serving_has_its_states(tmp_path, monkeypatch, storage, of_bench):
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["hidden_states"]["storage"] = storage
    validate(config, str(ROOT / "schemas/config.schema.yaml"))
    monkeypatch.chdir(tmp_path)
    found = plan.Plan(config, ROOT, [], main=True)
    assert found.values("bench_hidden_states", "fresh")["config"]["hidden_states"]["storage"] == of_bench
    assert found.values("hidden_states", None)["config"]["hidden_states"]["storage"] == storage
