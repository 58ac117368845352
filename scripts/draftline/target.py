"""From the config's target to manifest, heads and tokenizer: what the target is, and whether it can be used.

A safetensors folder (a path or a hub snapshot) is referenced by the manifest and never copied. Whatever would make hidden
states or token ids other than those of the served model is refused here, by name.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from draftline import provenance
from draftline.architecture import examine
from draftline.chat import compile_template
from draftline.checkpoint import Checkpoint, weights_sha256
from draftline.errors import DraftlineError
from draftline.manifest import Manifest
from draftline.sources import locate
from draftline.target_source import Source, find

if TYPE_CHECKING:
    import transformers

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def make_target(
    target: Mapping[str, Any], workflow: Path, outputs: Mapping[str, Path], record: provenance.Record
) -> None:
    """Write `outputs` (manifest, heads, tokenizer) for the config's `target`; DraftlineError when it cannot be used."""
    source = find(target, workflow, outputs["manifest"].parent / "model")
    config = read_config(source.folder, target)
    checkpoint = Checkpoint(source.folder)
    tokenizer = read_tokenizer(source.folder, target)
    manifest = identify(source, target, workflow, config, checkpoint, tokenizer)
    write_heads(manifest, checkpoint, outputs["heads"], record)
    write_tokenizer(tokenizer, outputs["tokenizer"], record)
    manifest.write(outputs["manifest"], record)


def read_config(folder: Path, target: Mapping[str, Any]) -> "transformers.PretrainedConfig":
    """transformers' config of a folder, refused when it is missing, unknown or of a quantized model."""
    from transformers import AutoConfig

    raw = _read_json(folder / "config.json")
    if raw is None:
        raise DraftlineError(f"{folder}: no config.json; give the folder of a safetensors model")
    quantization = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config")
    if quantization:
        raise DraftlineError(
            f"{folder}: quantized ({quantization.get('quant_method')}): its hidden states are not those of the model as"
            " transformers runs it; give the checkpoint that it was quantized from"
        )
    try:
        config: transformers.PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=target["trust_remote_code"]
        )
        return config
    except (ValueError, KeyError, OSError, ImportError) as error:
        if "auto_map" in raw and not target["trust_remote_code"]:
            raise DraftlineError(
                f"{folder}: model type {raw.get('model_type')} runs code from the checkpoint;"
                " if you trust it, set target.trust_remote_code: true"
            ) from None
        raise DraftlineError(f"{folder}: config.json: {_first_line(error)}") from None


