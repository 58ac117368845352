"""Targets and drafters of a few thousand weights, for the tests of decoding and evaluation."""

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftline.decode.draft import Marginals
from draftline.drafter.config import DrafterConfig
from draftline.drafter.model import Drafter
from draftline.heads import Heads

VOCABULARY, HIDDEN, LAYERS = 32, 48, 4
TAPPED = (0, 2)
MASK = VOCABULARY - 1
STOP = 5

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": STOP,
    # Weights this large make the argmax depend on the context, so that completions do not repeat one token.
    "initializer_range": 0.3,
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


def sliding():
    kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, layer_types=kinds, use_sliding_window=True, sliding_window=6, max_window_layers=0)
    )


def hybrid():
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(**SHAPE, **linear, linear_value_head_dim=16, layer_types=kinds, rope_parameters=rope)
    return Qwen3_5ForCausalLM(config)


BUILDERS = {"llama": llama, "qwen3": qwen3, "sliding": sliding, "hybrid": hybrid}


def build(name, seed=0):
    """A random target in eval mode, fp32."""
    torch.manual_seed(seed)
    return BUILDERS[name]().eval()


def heads_of(model):
    norm = model.model.norm
    plus_one = "qwen3_5" in model.config.model_type
    return Heads(
        model.get_input_embeddings().weight.detach(),
        norm.weight.detach(),
        model.get_output_embeddings().weight.detach(),
        plus_one,
        model.config.rms_norm_eps,
    )


def drafter_config(block_size=6, **changes):
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "vocab_size": VOCABULARY,
        "block_size": block_size,
        "mask_token_id": MASK,
        "target_layer_ids": TAPPED,
        "num_target_layers": LAYERS,
        "layer_types": ("full_attention",) * 2,
    }
    return DrafterConfig(**{**values, **changes})


def random_drafter(seed=0, **changes):
    """A drafter with larger weights than a fresh one, so that its slots differ by context."""
    drafter = Drafter.initialized(drafter_config(**changes), seed).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return drafter.requires_grad_(False)


def greedy(model, prompt_ids, max_new_tokens):
    """The completion by transformers' own generate."""
    ids = torch.tensor([prompt_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt_ids) :].tolist()


def prompts(count, seed=0):
    """Random prompts of 3 to 20 ids, none of them special."""
    draw = np.random.default_rng(seed)
    return [draw.integers(6, MASK, size=draw.integers(3, 21)).tolist() for _ in range(count)]


def noisy_marginals(sequence, anchor, slots, count, error, seed=0):
    """What a good drafter might propose behind `anchor`: the true token with a share of errors, other tokens below it."""
    draw = np.random.default_rng([seed, anchor])
    tokens = np.empty((1, slots, count), dtype=np.int64)
    for slot in range(slots):
        true = sequence[anchor + slot + 1] if anchor + slot + 1 < len(sequence) else int(draw.integers(VOCABULARY))
        others = draw.permutation([token for token in range(VOCABULARY) if token != true])[: count - 1]
        place = 0 if draw.random() > error else int(draw.integers(count))
        tokens[0, slot] = np.insert(others, place, true)
    log_probs = np.sort(np.log(draw.dirichlet(np.full(count, 0.3), size=slots) + 1e-9))[None, :, ::-1]
    return Marginals(tokens, log_probs.astype(np.float32))
