"""Making a file of hidden states: token rows in, the target's tapped layers out."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftline import provenance
from draftline.errors import DraftlineError
from draftline.extraction import extract, prepare
from draftline.kernels import kernels, versions
from draftline.layers import layer_ids
from draftline.loading import load_model
from draftline.manifest import Manifest
from draftline.progress import Progress, say
from draftline.states_writer import Sample, write_states

if TYPE_CHECKING:
    import pyarrow


def part_of_tokens(path: str | Path, part: int, parts: int) -> list[Sample]:
    """Rows N*part//parts .. N*(part+1)//parts of a tokens shard, in order of id; the loss mask covers the spans."""
    table = provenance.read_parquet(path, ["id", "input_ids", "spans"]).sort_by("id")
    first, last = (len(table) * p // parts for p in (part, part + 1))
    samples = []
    for name, ids, spans in _rows(table.slice(first, last - first)):
        loss_mask = torch.zeros(len(ids), dtype=torch.bool)
        for start, end in spans.view(-1, 2).tolist():
            loss_mask[start:end] = True
        samples.append(Sample(name, ids, loss_mask))
    return samples


def bench_rows(path: str | Path) -> list[Sample]:
    """Prompts and completions of an evaluation set, in order of id; the loss mask covers the completion."""
    table = provenance.read_parquet(path, ["id", "prompt_ids", "completion_ids"]).sort_by("id")
    samples = []
    for name, prompt, completion in _rows(table):
        loss_mask = torch.arange(len(prompt) + len(completion)) >= len(prompt)
        samples.append(Sample(name, torch.cat([prompt, completion]), loss_mask))
    return samples


def _rows(table: "pyarrow.Table") -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """An id column and two list columns, the lists as int32 tensors."""
    names, *lists = (column for column in table.columns)
    tensors = [
        [torch.tensor(row.values.to_numpy(zero_copy_only=False), dtype=torch.int32) for row in column]
        for column in lists
    ]
    return list(zip(names.to_pylist(), *tensors))


def make_states(
    path: str | Path,
    record: provenance.Record,
    samples: Sequence[Sample],
    manifest: Manifest,
    layers: int | list[int],
    storage: str,
    run: dict[str, Any],
) -> None:
    """Run the target over `samples` and write its tapped layers' outputs to `path`.

    `layers` and `storage` are the config's hidden_states.layers and .storage; `run` holds `device` and `batch`, the
    tokens of a forward, pads included. Raises DraftlineError for layers that the target does not have, too little memory or
    disk, and states that cannot be right.
    """
    ids = layer_ids(layers, manifest.num_layers, "hidden_states.layers")
    model = prepare(load_model(manifest, run, last_layer=ids[-1]))
    facts = {
        "target": {"name": manifest.name, "weights_sha256": manifest.weights_sha256},
        "kernels": kernels(model, manifest.layer_types),
        "dtype": manifest.dtype,
        "versions": versions(),
    }
    say(f"layers {ids}, {manifest.dtype}, kernels {facts['kernels']}")
    progress = Progress(Path(path).name, sum(len(sample.input_ids) for sample in samples), "tokens")
    options = {"batch_tokens": run["batch"]} if "batch" in run else {}
    with write_states(path, record, samples, ids, manifest.hidden_size, storage, facts) as writer:
        try:
            for n, features_TF in extract(model, ids, [sample.input_ids for sample in samples], **options):
                writer.put(n, features_TF)
                progress.add(len(features_TF))
        except torch.OutOfMemoryError:
            raise DraftlineError(
                f"config: run.hidden_states.batch: {run.get('batch', 'the default')}: too many tokens at once for the"
                " memory of the device; lower it"
            ) from None
