"""What a target is, as all commands but `target` know it: results/target/manifest.json (docs/artifacts.md)."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from draftline import provenance
from draftline.errors import DraftlineError


@dataclass(frozen=True)
class Manifest:
    """Identity, shape, chat template and special ids of a target; the fields are described in docs/artifacts.md."""

    kind: str
    model: str
    name: str
    revision: str | None
    model_type: str
    architecture: str
    wrapper: bool
    config_sha256: str
    weights_sha256: str
    num_layers: int
    layer_types: list[str]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    norm_plus_one: bool
    tie_word_embeddings: bool
    eos_token_ids: list[int]
    pad_token_id: int | None
    mask_token_id: int
    mask_token_rule: str
    tokenizer_length: int
    chat_template: str
    chat_template_sha256: str
    special_tokens: dict[str, str]
    think_open: int | None
    think_close: int | None
    generation: dict[str, float]
    dtype: str
    trust_remote_code: bool

    @classmethod
    def load(cls, path: str | Path) -> "Manifest":
        """Read manifest.json. Raises DraftlineError with the path when it is missing, damaged or of another version."""
        provenance.read(path)
        values = orjson.loads(Path(path).read_bytes())
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise DraftlineError(f"{path}: {missing[0]} is missing; delete the file and run again")
        return cls(**{name: values[name] for name in names})

    def write(self, path: str | Path, record: provenance.Record) -> None:
        """Write manifest.json."""
        provenance.write_json(path, self.to_json(), record)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return dataclasses.asdict(self)
