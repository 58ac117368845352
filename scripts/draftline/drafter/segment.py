"""A segment of training: a stretch of (epoch, part) visits, from the state before it to the state after it.

Cutting a training into segments, or killing one and starting it again, does not change the result: samples, anchors and
rates follow from the settings and from numbers in the state, and an unfinished batch is handed on. On a GPU it changes rounding:
compiled kernels add up in an order that follows the first lengths that they meet.
"""

import dataclasses
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from draftline import provenance
from draftline.drafter.config import DrafterConfig
from draftline.drafter.data import Parts, Sample, Visit, require_alike
from draftline.drafter.model import Drafter
from draftline.drafter.schedule import total_steps
from draftline.drafter.state import State, learned_from, state_names
from draftline.drafter.train import Recipe, Trainer
from draftline.drafter.uploads import ahead
from draftline.errors import DraftlineError
from draftline.heads import Heads
from draftline.progress import Progress, say
from draftline.visits import segment_visits

if TYPE_CHECKING:
    from draftline.manifest import Manifest

CHECKPOINTS = "results/.resume/train"
"""Where a running segment keeps its state: {drafter}/{segment}/{the record's id}, so that no other takes it up."""

SAVE_EVERY = 60.0
"""Seconds between checkpoints inside a segment."""

SAVE_SHARE = 0.05
"""Share of the time that checkpoints may take; large models save less often."""

METRICS_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("epoch", pa.int32()),
        ("loss", pa.float32()),
        ("accuracy", pa.float32()),
        ("tau", pa.float32()),
        ("lr", pa.float32()),
        ("grad_norm", pa.float32()),
        ("tokens", pa.int32()),
        ("anchors", pa.int32()),
    ]
)


def train_segment(
    config: Mapping[str, Any],
    drafter: str,
    segment: int,
    manifest: "Manifest",
    heads: str,
    mask: str,
    labels: str,
    previous: str | None,
    parts: Sequence[str],
    state: str,
    metrics: str,
    record: provenance.Record,
    device: str,
    save_every: float = SAVE_EVERY,
) -> None:
    """Train segment 1..`config["segments"]` of a drafter: parts, heads, stats and the state before -> state and metrics.

    `config` is the rule's settings slice. Raises DraftlineError for inputs that are torn or do not belong together, and
    when training diverges, or when SIGTERM ended it: then its state is saved, and the next start goes on from there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise DraftlineError("config: run.device: cuda: torch sees no GPU here; set cpu, or install torch for CUDA")
    values, segments = config["drafters"][drafter], config["segments"]
    shape = (config["shards"], config["hidden_states"]["parts_per_shard"], values["epochs"], segments)
    visits = segment_visits(*shape, segment)
    first = sum(len(segment_visits(*shape, before)) for before in range(1, segment))
    recipe = Recipe.from_settings(values)
    opened = Parts(parts, manifest, visits, device)
    if previous is not None:
        require_alike(parts[0], opened.facts, previous, learned_from(previous))
    drafter_config = DrafterConfig.from_settings(values, manifest, opened.layers)
    data = training_data(mask)
    steps = total_steps(recipe.epochs, data["samples"], recipe.batch)

    folder = Path(CHECKPOINTS, drafter, str(segment), record["id"])
    for other in set(folder.parent.glob("*")) - {folder}:
        shutil.rmtree(other)  # of other settings; a large drafter's takes tens of gigabytes
    checkpoint = folder / "state.safetensors"
    if checkpoint.exists():
        before = State.load(checkpoint)
        say(f"training goes on from {checkpoint}: step {before.step} of {steps}")
    elif previous is not None:
        before = State.load(previous)
        _require(before.config == drafter_config and before.visits == first, previous)
    else:
        before = initial_state(drafter_config, recipe.seed, steps)

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    vocabulary = seen_tokens(labels) if recipe.head == "seen" else None
    trainer = Trainer(before, recipe, Heads.load(heads, device, dtype), vocabulary, device)
    after = run(trainer, before, opened, visits, first, segment == segments, checkpoint, record, save_every)
    _require(segment < segments or after.step == steps, mask)

    table = pa.Table.from_pylist(after.rows, schema=METRICS_SCHEMA)
    after.rows, after.facts = [], {"data": data, "recipe": dataclasses.asdict(recipe), "states": opened.facts}
    after.save(state, record)
    provenance.write_parquet(metrics, table, record)
    shutil.rmtree(folder, ignore_errors=True)


def run(
    trainer: Trainer,
    state: State,
    parts: Parts,
    visits: Sequence[Visit],
    first: int,
    last: bool,
    checkpoint: Path,
    record: provenance.Record,
    save_every: float,
) -> State:
    """Train from `state`, which the trainer holds, to the end of `visits`; `first` visits are before them.

    Where nothing follows (`last`) an unfinished batch is trained as it is.
    """
    carried, rows = list(state.carried), list(state.rows)
    remaining = visits[state.visits - first :]
    waiting = sum(parts.sizes[shard, part] for _, shard, part in remaining) - state.taken + len(carried)
    progress = Progress("training", waiting, "samples")
    due = time.monotonic() + save_every

    def snapshot(finished: int, taken: int) -> State:
        config, tensors = trainer.config, trainer.tensors()
        return State(config, trainer.step, trainer.total, finished, taken, tensors, list(carried), list(rows))

    def step() -> None:
        rows.append(trainer.train(carried))
        progress.add(len(carried), loss=f"{rows[-1]['loss']:.3f}", tau=f"{rows[-1]['tau']:.2f}")
        carried.clear()

    with _Stop() as stop:
        places = _places(parts, remaining, trainer.recipe.seed, state.visits, state.taken)
        for finished, taken, sample in ahead(places, trainer.recipe.batch):
            carried.append(sample)
            if len(carried) == trainer.recipe.batch:
                step()
                if time.monotonic() > due or stop.asked:
                    began = time.monotonic()
                    snapshot(finished, taken).save(checkpoint, record)
                    due = time.monotonic() + max(save_every, (time.monotonic() - began) / SAVE_SHARE)
                if stop.asked:
                    raise DraftlineError(
                        f"stopped by SIGTERM (time limit or preemption) after step {trainer.step} of {trainer.total};"
                        " its state is saved, and the next start goes on from there"
                    )
        if last and carried:
            step()
    return snapshot(first + len(visits), 0)


class _Stop:
    """Turns SIGTERM into a wish, `asked`, that is granted between two steps."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True


