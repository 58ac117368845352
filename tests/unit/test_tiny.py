"""The tiny hybrid target: a released checkpoint's layout, a tokenizer that round-trips, text that varies and ends."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import MadeTarget
from draftline.chat import Chat
from draftline.loading import load_model
from draftline.tiny import build_tiny


@pytest.fixture(scope="module")
def folder(tiny_target: MadeTarget) -> Path:
    return Path(tiny_target.manifest.model)


@pytest.fixture(scope="module")
def chat(tiny_target: MadeTarget) -> Chat:
    return Chat.load(tiny_target.manifest_path, tiny_target.tokenizer_path)


def test_its_layout_is_that_of_the_released_wrappers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    names = set(load_file(folder / "model.safetensors"))
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert config["model_type"] == "qwen3_5"
    assert config["text_config"]["model_type"] == "qwen3_5_text"
    assert config["text_config"]["full_attention_interval"] == 4
    assert {name.split(".")[0] for name in names} == {"model", "lm_head", "mtp"}
    assert any(name.startswith("model.visual.") for name in names)
    assert "model.language_model.layers.0.linear_attn.A_log" in names
    assert "model.language_model.layers.7.self_attn.q_proj.weight" in names


def test_equal_seeds_give_equal_files_and_other_seeds_other_weights(tmp_path: Path) -> None:
    one, same, other = (build_files(tmp_path / name, seed) for name, seed in (("one", 0), ("same", 0), ("other", 1)))
    assert one == same
    assert one.keys() == other.keys()
    assert [name for name in one if other[name] != one[name]] == ["model.safetensors"]


def build_files(folder: Path, seed: int) -> dict[str, bytes]:
    build_tiny(folder, seed)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_its_tokenizer_round_trips_and_keeps_tags_whole(chat: Chat, tiny_target: MadeTarget) -> None:
    text = "def naïve(x):\n\treturn '你好, мир' + \"🎉\"  # 12,345\r\n"
    assert chat.decode(chat.encode(text)) == text
    for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(chat.encode(tag)) == 1
    assert tiny_target.manifest.tokenizer_length == 4064
    assert tiny_target.manifest.vocab_size == 4096
    english = "Write a function that returns the largest number in a list, and explain how it works."
    assert len(chat.encode(english)) < len(english) / 3


def test_transformers_loads_its_tokenizer_as_it_is_written(folder: Path, chat: Chat) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<think>\nIt's 12 naïve cafés…\n</think>\n\n<tool_call> 你好<|im_end|>"
    assert tokenizer.encode(text, add_special_tokens=False) == chat.encode(text)
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<|im_end|>", "<|endoftext|>", 4064)


def test_it_samples_varied_text_that_ends(tiny_target: MadeTarget, chat: Chat) -> None:
    model: Any = load_model(tiny_target.manifest)
    prompt = torch.tensor([chat.prompt_ids([{"role": "user", "content": "Say something."}])])
    stop = tiny_target.manifest.eos_token_ids[0]
    torch.manual_seed(0)
    out = model.generate(prompt.expand(32, -1), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=128)
    rows = [row[: [*row.tolist(), stop].index(stop)] for row in out[:, prompt.shape[1] :]]
    tokens = torch.cat(rows)
    assert 8 < sum(map(len, rows)) / len(rows) < 100
    assert sum(len(row) < 128 for row in rows) > 16
    assert len(tokens.unique()) > len(tokens) / 4
    assert (tokens < 4057).sum() + (tokens == chat.think_close).sum() == len(tokens)
