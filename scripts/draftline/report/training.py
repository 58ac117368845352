"""Training curves: results/drafters/*/segments/*/metrics.parquet, thinned to what a chart can show."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from draftline import provenance

POINTS = 80
MEASURES = {"loss": "Loss", "accuracy": "Accuracy", "tau": "Accepted length in training"}


@dataclass(frozen=True)
class Curve:
    """One measure over steps. Each point is a bin of steps: mean, and the 10th and 90th percentile of its steps."""

    steps: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Training:
    """A drafter's training. `ends` is the last step of every segment, by its number."""

    drafter: str
    steps: int
    epochs: int
    tokens: int
    anchors: int
    ends: dict[int, int]
    curves: dict[str, Curve]
    last: dict[str, float]


def trainings(paths: Iterable[str]) -> list[Training]:
    """Trainings by drafter, from the metrics of all segments."""
    segments: dict[str, dict[int, str]] = defaultdict(dict)
    for path in map(Path, paths):
        segments[path.parts[-4]][int(path.parent.name)] = str(path)
    return [_training(drafter, found) for drafter, found in segments.items()]


def _training(drafter: str, segments: dict[int, str]) -> Training:
    tables = {number: provenance.read_parquet(path) for number, path in sorted(segments.items())}
    columns = {
        name: np.concatenate([table[name].to_numpy().astype(np.float64) for table in tables.values()])
        for name in ("step", "epoch", "tokens", "anchors", *MEASURES)
    }
    tail = max(1, len(columns["step"]) // 20)
    return Training(
        drafter=drafter,
        steps=len(columns["step"]),
        epochs=len(np.unique(columns["epoch"])),
        tokens=int(columns["tokens"].sum()),
        anchors=int(columns["anchors"].sum()),
        ends={number: int(table["step"].to_numpy().max()) for number, table in tables.items() if len(table)},
        curves={name: thin(columns["step"], columns[name]) for name in MEASURES},
        last={name: float(columns[name][-tail:].mean()) if len(columns["step"]) else float("nan") for name in MEASURES},
    )


def thin(steps: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> Curve:
    """At most `POINTS` bins of equally many steps; values that are not finite are left out."""
    good = np.isfinite(values)
    bins = [chunk for chunk in np.array_split(np.flatnonzero(good), POINTS) if len(chunk)]
    return Curve(
        steps=np.array([steps[chunk].mean() for chunk in bins]),
        mean=np.array([values[chunk].mean() for chunk in bins]),
        low=np.array([np.quantile(values[chunk], 0.1) for chunk in bins]),
        high=np.array([np.quantile(values[chunk], 0.9) for chunk in bins]),
    )
