"""Config, names and files of the released layout; what the export gate lets through and what it stops."""

import dataclasses
import json
import shutil
from pathlib import Path

import drafter_world as world
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline import provenance
from draftline.drafter.config import DrafterConfig
from draftline.drafter.export import export, keep_checkpoint
from draftline.drafter.export_gate import check_export
from draftline.drafter.model import Drafter
from draftline.drafter.state import State
from draftline.drafter.weights import load_drafter, tensor_shapes
from draftline.errors import DraftlineError

FULL, SLIDING = "full_attention", "sliding_attention"
MODEL = Path("results/drafters/demo/model")
GATE = Path("results/gates/demo/export.json")
QWEN35_27B = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "num_target_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "max_position_embeddings": 262144,
}


# Config ---------------------------------------------------------------------------------------------------------------


def config_of(manifest=None, **changes):
    return DrafterConfig.from_settings({**world.SETTINGS, **changes}, manifest or world.manifest(), world.LAYERS)


def test_sizes_left_null_are_the_targets():
    config = config_of()
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (8, 4, 2)
    assert (config.intermediate_size, config.rope_theta, config.max_position_embeddings) == (24, 10000.0, 256)
    other = config_of(head_dim=4, heads=6, kv_heads=3, intermediate_size=7, rope_theta=5, max_position_embeddings=9)
    assert (other.head_dim, other.num_attention_heads, other.num_key_value_heads) == (4, 6, 3)
    assert (other.intermediate_size, other.rope_theta, other.max_position_embeddings) == (7, 5.0, 9)


def test_a_window_without_layer_types_makes_all_layers_but_the_last_slide():
    assert config_of().layer_types == (FULL, FULL)
    sliding = config_of(sliding_window=16, layers=3)
    assert sliding.layer_types == (SLIDING, SLIDING, FULL)
    assert [sliding.window(n) for n in range(3)] == [16, 16, None]
    assert [sliding.causal(n) for n in range(3)] == [True, True, False]


def test_config_comes_back_from_its_file():
    for config in (config_of(), config_of(sliding_window=16), config_of().replace(is_causal=False)):
        assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_released_configs_are_read_with_block_size_and_theta_in_either_place():
    old = DrafterConfig.from_json(QWEN35_27B)
    new = {key: value for key, value in QWEN35_27B.items() if key not in ("block_size", "rope_theta")}
    new["dflash_config"] = {**QWEN35_27B["dflash_config"], "block_size": 16}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000000}
    assert DrafterConfig.from_json(new) == old
    assert (old.block_size, old.rope_theta, old.layer_types) == (16, 1e7, (FULL,) * 5)


def test_config_block_size_in_dflash_config_wins():
    both = {**QWEN35_27B, "dflash_config": {**QWEN35_27B["dflash_config"], "block_size": 8}}
    assert DrafterConfig.from_json(both).block_size == 8


def test_a_files_own_word_on_causality_wins():
    nested = {**QWEN35_27B["dflash_config"], "causal": True}
    assert DrafterConfig.from_json({**QWEN35_27B, "dflash_config": nested}).causal(0) is True
    assert DrafterConfig.from_json({**QWEN35_27B, "dflash_config": nested, "is_causal": False}).causal(0) is False
    assert DrafterConfig.from_json(QWEN35_27B).causal(0) is False


def test_sizes_of_a_released_drafter():
    shapes = tensor_shapes(DrafterConfig.from_json(QWEN35_27B))
    assert len(shapes) == 58
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert elements == pytest.approx(1.73e9, rel=0.01)
    assert shapes["fc.weight"] == [5120, 5 * 5120]


def test_tensor_names_and_shapes_are_the_models():
    config = config_of()
    assert {name: list(tensor.shape) for name, tensor in Drafter(config).state_dict().items()} == tensor_shapes(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size: 1"),
        ({"target_layer_ids": (1, 5)}, r"target_layer_ids: \[1, 5\]: must be ascending and within 0\.\.4"),
        ({"target_layer_ids": (3, 1)}, "target_layer_ids"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"mask_token_id": 64}, "mask_token_id: 64: not below vocab_size 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3: must divide"),
        ({"head_dim": 7}, "head_dim: 7: must be even"),
        ({"layer_types": (FULL,)}, "layer_types"),
        ({"layer_types": (SLIDING, FULL)}, "sliding_window: None"),
    ],
)
def test_impossible_shapes_are_refused_by_key(changes, message):
    with pytest.raises(DraftlineError, match=message):
        config_of().replace(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DSparkDraftModel"]}, r"architectures: \['DSparkDraftModel'\]"),
        ({"architectures": None}, "architectures: None"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling: yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": None}, "hidden_size: missing"),
    ],
)
def test_other_layouts_are_refused_by_their_config(changes, message):
    with pytest.raises(DraftlineError, match=message):
        DrafterConfig.from_json({**QWEN35_27B, **changes})


