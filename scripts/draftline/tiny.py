"""The tiny hybrid target: a random Qwen3_5 text model of half a million parameters, laid out as a released checkpoint.

It stands for Qwen3.5 and 3.6 in tests and first trials: gated-delta-net and full-attention layers, a multimodal wrapper with a vision
tower and MTP weights beside the text model, a tokenizer of its own with padded embedding rows, and a chat template that
thinks. Random weights know no language, but they sample varied text, think for a while, and stop.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers
    import torch

MERGES = Path(__file__).resolve().parents[2] / "resources" / "tiny" / "merges.txt"
"""BPE merges learnt once from resources/prompts, so that the tokenizer does not change when prompts do."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCABULARY = 4096
"""Embedding rows: 4064 tokens and 32 rows of padding, as large vocabularies have them."""
ENDS = {"<|im_end|>": 1.9, "</think>": 1.8}
"""Head weights that set how often a turn and a think block end: about once in 30 and in 60 tokens."""

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these functions:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set last.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {%- if loop.index0 > last.query %}
                {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {%- endif %}
            {{- content.strip('\\n') }}
            {%- for call in message.tool_calls or [] %}
                {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\nResult: ' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif not loop.first %}
        {{- raise_exception('a system message must come first') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def build_tiny(folder: Path, seed: int) -> None:
    """Write config, weights, tokenizer and chat template of the tiny target into `folder`."""
    from safetensors.torch import save_file

    tokenizer = build_tokenizer()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    ids = {token: vocabulary[token] for token in (*SPECIAL, *TAGS)}
    config = wrapper_config(ids)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "pad_token_id": ids["<|endoftext|>"]}
    _write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 1.0, "top_p": 0.95, **generation})
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    save_file(build_weights(config, ids, seed), folder / "model.safetensors", {"format": "pt"})


def build_tokenizer() -> "tokenizers.Tokenizer":
    """Byte-level BPE of 4064 tokens with Qwen3.5's way of splitting text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    lines = MERGES.read_text(encoding="utf-8").splitlines()
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    return tokenizer


def wrapper_config(ids: dict[str, int]) -> dict[str, Any]:
    """config.json: the text model's config nested in the wrapper's, as in released Qwen3.5 checkpoints."""
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
        "eos_token_id": ids["<|im_end|>"],
        "dtype": "float32",
    }
    vision = {"model_type": "qwen3_5", "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {**vision, "out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": False,
    }


def build_weights(config: dict[str, Any], ids: dict[str, int], seed: int) -> "dict[str, torch.Tensor]":
    """All tensors by their names in the wrapper, float32. Vision tower and MTP head are stubs that nobody loads."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    text = Qwen3_5TextConfig(**config["text_config"], initializer_range=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(text)
    state = model.state_dict()
    _make_lively(state, ids)
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in state.items()}
    tensors["model.visual.patch_embed.proj.bias"] = torch.zeros(config["vision_config"]["hidden_size"])
    tensors["mtp.norm.weight"] = torch.zeros(text.hidden_size)
    return tensors


def _make_lively(state: "dict[str, torch.Tensor]", ids: dict[str, int]) -> None:
    """Let the random model sample varied text that ends.

    Every token writes the same value into channel 0 and no layer does, so the head has a bias there: text tokens are
    about equally likely, control tokens and padded rows never come, and the ends of think block and turn now and then.
    """
    embed_VH, head_VH = state["model.embed_tokens.weight"], state["lm_head.weight"]
    embed_VH.mul_(10)
    embed_VH[:, 0] = 8.0
    head_VH.mul_(4)
    head_VH[:, 0] = 0.0
    head_VH[ids["<|endoftext|>"] :, 0] = -20.0
    for token, bias in ENDS.items():
        head_VH[ids[token]].mul_(0.1)
        head_VH[ids[token], 0] = bias
    for name, weight in state.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight[0] = 0.0


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
