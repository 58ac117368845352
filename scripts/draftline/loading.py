"""Loading the target's text model with transformers, as far up as it is needed."""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline import memory
from draftline.checkpoint import Checkpoint
from draftline.errors import DraftlineError
from draftline.manifest import Manifest
from draftline.placement import module_names, needs, split
from draftline.staging import staged

if TYPE_CHECKING:
    import torch
    from torch import nn

CPU = {"device": "cpu"}
HEADROOM = 1.05
"""Memory for a model over that of its parameters."""


def load_model(
    manifest: Manifest,
    run: Mapping[str, Any] = CPU,
    dtype: "torch.dtype | None" = None,
    last_layer: int | None = None,
) -> "nn.Module":
    """The target's text model in eval mode, frozen, in `dtype` (default: the manifest's).

    `run` holds the job's `device`, `gpus` over which the layers are spread, and `stage_to` where the files are to be read
    from a copy (`draftline.staging`). Of a multimodal checkpoint the text part only is loaded. With `last_layer` it is the
    bare backbone with the layers 0..`last_layer`: layers above and the head are neither loaded nor run. Raises
    DraftlineError when files are missing, tensors do not fit the config, or a device has too little free memory.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    from draftline.kernels import leave_what_fails

    torch.backends.cuda.enable_cudnn_sdp(False)  # It makes a plan for every new length, for tens of milliseconds each.
    device, manifest = run["device"], staged(manifest, run.get("stage_to"))
    dtype = dtype or getattr(torch, manifest.dtype)
    folder = model_folder(manifest)
    config = text_config(manifest)
    checkpoint = Checkpoint(folder)
    if last_layer is not None:
        _cut(config, last_layer + 1)
    build: Any = AutoModelForCausalLM if last_layer is None else AutoModel
    devices = [f"cuda:{n}" for n in range(run.get("gpus", 1))] if device == "cuda" else [device]
    if len(devices) > 1:
        blocks = checkpoint.blocks(last_layer)
        where = split(blocks, devices)
        placed, needed = module_names(build, config, where), needs(blocks, where)
    else:
        placed, needed = {"": device}, {device: checkpoint.text_parameters(last_layer)}
    _check_memory({name: count * dtype.itemsize for name, count in needed.items()}, folder)
    model, report = build.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        device_map=placed if device != "cpu" else None,
        trust_remote_code=manifest.trust_remote_code,
        key_mapping=_renaming(checkpoint) or None,
        output_loading_info=True,
    )
    lacking = sorted(report["missing_keys"]) or sorted(map(str, report["mismatched_keys"]))
    if lacking:
        raise DraftlineError(
            f"{folder}: tensor {lacking[0]} is missing or does not fit config.json; complete the download"
        )
    model.requires_grad_(False).eval()
    if device == "cpu":
        leave_what_fails(model)
    return model  # type: ignore[no-any-return]


def text_config(manifest: Manifest) -> Any:
    """transformers' config of the text model, with the head that the manifest says: only a wrapper's may say that it is tied."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_folder(manifest), trust_remote_code=manifest.trust_remote_code)
    config = copy.deepcopy(config.get_text_config(decoder=True))
    config.tie_word_embeddings = manifest.tie_word_embeddings
    return config


def backbone(model: "nn.Module") -> "nn.Module":
    """The part of a model below its head: embedding, layers and final norm."""
    return model if hasattr(model, "embed_tokens") else model.model  # type: ignore[return-value]


def decoder_layers(model: "nn.Module") -> "nn.ModuleList":
    """The decoder layers, 0-based as everywhere."""
    return backbone(model).layers  # type: ignore[return-value]


def model_folder(manifest: Manifest) -> Path:
    """The folder of config.json and weights. Raises DraftlineError when it is gone."""
    folder = Path(manifest.model)
    if not (folder / "config.json").is_file():
        raise DraftlineError(
            f"{folder}: the target's folder is gone; bring it back, or delete results/target and run again"
        )
    return folder


def _cut(config: Any, num_layers: int) -> None:
    """Leave the first `num_layers` layers in a config."""
    config.num_hidden_layers = num_layers
    config.use_cache = False  # Nobody decodes with it, and a cache wants a full-attention layer.
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


def _renaming(checkpoint: Checkpoint) -> dict[str, str]:
    """From a checkpoint's names for the text model to the text model's own (patterns -> replacements)."""
    names = {checkpoint.prefix: "model.", checkpoint.head or "": "lm_head.weight"}
    return {f"^{re.escape(found)}": own for found, own in names.items() if found not in ("", own)}


def _check_memory(needed: Mapping[str, float], folder: Path) -> None:
    """Raise DraftlineError, with need and free memory of every device, where one has too little for `needed` bytes."""
    import torch

    needed = {device: amount * HEADROOM for device, amount in needed.items()}
    free = {device: memory.available() if device == "cpu" else torch.cuda.mem_get_info(device)[0] for device in needed}
    if any(needed[device] > free[device] for device in needed):
        figures = "; ".join(
            f"{needed[device] / 1e9:.1f} GB on {device}, {free[device] / 1e9:.1f} GB are free" for device in needed
        )
        remedy = "free some, use a larger machine or more GPUs (run.hidden_states.gpus), or set target.dtype: bfloat16"
        raise DraftlineError(f"{folder}: needs {figures}; {remedy}")
