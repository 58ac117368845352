"""The terminal's table has every measured tau with its interval, from the evaluations that the report was made from."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import report_artifacts as made
from draftline.report import page
from draftline.report.accepted import Accepted
from draftline.table import accepted_lengths, table

SCRIPT = Path(made.__file__).resolve().parent.parent / "scripts" / "table.py"


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Accepted:
    monkeypatch.chdir(tmp_path)
    inputs, config = made.make_run(made.Run(shards=1))
    record = made.record("report", "results/report.html", inputs.all())
    page.make_report(inputs, config, record, "results/report.html")
    return Accepted.read(inputs.evaluations)


def test_every_tau_is_printed_with_its_interval(report: Accepted) -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for evaluation in report.evaluations:
        if evaluation.segment is None:
            row = [str(tau) for tau in evaluation.tau.values()]
            lines = [line for line in done.stdout.splitlines() if all(cell in line for cell in row)]
            assert any(line.split()[0] == evaluation.drafter for line in lines), row
    head = next(line for line in done.stdout.splitlines() if "DDTree-8" in line)
    assert head.split()[-4:] == ["chain", "DDTree-8", "DDTree-16", "DDTree-32"]


def test_evaluations_of_an_earlier_config_are_left_out(report: Accepted) -> None:
    for path in Path("results/evaluation/demo").glob("*.json"):
        old = Path("results/evaluation/old") / path.name
        old.parent.mkdir(exist_ok=True)
        old.write_bytes(path.read_bytes())
    assert accepted_lengths("results/report.html").drafters == ["demo", "untrained", "unigram"]


def test_a_narrow_terminal_breaks_cells_and_not_numbers(report: Accepted) -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(table(report, narrow=True))
    text = console.export_text()
    assert all(len(line) <= 80 for line in text.splitlines())
    tau = report.of("humaneval")[0].tau["chain"]
    assert f"{tau.value:.2f}" in text
    assert f"[{tau.low:.2f}, {tau.high:.2f}]" in text


def test_without_a_report_it_says_how_to_get_one(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "table: results/report.html: no such file; make it with: snakemake results/report.html\n"
