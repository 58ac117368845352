"""Shape of a drafter, and the config.json of released DFlash checkpoints that it is written to and read from.

Readers of that file disagree on where keys stand, so what we write stands in every place that one of them reads:
``block_size`` at top level and in ``dflash_config``, ``rope_theta`` at top level and in ``rope_parameters``, and
``use_sliding_window`` wherever a layer slides (transformers drops the window without it). What we read may stand in either.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftline.errors import DraftlineError

if TYPE_CHECKING:
    from draftline.manifest import Manifest

ARCHITECTURE = "DFlashDraftModel"
FULL, SLIDING = "full_attention", "sliding_attention"
FOREIGN_KEYS = ("draft_vocab_size", "t2d", "d2t", "gating", "aux_hidden_norms", "selector_top_k")
"""Keys of other draft models that call themselves DFlash; their tensors do not compute what ours do."""


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that the model's shape and masks depend on. Sizes are in elements, the window in tokens."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise DraftlineError(
                f"block_size: {self.block_size}: a block needs an anchor and a slot to fill; give 2 or more"
            )
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > self.num_target_layers - 2:
            raise DraftlineError(
                f"target_layer_ids: {list(ids)}: must be ascending and within 0..{self.num_target_layers - 2}"
                f" of a target of {self.num_target_layers} layers"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DraftlineError(f"mask_token_id: {self.mask_token_id}: not below vocab_size {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise DraftlineError(
                f"num_key_value_heads: {self.num_key_value_heads}: must divide num_attention_heads"
                f" {self.num_attention_heads}; set both heads and kv_heads"
            )
        if self.head_dim % 2:
            raise DraftlineError(f"head_dim: {self.head_dim}: must be even, since positions rotate pairs")
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - {FULL, SLIDING}:
            raise DraftlineError(
                f"layer_types: {list(self.layer_types)}: give {FULL} or {SLIDING} for each of {self.num_hidden_layers} layers"
            )
        if SLIDING in self.layer_types and not self.sliding_window:
            raise DraftlineError(f"sliding_window: {self.sliding_window}: a sliding layer needs a window of 1 or more")

    @property
    def feature_size(self) -> int:
        """Width K*H of a context feature: the tapped layers' outputs, one after the other."""
        return len(self.target_layer_ids) * self.hidden_size

    def window(self, layer: int) -> int | None:
        """Tokens that a query of `layer` looks back on, itself included; None without a limit."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """Whether a slot sees only earlier slots of its block: as the file says, else on sliding layers."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    @classmethod
    def from_settings(
        cls, values: Mapping[str, Any], manifest: "Manifest", layer_ids: Sequence[int]
    ) -> "DrafterConfig":
        """From a `drafters.{name}` entry of the config; sizes that it leaves null are the target's.

        A `sliding_window` without `layer_types` makes all layers but the last slide, as in the released Qwen3.6-27B
        drafter. Raises DraftlineError naming the key.
        """
        layers, window, types = values["layers"], values["sliding_window"], values["layer_types"]
        if types is None:
            types = [FULL if window is None else SLIDING] * (layers - 1) + [FULL]

        def size(key: str, of_target: Any) -> Any:
            return of_target if values[key] is None else values[key]

        return cls(
            hidden_size=manifest.hidden_size,
            intermediate_size=size("intermediate_size", manifest.intermediate_size),
            num_hidden_layers=layers,
            num_attention_heads=size("heads", manifest.num_attention_heads),
            num_key_value_heads=size("kv_heads", manifest.num_key_value_heads),
            head_dim=size("head_dim", manifest.head_dim),
            rms_norm_eps=manifest.rms_norm_eps,
            rope_theta=float(size("rope_theta", manifest.rope_theta)),
            max_position_embeddings=size("max_position_embeddings", manifest.max_position_embeddings),
            vocab_size=manifest.vocab_size,
            block_size=values["block_size"],
            mask_token_id=manifest.mask_token_id,
            target_layer_ids=tuple(layer_ids),
            num_target_layers=manifest.num_layers,
            layer_types=tuple(types),
            sliding_window=window if SLIDING in types else None,
            tie_word_embeddings=manifest.tie_word_embeddings,
        )

    def to_json(self) -> dict[str, Any]:
        """The config.json of the layout that SGLang, vLLM and the dflash package load."""
        values: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "block_size": self.block_size,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "num_target_layers": self.num_target_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "layer_types": list(self.layer_types),
            "use_sliding_window": SLIDING in self.layer_types,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        if self.is_causal is not None:
            values["is_causal"] = self.is_causal
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DrafterConfig":
        """From a config.json of this layout, ours or a released one.

        Raises DraftlineError for another architecture, a missing key, or a feature that the model here does not compute.
        """
        _refuse_foreign(values)
        nested = values.get("dflash_config") or {}
        rope = values.get("rope_parameters") or {}

        def find(key: str, *places: Mapping[str, Any]) -> Any:
            for place in places or (values,):
                if place.get(key) is not None:
                    return place[key]
            raise DraftlineError(f"config.json: {key}: missing; a DFlash drafter's config has it")

        layers = find("num_hidden_layers")
        types = tuple(values.get("layer_types") or [FULL] * layers)
        is_causal = values.get("is_causal")
        return cls(
            **{field: find(field) for field in _PLAIN},
            rope_theta=float(find("rope_theta", rope, values)),
            block_size=find("block_size", nested, values),
            mask_token_id=find("mask_token_id", nested, values),
            target_layer_ids=tuple(find("target_layer_ids", nested, values)),
            layer_types=types,
            sliding_window=find("sliding_window") if SLIDING in types else None,
            is_causal=nested.get("causal") if is_causal is None else is_causal,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        )

    def replace(self, **changes: Any) -> "DrafterConfig":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


_PLAIN = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "num_target_layers",
)
"""Fields that stand at top level of config.json under their own name."""


def _refuse_foreign(values: Mapping[str, Any]) -> None:
    if values.get("architectures") != [ARCHITECTURE]:
        raise DraftlineError(
            f"config.json: architectures: {values.get('architectures')}: not a DFlash drafter of this layout"
            f" ([{ARCHITECTURE!r}]); its tensors mean something else"
        )
    for place in (values, values.get("dflash_config") or {}):
        for key in FOREIGN_KEYS:
            if place.get(key):
                raise DraftlineError(
                    f"config.json: {key}: of another draft model (its own vocabulary, gates or selector)"
                )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise DraftlineError(f"config.json: rope_scaling: {kind}: only plain rotary positions are computed here")
    if values.get("attention_bias"):
        raise DraftlineError("config.json: attention_bias: true: drafters of this layout have no biases")
