"""The canary: a few prompts of every source on the whole way to the hidden states, before the bulk starts.

What it completes lies in the row store afterwards, so nothing is made twice. All decoder layers but the last are looked at,
because which of them will be tapped does not matter here: another choice of layers is no reason to run this again.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from draftline import provenance
from draftline.chat import Chat
from draftline.completions import complete
from draftline.errors import DraftlineError
from draftline.gates import close_gate
from draftline.manifest import Manifest
from draftline.mask_gate import collect, judge, nothing_left
from draftline.tokens import Ragged, tokenize

if TYPE_CHECKING:
    from torch import nn

PROBES = 4
"""Samples that run through the layers; the shortest, for they cost least and padding is most of their batch."""
PROBE_TOKENS, PROBE_STEP = 512, 64
"""Probe k is cut at PROBE_TOKENS - k * PROBE_STEP tokens: long samples, too, come in different lengths."""
MEAN_COSINE = 0.999
"""A token's state in a batch and alone: mean cosine per layer."""


def run_canary(
    prompts: Sequence[str],
    output: str,
    chat: Chat,
    manifest: Manifest,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
    record: provenance.Record,
) -> None:
    """All of prompts/ -> gates/canary.json. `config` is the job's: canary, completions, tokens, mask_gate, block_size."""
    engine, settings = config["completions"]["engine"], config["mask_gate"]
    count = config["canary"]["prompts_per_source"]
    if engine == "dataset":
        # Answers that lie in the files cost nothing: take enough for the share of a dominant mask sum to be judged.
        count = max(count, 2 * settings["dominant_rows"])
    rows = choose(prompts, count)
    completions = complete(rows, chat, manifest, config["completions"], run, what="canary")
    where = str(Path(prompts[0]).parent)
    samples = tokenize(completions, engine, manifest, config["tokens"], where)
    verdict = judge(collect([samples]), settings, config["block_size"], chat.decode, where)
    failures = nothing_left(verdict, where) or verdict.failures
    layers: list[dict[str, float]] = []
    if not failures:
        layers, failures = _states(samples.table, manifest, run)
    close_gate(
        output,
        record,
        figures={"sources": verdict.figures, "layers": layers},
        limits={**verdict.limits, "mean_cosine": MEAN_COSINE},
        failures=failures,
        waived=verdict.waived,
    )


def choose(prompts: Sequence[str], count: int) -> list[dict[str, Any]]:
    """The first `count` prompts of every source by id, out of all shards. Ids are hashes, so they stand for the source."""
    where = {
        name: (source, path)
        for path in prompts
        for name, source in zip(*provenance.read_parquet(path, columns=["id", "source"]).to_pydict().values())
    }
    taken: dict[str, int] = defaultdict(int)
    chosen: dict[str, list[str]] = defaultdict(list)
    for name, (source, path) in sorted(where.items()):
        if taken[source] < count:
            taken[source] += 1
            chosen[path].append(name)
    rows: list[dict[str, Any]] = []
    for path, names in chosen.items():
        table = provenance.read_parquet(path)
        rows += table.filter(pc.is_in(table["id"], pa.array(names))).to_pylist()
    return rows


def _states(samples: pa.Table, manifest: Manifest, run: Mapping[str, Any]) -> tuple[list[dict[str, float]], list[str]]:
    from draftline.extraction import prepare
    from draftline.loading import load_model

    model = prepare(load_model(manifest, run, last_layer=manifest.num_layers - 2))
    return check_layers(model, manifest.num_layers - 1, probes(samples), where=manifest.model)


def probes(samples: pa.Table) -> dict[str, list[int]]:
    """Sample id -> input ids of up to `PROBES` short samples, each of another length, so that a batch of them is padded, or packed."""
    ids = Ragged.of(samples["input_ids"])
    by_length: dict[int, int] = {}
    for row in sorted(range(len(samples)), key=lambda row: int(ids.lengths[row])):
        by_length.setdefault(int(ids.lengths[row]), row)
    rows = list(by_length.values())[:PROBES]
    return {str(samples["id"][row]): ids[row][: PROBE_TOKENS - k * PROBE_STEP].tolist() for k, row in enumerate(rows)}


def check_layers(
    model: "nn.Module", layers: int, sequences: Mapping[str, list[int]], where: str
) -> tuple[list[dict[str, float]], list[str]]:
    """Figures and failures of decoder layers 0..`layers`-1 over a few sequences by sample id; `where` heads failures.

    Every layer must give finite states that are neither all zero nor the same for all tokens, and the same in a batch
    as alone. Figures per layer: those of `LayerStatistics`, and ``mean_cosine`` between a token's state in the batch and alone.
    """
    import torch

    from draftline.extraction import extract
    from draftline.layer_statistics import LayerStatistics, measure, refuse_broken

    ids, tokens = list(range(layers)), sum(map(len, sequences.values()))
    statistics, failures = LayerStatistics(len(sequences), layers), []
    cosines_K = torch.zeros(layers, dtype=torch.float64)
    batched = dict(extract(model, ids, list(sequences.values()), batch_tokens=PROBES * PROBE_TOKENS))
    for n, (name, sequence) in enumerate(sequences.items()):
        ((_, alone_TF),) = extract(model, ids, [sequence], batch_tokens=PROBE_TOKENS)
        figures_KM = measure(alone_TF, layers)
        statistics.add(n, figures_KM, alone_TF.numel() // layers)
        try:
            refuse_broken(figures_KM, ids, where, name)
        except DraftlineError as error:
            failures.append(str(error))
        alone_TKH, batched_TKH = (
            states_TF.double().view(len(sequence), layers, -1) for states_TF in (alone_TF, batched[n])
        )
        cosines_K += torch.cosine_similarity(alone_TKH, batched_TKH, dim=-1).sum(0).cpu() / tokens
    cosines = cosines_K.tolist()
    differing = [layer for layer in ids if not cosines[layer] >= MEAN_COSINE]
    if differing and not failures:
        failures.append(
            f"{where}: layer {differing[0]} gives other states in a batch than alone (mean cosine"
            f" {cosines[differing[0]]:.5f}, under {MEAN_COSINE}); look at the kernels in the log and at target.dtype"
        )
    figures = [{**values, "mean_cosine": cosine} for values, cosine in zip(statistics.by_layer(), cosines)]
    return [
        {"layer": n, **{k: float(f"{v:.4g}") for k, v in values.items()}} for n, values in enumerate(figures)
    ], failures
