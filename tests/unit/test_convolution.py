"""fla's convolution is used where it is the better one that is there, and agrees; the gate compares kernels that are not torch's."""

import kernel_packages
import pytest
from kernel_packages import CONVOLUTION_LOOKED_AT, computing, fla_convolution, install

CHOOSE = """
import json, torch
from small_models import build
from draftline.convolution import prefer_fla_convolution
from draftline.extraction import extract
from draftline.kernels import kernels, torch_kernels
model = build("hybrid")
with torch_kernels(model):
    (_, before), = extract(model, [0, 2], [torch.arange(20)])
prefer_fla_convolution(model)
(_, after), = extract(model, [0, 2], [torch.arange(20)])
difference = float((after - before).norm() / before.norm())
print(json.dumps([kernels(model, model.config.layer_types)["linear_attention"]["causal_conv1d_fn"], difference]))
"""


@pytest.mark.parametrize(
    ("packages", "chosen"),
    [
        ({"fla_conv": fla_convolution()}, "fla"),
        ({"fla_conv": fla_convolution(1.001)}, "torch"),
        ({"fla_conv": "def causal_conv1d(*arguments, **options): raise RuntimeError('no GPU')"}, "torch"),
        ({"fla_conv": fla_convolution(), "convolution": CONVOLUTION_LOOKED_AT}, "causal_conv1d"),
    ],
)
def test_flas_convolution_is_taken_if_it_agrees_and_nothing_better_is_there(tmp_path, packages, chosen):
    program = CHOOSE
    if chosen == "causal_conv1d":  # which only raises here
        program = CHOOSE.replace("(_, after), = extract(model, [0, 2], [torch.arange(20)])", "after = before")
    found, difference = kernel_packages.run(install(tmp_path, **packages), program)
    assert found == chosen
    assert difference < 1e-5
    assert (difference > 0) == (chosen == "fla")


GATE = """
import json, sys
from pathlib import Path
from states_fixtures import RECORD, samples_of, save_target
from draftline.errors import DraftlineError
from draftline.hidden_states import make_states
from draftline.numerics_gate import check_part
folder, run = Path(sys.argv[1]), {"device": "cpu", "batch": 100}
manifest = save_target("hybrid", folder / "model")
make_states(folder / "part.safetensors", RECORD, samples_of(), manifest, [0, 2], "bf16", run)
config = {"samples": 3, "mean_cosine": 0.999, "min_cosine": 0.99}
try:
    check_part(folder / "gate.json", RECORD, folder / "part.safetensors", manifest, config, run)
    name = "gate.json"
except DraftlineError:
    name = "gate.failed.json"
gate = json.loads((folder / name).read_text())
print(json.dumps([gate["figures"], gate.get("failures", [])]))
"""


def test_the_gate_compares_a_packages_kernels_with_torchs_and_with_fp32(tmp_path):
    figures, failures = kernel_packages.run(install(tmp_path, computing(noise=3e-5)), GATE, tmp_path)
    assert failures == []
    assert figures["part"]["kernels"]["linear_attention"]["chunk_gated_delta_rule"] == "fla"
    assert figures["reference"]["kernels"]["linear_attention"]["chunk_gated_delta_rule"] == "torch"
    assert list(figures["kernels"]) == ["0", "2"]
    for between in figures["kernels"].values():
        assert 1e-6 < between["found_to_torch"]["relative_rms"] < 2e-3
        assert between["found_to_torch"]["relative_rms"] == pytest.approx(
            between["found_to_fp32"]["relative_rms"], rel=0.1
        )
        assert between["torch_to_fp32"]["relative_rms"] < 5e-5
        assert all(pair["mean_cosine"] > pair["min_cosine"] > 0.9999 for pair in between.values())


def test_kernels_that_are_off_are_stopped_with_figures(tmp_path):
    figures, failures = kernel_packages.run(install(tmp_path, computing(noise=0.1)), GATE, tmp_path)
    (at_2,) = [failure for failure in failures if "layer 2: the kernels found here are too far from" in failure]
    assert f"relative RMS {figures['kernels']['2']['found_to_torch']['relative_rms']:.2e} (limit 5.00e-03" in at_2
    assert "'chunk_gated_delta_rule': 'fla'" in at_2
