"""Reading a drafter's weights: exactly the tensors of the layout, nothing more, less or in another shape.

Serving engines ignore unknown names in silence, so names are checked here.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.drafter.config import DrafterConfig
from draftline.errors import DraftlineError
from draftline.provenance import safetensors_header

if TYPE_CHECKING:
    from draftline.drafter.model import Drafter


def tensor_shapes(config: DrafterConfig) -> dict[str, list[int]]:
    """Name -> shape of every tensor of a checkpoint (specs: "Tensors"): 11 a layer and 3."""
    H, I, D = config.hidden_size, config.intermediate_size, config.head_dim  # noqa: E741
    queries, keys = config.num_attention_heads * D, config.num_key_value_heads * D
    shapes = {"fc.weight": [H, config.feature_size], "hidden_norm.weight": [H], "norm.weight": [H]}
    for layer in range(config.num_hidden_layers):
        of_layer = {
            "input_layernorm": [H],
            "post_attention_layernorm": [H],
            "self_attn.q_proj": [queries, H],
            "self_attn.k_proj": [keys, H],
            "self_attn.v_proj": [keys, H],
            "self_attn.o_proj": [H, queries],
            "self_attn.q_norm": [D],
            "self_attn.k_norm": [D],
            "mlp.gate_proj": [I, H],
            "mlp.up_proj": [I, H],
            "mlp.down_proj": [H, I],
        }
        shapes.update({f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()})
    return shapes


def load_drafter(path: str | Path) -> "Drafter":
    """The drafter of a model.safetensors (with config.json beside it) or a weights.safetensors, in fp32, for inference.

    Raises DraftlineError with the path for a torn file, a config of another layout, or wrong tensors.
    """
    from safetensors.torch import load_file

    from draftline.drafter.model import Drafter

    config = read_config(path)
    check_tensors(path, config)
    drafter = Drafter(config)
    drafter.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    return drafter.eval().requires_grad_(False)


def read_config(path: str | Path) -> DrafterConfig:
    """Config of a weights file: in its header under `config`, else config.json beside it."""
    text = _header(path).get("__metadata__", {}).get("config")
    source = Path(path) if text is not None else Path(path).with_name("config.json")
    try:
        values = json.loads(text if text is not None else source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DraftlineError(f"{source}: no such file; a drafter's config belongs beside {Path(path).name}") from None
    except ValueError as error:
        raise DraftlineError(f"{source}: not JSON ({error}); export the drafter again") from None
    try:
        return DrafterConfig.from_json(values)
    except DraftlineError as error:
        raise DraftlineError(f"{source}: {error}") from None


def check_tensors(path: str | Path, config: DrafterConfig) -> None:
    """Raise DraftlineError with the path and the first tensor that is missing, foreign, or of another shape."""
    found = {name: entry["shape"] for name, entry in _header(path).items() if name != "__metadata__"}
    needed = tensor_shapes(config)
    for name in sorted(needed.keys() - found.keys()):
        raise DraftlineError(f"{path}: {name}: missing; the file holds no DFlash drafter of this config")
    for name in sorted(found.keys() - needed.keys()):
        raise DraftlineError(
            f"{path}: {name}: no tensor of a DFlash drafter of this config; it computes something else"
        )
    for name, shape in needed.items():
        if found[name] != shape:
            raise DraftlineError(f"{path}: {name}: shape {found[name]} where the config says {shape}")


def _header(path: str | Path) -> dict[str, Any]:
    try:
        return safetensors_header(path)
    except FileNotFoundError:
        raise DraftlineError(f"{path}: no such file; make it with: snakemake {path}") from None
    except (OSError, ValueError) as error:
        raise DraftlineError(f"{path}: damaged or cut short ({error}); delete it and run again") from None
