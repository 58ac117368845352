"""Samples and a small target on disk, for the tests of hidden states."""

import hashlib

import torch
from small_models import build

from draftline.manifest import Manifest
from draftline.states_writer import Sample

RECORD = {"rule": "hidden_states", "id": "0" * 16, "settings": "1" * 16, "inputs": {}}
LENGTHS = (23, 7, 70, 40, 12, 9, 31, 64, 25, 18)


def samples_of(lengths=LENGTHS, vocabulary=32, seed=0):
    """Samples of random tokens in order of id; the second half of each is supervised."""
    draw = torch.Generator().manual_seed(seed)
    samples = [
        Sample(
            hashlib.md5(str(n).encode()).hexdigest(),
            torch.randint(1, vocabulary, (length,), generator=draw, dtype=torch.int32),
            torch.arange(length) >= length // 2,
        )
        for n, length in enumerate(lengths)
    ]
    return sorted(samples, key=lambda sample: sample.id)


def save_target(name, folder, seed=0, dtype="float32"):
    """A small target written as transformers does, and its manifest. `name` is one of small_models.BUILDERS."""
    model = build(name, seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return Manifest(
        kind="path", model=str(folder), name=f"small-{name}", revision=None,
        model_type=config.model_type, architecture=type(model).__name__, wrapper=False,
        config_sha256="", weights_sha256=hashlib.sha256(f"{name}{seed}".encode()).hexdigest(),
        num_layers=config.num_hidden_layers, layer_types=list(kinds), hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size, vocab_size=config.vocab_size,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps, rope_theta=1e4,
        max_position_embeddings=config.max_position_embeddings, norm_plus_one=name == "hybrid",
        tie_word_embeddings=False, eos_token_ids=[5], pad_token_id=0, mask_token_id=31, mask_token_rule="config",
        tokenizer_length=31, chat_template="", chat_template_sha256="", special_tokens={}, think_open=None,
        think_close=None, generation={}, dtype=dtype, trust_remote_code=False,
    )  # fmt: skip