def _places(
    parts: Parts, visits: Sequence[Visit], seed: int, done: int, taken: int
) -> Iterator[tuple[int, int, Sample]]:
    """The samples ahead, each with the numbers of finished visits and taken samples after it."""
    for visit in visits:
        size = parts.sizes[visit[1:]]
        for sample in parts.samples(visit, seed, taken):
            taken += 1
            yield (done + 1, 0, sample) if taken == size else (done, taken, sample)
        done, taken = done + 1, 0


def initial_state(config: DrafterConfig, seed: int, steps: int) -> State:
    """A training before its first step."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in Drafter.initialized(config, seed).state_dict().items():
        zeros = (torch.zeros_like(parameter) for _ in range(2))
        tensors.update(zip(state_names(name), (parameter, *zeros)))
    return State(config, 0, steps, 0, 0, tensors)


def training_data(mask: str) -> dict[str, Any]:
    """Counts of stats/mask.parquet: `samples`, `tokens`, `supervised`, and samples by source."""
    table = provenance.read_parquet(mask, ["source", "length", "mask_sum"])
    sources = Counter(table["source"].to_pylist())
    return {
        "samples": table.num_rows,
        "tokens": pc.sum(table["length"]).as_py(),
        "supervised": pc.sum(table["mask_sum"]).as_py(),
        "sources": dict(sorted(sources.items())),
    }


def seen_tokens(labels: str) -> Tensor:
    """Ids [V] int64, ascending, of the tokens that occur as labels: stats/tokens.parquet."""
    return torch.tensor(provenance.read_parquet(labels, ["token"])["token"].to_pylist())


def _require(holds: bool, path: str) -> None:
    """Raise DraftlineError unless the file at `path` belongs to this training."""
    if not holds:
        raise DraftlineError(f"{path}: does not belong to these hidden states and settings; delete it and run again")
