"""All that a training is at a moment: what the next segment, or the same one after a kill, goes on from.

Anchors, orders and rates follow from numbers in here and in the settings, so there is no generator's state to keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import safe_open
from torch import Tensor

from draftline import provenance
from draftline.drafter.config import DrafterConfig
from draftline.drafter.data import Sample
from draftline.drafter.weights import tensor_shapes
from draftline.errors import DraftlineError

Row = dict[str, float]
"""A step's metrics, by column of metrics.parquet."""


@dataclass
class State:
    """A training after `step` of `total_steps` steps.

    `visits` visits are finished and `taken` samples of the next one are used, `carried` among them: samples that wait for
    a full batch. `tensors` are fp32 under the names of the file: `model.{name}`, `exp_avg.{name}` and `exp_avg_sq.{name}`
    for each parameter. `rows` are metrics not yet written; `facts` is for people: what it was trained on, and how. The cut is exact: going on from here gives what going on without a cut would have given, on the CPU bit for bit.
    """

    config: DrafterConfig
    step: int
    total_steps: int
    visits: int
    taken: int
    tensors: dict[str, Tensor]
    carried: list[Sample] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path, record: provenance.Record) -> None:
        """Write state.safetensors."""
        facts = {
            "config": self.config.to_json(),
            **{name: getattr(self, name) for name in (*_NUMBERS, "rows", "facts")},
        }
        provenance.write_safetensors(path, {**self.tensors, **_pack(self.carried)}, record, facts)

    def weights(self) -> dict[str, Tensor]:
        """The drafter's parameters by name."""
        prefix = "model."
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    @classmethod
    def load(cls, path: str | Path, moments: bool = True) -> "State":
        """Read state.safetensors into memory. Raises DraftlineError with the path when it is missing, cut or foreign.

        Without `moments` the optimizer's tensors, two thirds of the file, are left out: nothing can be trained from there.
        """
        provenance.read(path)
        kinds = slice(None if moments else 1)
        with safe_open(path, framework="pt") as file:
            facts = file.metadata()
            names = [name for name in file.keys() if moments or not name.startswith(_MOMENTS)]  # noqa: SIM118 - no mapping
            found = {name: file.get_tensor(name).clone() for name in names}
        try:
            config = DrafterConfig.from_json(orjson.loads(facts["config"]))
            own = {key: found[key] for name in tensor_shapes(config) for key in state_names(name)[kinds]}
            numbers: dict[str, int] = {name: orjson.loads(facts[name]) for name in _NUMBERS}
            rows, known = orjson.loads(facts["rows"]), orjson.loads(facts["facts"])
            return cls(config, **numbers, tensors=own, carried=_unpack(found), rows=rows, facts=known)
        except KeyError as error:
            raise DraftlineError(f"{path}: no training state (no {error}); delete it and run again") from None


def learned_from(path: str | Path) -> dict[str, Any]:
    """Facts of the hidden states that the training whose finished segment is `path` has learned from."""
    provenance.read(path)
    facts: dict[str, Any] = orjson.loads(provenance.safetensors_header(path)["__metadata__"]["facts"])
    return dict(facts["states"])


def state_names(parameter: str) -> tuple[str, str, str]:
    """Names in a state of a parameter, of its mean gradient and of its mean squared gradient."""
    return f"model.{parameter}", f"exp_avg.{parameter}", f"exp_avg_sq.{parameter}"


_MOMENTS = ("exp_avg.", "exp_avg_sq.")
_NUMBERS = ("step", "total_steps", "visits", "taken")
_CARRIED = ("features", "input_ids", "loss_mask")


def _pack(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Carried samples as tensors: rows one sample after the other, their lengths, ids and epochs. None for no sample."""
    if not samples:
        return {}
    packed = {name: torch.cat([getattr(sample, name).cpu() for sample in samples]) for name in _CARRIED}
    packed["lengths"] = torch.tensor([len(sample.input_ids) for sample in samples])
    packed["epochs"] = torch.tensor([sample.epoch for sample in samples])
    packed["ids"] = torch.tensor([list(bytes.fromhex(sample.id)) for sample in samples], dtype=torch.uint8)
    return {f"carried.{name}": tensor for name, tensor in packed.items()}


def _unpack(tensors: dict[str, Tensor]) -> list[Sample]:
    if "carried.ids" not in tensors:
        return []
    ids = [bytes(row).hex() for row in tensors["carried.ids"].tolist()]
    lengths = tensors["carried.lengths"].tolist()
    rows = [torch.split(tensors[f"carried.{name}"], lengths) for name in _CARRIED]
    return [Sample(*values) for values in zip(ids, tensors["carried.epochs"].tolist(), *rows, strict=True)]