def read_tokenizer(folder: Path, target: Mapping[str, Any]) -> "transformers.PreTrainedTokenizerBase":
    """transformers' fast tokenizer of a folder. Raises DraftlineError when there is none."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        # transformers would make up an empty one.
        raise DraftlineError(f"{folder}: no tokenizer.json; put the model's tokenizer files there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=target["trust_remote_code"])
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise DraftlineError(f"{folder}: tokenizer: {_first_line(error)}; put its tokenizer.json there") from None
    if not tokenizer.is_fast:
        raise DraftlineError(f"{folder}: only a slow tokenizer; put its tokenizer.json there")
    return tokenizer


def identify(
    source: Source,
    target: Mapping[str, Any],
    workflow: Path,
    config: "transformers.PretrainedConfig",
    checkpoint: Checkpoint,
    tokenizer: "transformers.PreTrainedTokenizerBase",
) -> Manifest:
    """The manifest of a target, checked against its checkpoint."""
    text: Any = config.get_text_config(decoder=True)
    layers = getattr(text, "num_hidden_layers", None)
    if layers is None:
        raise DraftlineError(
            f"{source.name}: config.json: transformers finds no text model in it ({config.model_type}); not supported"
        )
    if target["num_layers"] not in (None, layers):
        raise DraftlineError(
            f"config: target.num_layers: {target['num_layers']}: {source.name} has {layers} layers; correct or remove it"
        )
    build = examine(config, text, checkpoint, target["trust_remote_code"])
    vocabulary = tokenizer.get_vocab()
    length = max(vocabulary.values()) + 1
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    template = read_template(source, target, workflow, tokenizer)
    generation = _read_json(source.folder / "generation_config.json") or {}
    stops = _stop_ids(source.folder, generation, tokenizer)
    mask, rule = mask_token(target["mask_token_id"], text.vocab_size, length, _reserved(tokenizer, stops, template))
    return Manifest(
        kind=source.kind,
        model=str(source.folder),
        name=source.name,
        revision=source.revision,
        model_type=text.model_type,
        architecture=build.name,
        wrapper=text is not config,
        config_sha256=hashlib.sha256((source.folder / "config.json").read_bytes()).hexdigest(),
        weights_sha256=weights_sha256(checkpoint),
        num_layers=layers,
        layer_types=list(getattr(text, "layer_types", None) or ["full_attention"] * layers),
        hidden_size=text.hidden_size,
        # Mixture-of-experts configs have no dense size; released drafters for them take 3 H.
        intermediate_size=getattr(text, "intermediate_size", None) or 3 * text.hidden_size,
        vocab_size=text.vocab_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        rms_norm_eps=text.rms_norm_eps,
        rope_theta=_rope_theta(text),
        max_position_embeddings=text.max_position_embeddings,
        norm_plus_one=build.norm_plus_one,
        tie_word_embeddings=build.tie_word_embeddings,
        eos_token_ids=stops,
        pad_token_id=tokenizer.pad_token_id,
        mask_token_id=mask,
        mask_token_rule=rule,
        tokenizer_length=length,
        chat_template=template,
        chat_template_sha256=hashlib.sha256(template.encode()).hexdigest(),
        special_tokens=special,
        think_open=vocabulary.get(THINK_OPEN) if THINK_CLOSE in vocabulary else None,
        think_close=vocabulary.get(THINK_CLOSE) if THINK_OPEN in vocabulary else None,
        generation={key: generation[key] for key in SAMPLING if generation.get(key) is not None},
        dtype=target["dtype"],
        trust_remote_code=target["trust_remote_code"],
    )


def read_template(
    source: Source, target: Mapping[str, Any], workflow: Path, tokenizer: "transformers.PreTrainedTokenizerBase"
) -> str:
    """The config's own chat template, else the model's. Raises DraftlineError when there is none, or it is no Jinja."""
    if target["chat_template"] is not None:
        path = locate(target["chat_template"], workflow)
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DraftlineError(f"config: target.chat_template: {path}: cannot be read ({error})") from None
    else:
        known: Any = tokenizer.chat_template
        template = (known.get("default") if isinstance(known, dict) else known) or ""
        if not template:
            raise DraftlineError(f"{source.folder}: has no chat template; name a Jinja file: target.chat_template")
    compile_template(template)
    return template


def mask_token(
    setting: int | str, vocab_size: int, tokenizer_length: int, reserved: list[tuple[int, str]]
) -> tuple[int, str]:
    """The mask token's id and how it was found, from target.mask_token_id.

    `auto` takes the first embedding row after the tokenizer's last id, as released drafters do; without a spare row the
    reserved special token with the highest id, out of `reserved`. Raises DraftlineError when there is none, or when the
    configured id has no embedding row.
    """
    if setting != "auto":
        if int(setting) >= vocab_size:
            raise DraftlineError(
                f"config: target.mask_token_id: {setting}: the target has only {vocab_size} embedding rows"
            )
        return int(setting), "config"
    if tokenizer_length < vocab_size:
        return tokenizer_length, "spare embedding row"
    if not reserved:
        raise DraftlineError(
            "config: target.mask_token_id: auto: no spare embedding row and no reserved special token; give the id of a token"
            " that your data never has"
        )
    token_id, name = max(reserved)
    return token_id, f"reserved token {name}"


def _reserved(
    tokenizer: "transformers.PreTrainedTokenizerBase", stops: list[int], template: str
) -> list[tuple[int, str]]:
    """Special tokens (id, text) without a part in conversations: not named by the tokenizer, no stop, not in the template."""
    named = {str(token) for token in tokenizer.special_tokens_map.values()}
    return [
        (token_id, token.content)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in stops and token.content not in named and token.content not in template
    ]


def _stop_ids(
    folder: Path, generation: Mapping[str, Any], tokenizer: "transformers.PreTrainedTokenizerBase"
) -> list[int]:
    """All ids that end generation: the generation config's, the config's and the tokenizer's, each once."""
    # Read from the files: transformers' config classes have defaults that belong to other tokenizers.
    raw = _read_json(folder / "config.json") or {}
    given = [generation.get("eos_token_id"), raw.get("eos_token_id"), raw.get("text_config", {}).get("eos_token_id")]
    flat = [i for ids in (*given, tokenizer.eos_token_id) for i in (ids if isinstance(ids, list) else [ids])]
    stops = list(dict.fromkeys(i for i in flat if i is not None))
    if not stops:
        raise DraftlineError(
            f"{folder}: no stop token in its configs or tokenizer; add eos_token_id to generation_config.json"
        )
    return stops


def _rope_theta(text: Any) -> float:
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta", 10000.0))


def write_heads(manifest: Manifest, checkpoint: Checkpoint, path: Path, record: provenance.Record) -> None:
    """Cut embedding, final norm and head out of the checkpoint, in its dtype."""
    from draftline.heads import EMBED, HEAD, NORM

    names = {EMBED: checkpoint.prefix + EMBED, NORM: checkpoint.prefix + NORM}
    if not manifest.tie_word_embeddings and checkpoint.head:
        names[HEAD] = checkpoint.head
    facts = {name: getattr(manifest, name) for name in ("tie_word_embeddings", "norm_plus_one", "rms_norm_eps")}
    provenance.write_safetensors(path, {name: checkpoint.read(place) for name, place in names.items()}, record, facts)


def write_tokenizer(tokenizer: "transformers.PreTrainedTokenizerBase", path: Path, record: provenance.Record) -> None:
    """Write the fast tokenizer's own file, without truncation and padding."""
    value = orjson.loads(tokenizer.backend_tokenizer.to_str())
    provenance.write_tokenizer(path, {**value, "truncation": None, "padding": None}, record)


def _read_json(path: Path) -> Any:
    """A JSON file's value, None when there is no such file."""
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DraftlineError(f"{path}: not JSON ({error}); download it again") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200]
