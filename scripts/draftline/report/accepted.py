"""Accepted lengths: results/evaluation/ as the report and the terminal's table need them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from draftline import provenance
from draftline.errors import DraftlineError

BASELINES = ("untrained", "unigram")


@dataclass(frozen=True)
class Tau:
    """Mean accepted length per round, bonus token included, with its 95% confidence interval over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Evaluation:
    """One drafter on one evaluation set. `segment` is the checkpoint's, None for the finished drafter.

    `tau` is by way of verifying: ``chain``, then ``DDTree-{budget}``, budgets ascending. `per_position[k - 1]` is the share of
    rounds whose chain accepts slot k.
    """

    drafter: str
    bench: str
    segment: int | None
    prompts: int
    rounds: int
    tau: dict[str, Tau]
    per_position: list[float]
    looping_share: float
    harness: dict[str, Any]

    @property
    def baseline(self) -> bool:
        return self.drafter in BASELINES


def read_evaluation(path: str | Path) -> Evaluation:
    """Read an evaluation's JSON. DraftlineError with the path when it is damaged or lacks a key."""
    provenance.read(path)
    path = Path(path)
    values = orjson.loads(path.read_bytes())
    try:
        budgets = sorted(values["ddtree"], key=int)
        ways = {"chain": values["chain"], **{f"DDTree-{budget}": values["ddtree"][budget] for budget in budgets}}
        return Evaluation(
            drafter=values["drafter"],
            bench=values["bench"],
            segment=int(path.parent.name) if path.parent.parent.name == "checkpoints" else None,
            prompts=values["prompts"],
            rounds=values["rounds"],
            tau={name: Tau(way["tau"], *way["ci95"]) for name, way in ways.items()},
            per_position=values["chain"]["per_position"],
            looping_share=values["looping_share"],
            harness=values["harness"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DraftlineError(
            f"{path}: not an evaluation of this version ({error!r}); delete it and run again"
        ) from None


@dataclass(frozen=True)
class Accepted:
    """All evaluations of a run. `drafters` has the trained ones first, as the config lists them, then the baselines."""

    evaluations: list[Evaluation]

    @classmethod
    def read(cls, paths: Iterable[str]) -> "Accepted":
        return cls([read_evaluation(path) for path in paths])

    @property
    def benches(self) -> list[str]:
        return list(dict.fromkeys(evaluation.bench for evaluation in self.evaluations))

    @property
    def trained(self) -> list[str]:
        return list(dict.fromkeys(e.drafter for e in self.evaluations if not e.baseline))

    @property
    def drafters(self) -> list[str]:
        found = {evaluation.drafter for evaluation in self.evaluations}
        return [*self.trained, *(name for name in BASELINES if name in found)]

    def ways(self, bench: str) -> list[str]:
        """Ways of verifying that an evaluation set was measured with."""
        return list(dict.fromkeys(way for e in self.of(bench) for way in e.tau))

    def of(self, bench: str) -> list[Evaluation]:
        """A set's finished drafters and baselines, in the order of `drafters`."""
        found = [e for e in self.evaluations if e.bench == bench and e.segment is None]
        return sorted(found, key=lambda e: self.drafters.index(e.drafter))

    def course(self, drafter: str, bench: str, last: int) -> list[tuple[int, Evaluation]]:
        """(segment, evaluation) of a drafter's checkpoints, and of the finished drafter as segment `last`."""
        found = [e for e in self.evaluations if (e.drafter, e.bench) == (drafter, bench)]
        by_segment = {e.segment or last: e for e in sorted(found, key=lambda e: e.segment is None)}
        return sorted(by_segment.items())

    def above_baselines(self, evaluation: Evaluation, way: str) -> bool:
        """Whether a trained drafter's interval lies above those of all baselines on its set."""
        lows = [e.tau[way].high for e in self.of(evaluation.bench) if e.baseline and way in e.tau]
        return not evaluation.baseline and bool(lows) and evaluation.tau[way].low > max(lows)
