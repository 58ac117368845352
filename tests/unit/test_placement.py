"""A model over several devices: which layers go where, whether they fit, and that a split forward is the whole one."""

import itertools
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from small_models import BUILDERS, build
from states_fixtures import samples_of, save_target
from transformers import AutoModel, AutoModelForCausalLM

from draftline.checkpoint import Checkpoint
from draftline.errors import DraftlineError
from draftline.extraction import extract
from draftline.loading import load_model, text_config
from draftline.placement import module_names, needs, split

TWO = ["cuda:0", "cuda:1"]
SIZES_27B = {"embed_tokens": 1271, **{f"layers.{n}": 383 for n in range(62)}}
"""Millions of parameters of Qwen3.6-27B's embedding and its layers 0 to 61."""


def largest(blocks, cuts):
    """Size of the largest run when `blocks` are cut before the places `cuts`."""
    counts, ends = list(blocks.values()), [0, *cuts, len(blocks)]
    return max(sum(counts[start:end]) for start, end in itertools.pairwise(ends))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_the_fullest_device_holds_as_little_as_any_division_allows(devices):
    blocks = dict(list(SIZES_27B.items())[:20])
    found = needs(blocks, split(blocks, [f"cuda:{n}" for n in range(devices)]))
    best = min(largest(blocks, cuts) for cuts in itertools.combinations(range(1, len(blocks)), devices - 1))
    assert max(found.values()) == best
    assert sum(found.values()) == sum(blocks.values())


def test_layers_are_neighbours_and_the_embedding_is_on_the_first_device():
    placed = split(SIZES_27B, TWO)
    assert list(placed) == list(SIZES_27B)
    assert [device for device, _ in itertools.groupby(placed.values())] == TWO
    assert [n for n in range(62) if placed[f"layers.{n}"] == "cuda:0"] == list(
        range(29)
    )  # The embedding weighs 3.3 layers.


@pytest.mark.parametrize("last_layer", [None, 2])
@pytest.mark.parametrize("name", BUILDERS)
def test_blocks_are_the_models_modules_in_order_and_all_of_its_weights(tmp_path, name, last_layer):
    manifest = save_target(name, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    blocks = checkpoint.blocks(last_layer)
    layers = [f"layers.{n}" for n in range(4 if last_layer is None else last_layer + 1)]
    assert list(blocks) == ["embed_tokens", *layers, "norm", *(["lm_head"] if last_layer is None else [])]
    assert sum(blocks.values()) == checkpoint.text_parameters(last_layer)
    config = text_config(manifest)
    whole = AutoModelForCausalLM.from_config(config)
    placed = module_names(AutoModelForCausalLM, config, split(Checkpoint(tmp_path).blocks(), TWO))
    parameters = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    covered = {name for name in parameters if any(name.startswith(f"{module}.") for module in placed)}
    assert covered == set(parameters)
    assert placed["model.embed_tokens"] == placed["model.layers.0"] == placed["model.rotary_emb"] == "cuda:0"
    assert placed["model.norm"] == placed["lm_head"] == "cuda:1"


def test_a_tied_head_on_another_device_is_counted_as_a_copy(tmp_path):
    model = build("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    blocks = Checkpoint(tmp_path).blocks()
    assert blocks["lm_head"] == blocks["embed_tokens"]
    assert sum(blocks.values()) == Checkpoint(tmp_path).text_parameters() + blocks["lm_head"]


def test_too_little_memory_is_refused_with_need_and_free_of_every_device(tmp_path, monkeypatch):
    """There need not be a GPU here: only what is free on one is made up."""
    manifest, free = save_target("llama", tmp_path), {"cuda:0": 30e9, "cuda:1": 10**4}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 48e9))
    with pytest.raises(
        DraftlineError, match=r"needs 0\.0 GB on cuda:0, 30\.0 GB are free; 0\.0 GB on cuda:1, 0\.0 GB are free;.*gpus"
    ):
        load_model(manifest, {"device": "cuda", "gpus": 2}, last_layer=2)


@pytest.mark.parametrize("name", BUILDERS)
def test_features_of_a_model_whose_blocks_are_placed_are_those_of_the_whole(tmp_path, name):
    """Both devices are the CPU: what is shown is that accelerate's hooks and the taps leave each other alone."""
    manifest = save_target(name, tmp_path)
    placed = module_names(AutoModel, text_config(manifest), split(Checkpoint(Path(manifest.model)).blocks(3), TWO))
    whole, parts = load_model(manifest, last_layer=3), load_model(manifest, last_layer=3)
    dispatch_model(parts, device_map=dict.fromkeys(placed, "cpu"), main_device="cpu", force_hooks=True)
    assert all(hasattr(layer, "_hf_hook") for layer in parts.layers)
    sequences = [sample.input_ids for sample in samples_of()]
    expected, found = (dict(extract(model, [0, 2], sequences, 100)) for model in (whole, parts))
    assert all(torch.equal(expected[n], found[n]) for n in expected)
