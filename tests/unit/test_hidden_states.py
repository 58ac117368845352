"""Parts of hidden states from token rows and from an evaluation set's completions."""

import pyarrow
import pytest
import torch
from states_fixtures import RECORD, samples_of, save_target

from draftline import provenance
from draftline.errors import DraftlineError
from draftline.hidden_states import bench_rows, make_states, part_of_tokens
from draftline.loading import load_model
from draftline.states import CONVENTION, StatesReader

RUN = {"device": "cpu", "batch": 100}
INT32S = pyarrow.list_(pyarrow.int32())


@pytest.fixture
def shard(tmp_path):
    """A shard of seven rows, not in order; row n holds n + 4 tokens, all of them n."""
    rows = [
        {"id": f"{(n * 37) % 97:032x}", "input_ids": [n] * (n + 4), "spans": [1, 2, n + 2, n + 4]} for n in range(7)
    ]
    schema = pyarrow.schema([("id", pyarrow.string()), ("input_ids", INT32S), ("spans", INT32S)])
    provenance.write_parquet(tmp_path / "0000.parquet", pyarrow.Table.from_pylist(rows, schema), RECORD)
    return tmp_path / "0000.parquet", {row["id"]: row for row in rows}


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_parts_hold_every_row_once_in_order_of_id(shard, parts):
    path, rows = shard
    found = [part_of_tokens(path, part, parts) for part in range(parts)]
    assert [len(samples) for samples in found] == [7 * (p + 1) // parts - 7 * p // parts for p in range(parts)]
    samples = [sample for part in found for sample in part]
    assert [sample.id for sample in samples] == sorted(rows)
    for sample in samples:
        row, n = rows[sample.id], rows[sample.id]["input_ids"][0]
        assert sample.input_ids.tolist() == row["input_ids"]
        assert sample.loss_mask.nonzero().flatten().tolist() == [1, n + 2, n + 3]


def test_bench_rows_are_prompt_and_completion_with_the_completion_supervised(tmp_path):
    rows = [
        {"id": "b" * 32, "prompt_ids": [1, 2], "completion_ids": [3]},
        {"id": "a" * 32, "prompt_ids": [4], "completion_ids": []},
    ]
    schema = pyarrow.schema([("id", pyarrow.string()), ("prompt_ids", INT32S), ("completion_ids", INT32S)])
    provenance.write_parquet(tmp_path / "c.parquet", pyarrow.Table.from_pylist(rows, schema), RECORD)
    first, second = bench_rows(tmp_path / "c.parquet")
    assert (first.id, first.input_ids.tolist(), first.loss_mask.tolist()) == ("a" * 32, [4], [False])
    assert (second.input_ids.tolist(), second.loss_mask.tolist()) == ([1, 2, 3], [False, False, True])


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_header_names_target_layers_kernels_dtype_and_versions(tmp_path, name):
    manifest = save_target(name, tmp_path / "model")
    make_states(tmp_path / "part.safetensors", RECORD, samples_of(), manifest, [0, 2], "bf16", RUN)
    facts = StatesReader(tmp_path / "part.safetensors", manifest).facts
    assert facts["layers"] == [0, 2]
    assert facts["convention"] == CONVENTION
    assert facts["target"] == {"name": manifest.name, "weights_sha256": manifest.weights_sha256}
    assert facts["kernels"].keys() == set(manifest.layer_types[:3])
    assert (facts["dtype"], facts["storage"]) == ("float32", "bf16")
    assert facts["versions"]["torch"] == torch.__version__
    assert len(facts["statistics"]) == 2


def test_a_count_of_layers_is_spread_over_the_target(tmp_path):
    manifest = save_target("llama", tmp_path / "model")
    make_states(tmp_path / "part.safetensors", RECORD, samples_of(), manifest, 1, "bf16", RUN)
    assert StatesReader(tmp_path / "part.safetensors").layers == [2]


def test_layers_that_the_target_does_not_have_are_refused_by_key(tmp_path):
    manifest = save_target("llama", tmp_path / "model")
    with pytest.raises(DraftlineError, match=r"hidden_states.layers: \[1, 3\].*0\.\.2"):
        make_states(tmp_path / "part.safetensors", RECORD, samples_of(), manifest, [1, 3], "bf16", RUN)


def test_states_of_the_tiny_hybrid_target_equal_a_plain_forward(tmp_path, tiny_target):
    manifest, samples = tiny_target.manifest, samples_of((90, 70, 12), vocabulary=4000)
    make_states(tmp_path / "part.safetensors", RECORD, samples, manifest, 3, "fp32", {"device": "cpu"})
    part, model = StatesReader(tmp_path / "part.safetensors", manifest, layers=[1, 3, 5]), load_model(manifest)
    assert part.facts["kernels"].keys() == {"linear_attention", "full_attention"}
    for n in range(len(part)):
        with torch.no_grad():
            states = model(part.input_ids(n)[None], output_hidden_states=True).hidden_states
        reference_TF = torch.cat([states[i + 1][0] for i in part.layers], dim=-1)
        torch.testing.assert_close(
            part.features(n), reference_TF, atol=1e-5 * float(reference_TF.abs().max()), rtol=1e-5
        )
