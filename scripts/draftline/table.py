"""The table that ends a run: accepted lengths of every drafter and baseline on every evaluation set."""

import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from draftline import provenance
from draftline.report.accepted import Accepted, Evaluation

CAPTION = (
    "tau: tokens per pass of the target, bonus token included [95% interval over prompts]\n"
    "DDTree-n: a tree of n drafted nodes instead of a chain. Bold: above untrained and unigram."
)


def accepted_lengths(report: str | Path) -> Accepted:
    """The evaluations that a report was made from."""
    paths = provenance.read(report)["inputs"]
    return Accepted.read(path for path in paths if path.startswith("results/evaluation/"))


def table(accepted: Accepted, narrow: bool = False) -> Table:
    """Rows: per evaluation set the drafters, then the baselines. Columns: chain and trees. `narrow` breaks cells in two lines."""
    ways = list(dict.fromkeys(way for bench in accepted.benches for way in accepted.ways(bench)))
    result = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), caption=CAPTION, caption_justify="left")
    result.add_column("tau", no_wrap=True)
    for way in ways:
        result.add_column(way, justify="right", no_wrap=True)
    for bench in accepted.benches:
        evaluations = accepted.of(bench)
        result.add_section()
        result.add_row(Text(f"{bench} ({evaluations[0].prompts})", style="dim"))
        for evaluation in evaluations:
            result.add_row(f"  {evaluation.drafter}", *(_cell(accepted, evaluation, way, narrow) for way in ways))
    return result


def _cell(accepted: Accepted, evaluation: Evaluation, way: str, narrow: bool) -> Text:
    if way not in evaluation.tau:
        return Text("-")
    text = str(evaluation.tau[way])
    style = "bold" if accepted.above_baselines(evaluation, way) else ""
    return Text(text.replace(" [", "\n[") if narrow else text, style=style)


def show(report: str | Path) -> None:
    """Print the table, as wide as it needs where the output is no terminal."""
    accepted = accepted_lengths(report)
    console = Console()
    wide = table(accepted)
    needed = Measurement.get(console, console.options.update(max_width=1000), wide).maximum
    if not sys.stdout.isatty():
        console = Console(width=max(needed, 120))
    console.print(table(accepted, narrow=True) if needed > console.width else wide)
