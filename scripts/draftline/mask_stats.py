"""Statistics of the loss mask: a row a sample, how often each token is a label, and the picture of both."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from draftline import provenance
from draftline.tokens import Ragged, mask_sums, read_samples, supervised

MASK_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("status", pa.string()),
        ("shard", pa.int32()),
        ("length", pa.int32()),
        ("mask_sum", pa.int32()),
        ("finished", pa.bool_()),
    ]
)
LABELS_SCHEMA = pa.schema([("token", pa.int32()), ("count", pa.int64())])

BINS = 60
INK, FINISHED, CUT = "#333333", "#2a6f97", "#e9a15b"


def make_stats(tokens: Sequence[str], mask: str, labels: str, picture: str, record: provenance.Record) -> None:
    """All of tokens/ -> stats/mask.parquet, stats/tokens.parquet, stats/mask.png."""
    tables, counts = [], np.zeros(0, np.int64)
    for path in tokens:
        table = read_samples(path).table
        tables.append(_mask_table(table, int(Path(path).stem)))
        ids, chosen = supervised(table)
        found = np.bincount(ids[chosen])
        counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
        counts[: len(found)] += found
    masks = pa.concat_tables(tables)
    seen = np.flatnonzero(counts)
    provenance.write_parquet(mask, masks, record)
    provenance.write_parquet(labels, pa.table([seen.astype(np.int32), counts[seen]], schema=LABELS_SCHEMA), record)
    draw(masks, picture, record)


def _mask_table(samples: pa.Table, shard: int) -> pa.Table:
    columns = {name: samples[name] for name in ("id", "source", "status", "finished")}
    columns["shard"] = pa.array(np.full(len(samples), shard, np.int32))
    columns["length"] = pa.array(Ragged.of(samples["input_ids"]).lengths)
    columns["mask_sum"] = pa.array(mask_sums(samples["spans"]))
    return pa.table([columns[name] for name in MASK_SCHEMA.names], schema=MASK_SCHEMA)


def draw(masks: pa.Table, path: str, record: provenance.Record) -> None:
    """Histogram of mask sums, a panel a source; cut rows in another colour. Equal tables give equal bytes."""
    import matplotlib.style
    from matplotlib.figure import Figure

    sources = sorted(pc.unique(masks["source"]).to_pylist())
    top = max(pc.max(masks["mask_sum"]).as_py() or 0, BINS)
    width = -(-top // BINS)  # A whole number, so that every bar stands for as many values as the next.
    edges = np.arange(0, top + width + 1, width) - 0.5
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(8, 0.9 + 1.15 * max(len(sources), 1)), dpi=120, layout="constrained")
        panels = figure.subplots(max(len(sources), 1), 1, sharex=True, squeeze=False)[:, 0]
        for panel, source in zip(panels, sources):
            _panel(panel, masks.filter(pc.equal(masks["source"], source)), source, edges)
        panels[-1].set_xlim(0, edges[-1])
        panels[-1].set_xlabel("supervised tokens of a sample", color=INK, fontsize=9)
        if sources:
            handles = panels[0].get_legend_handles_labels()
            figure.legend(*handles, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
        with provenance.replacing(path) as temporary:
            facts = {provenance.KEY: json.dumps(record, sort_keys=True), "Software": None}
            figure.savefig(temporary, format="png", metadata=facts)


def _panel(panel: Any, rows: pa.Table, source: str, edges: np.ndarray[Any, Any]) -> None:
    sums = rows["mask_sum"].to_numpy()
    finished = np.asarray(rows["finished"].to_pylist(), bool)
    panel.hist(
        [sums[finished], sums[~finished]],
        bins=edges,
        stacked=True,
        color=[FINISHED, CUT],
        label=["stopped by itself", "cut by length"],
    )
    panel.set_title(f"{source}, n = {len(sums):,}", loc="left", fontsize=9, color=INK)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.locator_params(axis="y", nbins=3, integer=True)
    panel.tick_params(colors=INK, labelsize=8, length=2)
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
