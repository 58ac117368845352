"""A model that is larger than a GPU over several: neighbouring layers on each, the embedding on the first."""

from collections.abc import Mapping, Sequence
from typing import Any


def split(blocks: Mapping[str, int], devices: Sequence[str]) -> dict[str, str]:
    """A device for each block (`Checkpoint.blocks`): runs of neighbours, the largest as small as can be."""
    low, high = max(blocks.values()), sum(blocks.values())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_runs(blocks, middle)) <= len(devices) else (middle + 1, high)
    return {block: device for device, run in zip(devices, _runs(blocks, low)) for block in run}


def needs(blocks: Mapping[str, int], placed: Mapping[str, str]) -> dict[str, int]:
    """Parameters by device."""
    needed: dict[str, int] = {}
    for block, device in placed.items():
        needed[device] = needed.get(device, 0) + blocks[block]
    return needed


def module_names(build: Any, config: Any, placed: Mapping[str, str]) -> dict[str, str]:
    """The blocks' devices by the names of modules in the model that `build` makes; modules without weights are on the first."""
    import torch

    with torch.device("meta"):
        model = build.from_config(config)
    inner = getattr(model, "model", model)
    prefix = "" if inner is model else "model."
    names = [name for name, _ in inner.named_children() if name != "layers"]
    names += [f"layers.{n}" for n in range(len(inner.layers))]
    first = next(iter(placed.values()))
    found = {prefix + name: placed.get(name, first) for name in names}
    return found if inner is model else {**found, "lm_head": placed["lm_head"]}


def _runs(blocks: Mapping[str, int], limit: int) -> list[list[str]]:
    """Neighbouring blocks together, as long as they are no more than `limit` parameters."""
    runs: list[list[str]] = [[]]
    size = 0
    for block, count in blocks.items():
        if size + count > limit and runs[-1]:
            runs.append([])
            size = 0
        runs[-1].append(block)
        size += count
    return runs
