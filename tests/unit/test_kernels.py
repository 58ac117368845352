"""Packages of kernels that are installed but fail on the device are left aside."""

import kernel_packages
from kernel_packages import CONVOLUTION_LOOKED_AT, LOOKED_AT, computing, install

LOAD = """
import json, sys
from pathlib import Path
import torch
from states_fixtures import save_target
from draftline.kernels import kernels
from draftline.loading import load_model
manifest = save_target("hybrid", Path(sys.argv[1]))
model = load_model(manifest)
first = model(torch.arange(20)[None], use_cache=True)
second = model(torch.tensor([[20]]), past_key_values=first.past_key_values)
logits = torch.cat([first.logits, second.logits], dim=1).flatten().double()
print(json.dumps([kernels(model, manifest.layer_types)["linear_attention"], logits.tolist()]))
"""


def test_kernels_that_fail_on_the_cpu_give_way_to_torchs(tmp_path):
    """Whole sequences and single tokens alike, to the last bit as without the packages."""
    packages = install(tmp_path / "packages", fla=LOOKED_AT, convolution=CONVOLUTION_LOOKED_AT)
    found, logits = kernel_packages.run(packages, LOAD, tmp_path / "with")
    plain, expected = kernel_packages.run(tmp_path / "none", LOAD, tmp_path / "without")
    assert found == plain
    assert set(found.values()) == {"torch"}
    assert logits == expected


def test_kernels_that_work_on_the_cpu_stay(tmp_path):
    found, _ = kernel_packages.run(install(tmp_path / "packages", fla=computing()), LOAD, tmp_path / "model")
    assert found["chunk_gated_delta_rule"] == "fla"