# Model folder ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["full", "sliding"])
def trained(request, tmp_path_factory):
    """A folder with a trained state and its export."""
    folder = tmp_path_factory.mktemp(request.param)
    world.build(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        world.train(1, 1, sliding_window=9 if request.param == "sliding" else None)
        run_export()
    return folder


@pytest.fixture
def exported(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / "results", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    return tmp_path


STATE = f"{world.folder_of(1, 1)}/state.safetensors"


def run_export(own_template=None, manifest=None):
    export(
        drafter="demo",
        state=STATE,
        manifest=manifest or world.manifest(),
        own_template=own_template,
        model=str(MODEL / "model.safetensors"),
        config=str(MODEL / "config.json"),
        card=str(MODEL / "README.md"),
        record=world.record("export", "demo"),
    )


def gate():
    check_export(
        str(MODEL / "model.safetensors"),
        STATE,
        world.manifest(),
        world.HEADS,
        str(GATE),
        world.record("export_gate", "demo"),
    )


def test_export_passes_its_gate(exported):
    gate()
    result = json.loads(GATE.read_text())
    assert result["passed"] is True
    assert result["figures"]["tensors"] == 25
    assert result["figures"]["rounded_difference"] == 0
    assert 0 < result["figures"]["relative_difference"] < 0.1


def test_exported_drafter_computes_the_trained_weights_in_bf16(exported):
    served = load_drafter(MODEL / "model.safetensors")
    weights = State.load(STATE).weights()
    assert {name: tensor.dtype for name, tensor in load_file(MODEL / "model.safetensors").items()} == dict.fromkeys(
        weights, torch.bfloat16
    )
    for name, tensor in served.state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, weights[name], rtol=2**-8, atol=0)
    assert not any(parameter.requires_grad for parameter in served.parameters())


def test_transformers_reads_every_key_of_the_exported_config(exported):
    from transformers import Qwen3Config

    parsed = Qwen3Config.from_pretrained(MODEL)
    config = State.load(STATE).config
    assert parsed.block_size == parsed.dflash_config["block_size"] == 4
    assert parsed.dflash_config["target_layer_ids"] == world.LAYERS
    assert parsed.dflash_config["mask_token_id"] == 63
    assert parsed.rope_parameters["rope_theta"] == 10000.0
    assert parsed.num_target_layers == 6
    assert parsed.layer_types == list(config.layer_types)
    assert parsed.sliding_window == config.sliding_window
    values = json.loads((MODEL / "config.json").read_text())
    assert values["rope_theta"] == 10000.0
    assert values["use_sliding_window"] is (SLIDING in config.layer_types)


def test_checkpoint_holds_its_config_and_the_exports_weights(exported):
    keep_checkpoint(STATE, "results/weights.safetensors", world.record("keep_checkpoint", "demo"))
    kept, served = load_drafter("results/weights.safetensors"), load_drafter(MODEL / "model.safetensors")
    assert kept.config == served.config
    assert all(torch.equal(tensor, served.state_dict()[name]) for name, tensor in kept.state_dict().items())


def test_neither_export_nor_a_checkpoint_reads_the_optimizer(exported):
    state = State.load(STATE)
    weights = {name: tensor for name, tensor in state.tensors.items() if name.startswith("model.")}
    assert len(weights) * 3 == len(state.tensors)
    dataclasses.replace(state, tensors=weights).save(STATE, provenance.read(STATE))
    served = load_file(MODEL / "model.safetensors")
    run_export()
    gate()
    keep_checkpoint(STATE, "results/weights.safetensors", world.record("keep_checkpoint", "demo"))
    for made in (load_file(MODEL / "model.safetensors"), load_file("results/weights.safetensors")):
        assert all(torch.equal(tensor, made[name]) for name, tensor in served.items())
    with pytest.raises(DraftlineError, match="no training state"):
        State.load(STATE)


def test_card_says_how_to_serve_and_what_it_was_trained_on(exported):
    card = (MODEL / "README.md").read_text()
    assert "--speculative-num-draft-tokens 4" in card
    assert '"num_speculative_tokens": 3' in card
    assert "20 samples" in card
    assert "the target's own, SHA-256 " + "b" * 64 in card
    assert "extra_buffer" not in card
    hybrid = world.manifest(
        layer_types=["linear_attention"] * 5 + ["full_attention"], name="org/hybrid", revision="f00"
    )
    run_export("templates/mine.jinja", hybrid)
    card = (MODEL / "README.md").read_text()
    assert "replaced by mine.jinja" in card
    assert "--mamba-scheduler-strategy extra_buffer" in card
    assert "org/hybrid, revision f00" in card


def test_the_same_export_gives_the_same_bytes(exported):
    before = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    run_export()
    assert {path.name: path.read_bytes() for path in MODEL.iterdir()} == before


def change_config(**changes):
    path = MODEL / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def nested(**changes):
    values = json.loads((MODEL / "config.json").read_text())["dflash_config"]
    return {"dflash_config": {**values, **changes}}


CONFIG_FAULTS = {
    "block_size at top level": (lambda: {"block_size": None}, "block_size: None"),
    "block_size in dflash_config": (lambda: nested(block_size=16), r"dflash_config\.block_size: 16"),
    "rope_theta at top level": (lambda: {"rope_theta": None}, "rope_theta: None"),
    "rope_theta in rope_parameters": (lambda: {"rope_parameters": None}, r"rope_parameters\.rope_theta: None"),
    "last layer tapped": (lambda: nested(target_layer_ids=[1, 5]), r"target_layer_ids: \[1, 5\]"),
    "mask id outside": (lambda: nested(mask_token_id=64), "mask_token_id: 64"),
    "another vocabulary": (lambda: {"vocab_size": 65}, "vocab_size: 65"),
    "another architecture": (lambda: {"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
    "another dtype": (lambda: {"dtype": "float32"}, "dtype: 'float32'"),
    "another depth of the target": (lambda: {"num_target_layers": 7}, "num_target_layers: 7"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_gate_stops_a_wrong_config(exported, fault):
    changes, message = CONFIG_FAULTS[fault]
    change_config(**changes())
    with pytest.raises(DraftlineError, match=rf"config\.json: .*{message}"):
        gate()
    assert not GATE.exists()
    assert json.loads(GATE.with_suffix(".failed.json").read_text())["passed"] is False


@pytest.mark.parametrize("trained", ["sliding"], indirect=True)
def test_gate_stops_a_window_that_parsers_would_drop(exported):
    change_config(use_sliding_window=False)
    with pytest.raises(DraftlineError, match="use_sliding_window: False"):
        gate()
    failures = json.loads(GATE.with_suffix(".failed.json").read_text())["failures"]
    assert any("Qwen3Config reads it: sliding_window: None" in failure for failure in failures)


def renamed(tensors):
    tensors["layers.0.mlp.gate.weight"] = tensors.pop("layers.0.mlp.gate_proj.weight")


def with_head(tensors):
    tensors["lm_head.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)


def other_shape(tensors):
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


def not_a_number(tensors):
    tensors["norm.weight"][3] = float("nan")


def other_value(tensors):
    tensors["layers.1.mlp.up_proj.weight"][0, 0] += 1


def fp32(tensors):
    tensors["norm.weight"] = tensors["norm.weight"].float()


def swapped(tensors):
    first, second = "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (renamed, r"layers\.0\.mlp\.gate_proj\.weight: missing"),
        (with_head, r"lm_head\.weight: no tensor of a DFlash drafter"),
        (other_shape, r"fc\.weight: shape \[16, 31\]"),
        (not_a_number, r"norm\.weight: holds NaN or Inf"),
        (other_value, "does not compute what the trained weights"),
        (fp32, r"norm\.weight: torch\.float32 where engines expect bfloat16"),
        (swapped, "does not compute what the trained weights"),
    ],
)
def test_gate_stops_wrong_tensors(exported, fault, message):
    path = MODEL / "model.safetensors"
    tensors = load_file(path)
    fault(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(DraftlineError, match=message):
        gate()
    assert not GATE.exists()


def test_reader_names_a_cut_file(exported):
    path = MODEL / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DraftlineError, match=f"{path}: damaged or cut short"):
        load_drafter(path)


def test_reader_names_a_missing_config(exported):
    (MODEL / "config.json").unlink()
    with pytest.raises(DraftlineError, match=r"config\.json: no such file"):
        load_drafter(MODEL / "model.safetensors")


def test_weights_that_are_not_finite_are_not_exported(exported):
    state = State.load(STATE)
    state.tensors["model.fc.weight"][0, 0] = float("inf")
    state.save(STATE, world.record("train_segment", "x"))
    shutil.rmtree(MODEL)
    with pytest.raises(DraftlineError, match=r"state\.safetensors: fc\.weight: holds NaN or Inf"):
        run_export()
    assert not (MODEL / "model.safetensors").exists()
