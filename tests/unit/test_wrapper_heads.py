"""A wrapper's heads are those of the text model that runs, whatever the wrapper's own config has for a default."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_target import IDS, make, plain_folder

from conftest import MadeTarget
from draftline.heads import Heads
from draftline.loading import backbone, load_model


@pytest.mark.parametrize("said", [None, True, False])
def test_a_head_beside_the_embedding_is_the_head(tiny_target: MadeTarget, tmp_path: Path, said: bool | None) -> None:
    folder = plain_folder("mistral", tiny_target, tmp_path / "model", tied=False)
    text = json.loads((folder / "config.json").read_text())
    tie = {} if said is None else {"tie_word_embeddings": said}
    wrapper = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    # transformers' Mistral3Config ties embeddings unless it is told not to.
    (folder / "config.json").write_text(json.dumps({**wrapper, "vision_config": {"model_type": "pixtral"}, **tie}))
    tensors = load_file(folder / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    manifest = make(folder, tmp_path)
    assert not manifest.tie_word_embeddings
    model, heads = load_model(manifest), Heads.load(tmp_path / "heads.safetensors")
    with torch.no_grad():
        hidden = backbone(model)(IDS).last_hidden_state
        assert torch.allclose(heads.logits(hidden), model(IDS).logits, atol=1e-5)


def test_a_wrapper_alone_may_tie(tiny_target: MadeTarget, tmp_path: Path) -> None:
    folder = plain_folder("mistral", tiny_target, tmp_path / "model", tied=True)
    text = json.loads((folder / "config.json").read_text())
    del text["tie_word_embeddings"]
    wrapper = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (folder / "config.json").write_text(
        json.dumps({**wrapper, "vision_config": {"model_type": "pixtral"}, "tie_word_embeddings": True})
    )
    manifest = make(folder, tmp_path)
    assert manifest.tie_word_embeddings
    model, heads = load_model(manifest), Heads.load(tmp_path / "heads.safetensors")
    with torch.no_grad():
        hidden = backbone(model)(IDS).last_hidden_state
        assert torch.allclose(heads.logits(hidden), model(IDS).logits, atol=1e-5)
