"""A run whose job, whose Snakemake, or both are killed with SIGKILL goes on afterwards and ends with the same artifacts."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_run import Run

STAGES = {
    "completions": ["results/completions/0000.parquet"],
    "hidden_states": [f"results/hidden_states/0000/{part}.safetensors" for part in ("0000", "0001")],
    "train_segment": [
        "results/drafters/small/model/model.safetensors",
        "results/drafters/small/segments/1/metrics.parquet",
        "results/drafters/small/segments/2/metrics.parquet",
        "results/drafters/small/segments/2/state.safetensors",
    ],
}
"""What a stage makes; with equal bytes, whatever stands behind it is equal too."""


@pytest.fixture(scope="module")
def greedy(finished, tmp_path_factory) -> Run:
    """The finished run at temperature 0, where equal work gives equal bytes."""
    run = finished.copy(tmp_path_factory.mktemp("greedy") / "run")
    run.edit("tiny.yaml", "sampling: {temperature: 1.0}", "sampling: {temperature: 0}")
    run.snakemake(*STAGES["train_segment"])
    return run


def undo(run: Run, stage: str) -> None:
    """Take away what the stage made, the row store included."""
    made = {"completions": "completions", "hidden_states": "hidden_states", "train_segment": "drafters"}
    shutil.rmtree(run.folder / "results" / made[stage])
    shutil.rmtree(run.folder / "results/logs")
    if stage == "completions":
        shutil.rmtree(run.folder / "results/.resume/rows")


def wait_for_work(run: Run, stage: str) -> None:
    """Until the stage has something to lose: a finished row, a temporary file, or a training checkpoint or log."""
    signs = {
        "completions": ".resume/rows/**/*.jsonl",
        "hidden_states": "logs/hidden_states/*.log",
        "train_segment": "logs/train_segment/*.log",
    }
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in (run.folder / "results").glob(signs[stage])):
        assert time.monotonic() < deadline, f"{stage} did not start"
        time.sleep(0.02)


def kill(snakemake: subprocess.Popen, whom: str) -> None:
    family = psutil.Process(snakemake.pid).children(recursive=True)
    if whom in ("snakemake", "both"):
        os.kill(snakemake.pid, signal.SIGKILL)
    if whom in ("job", "both"):
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    snakemake.wait()


@pytest.mark.parametrize("whom", ["job", "snakemake", "both"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_run_goes_on_and_ends_the_same(greedy, tmp_path, stage, whom):
    run = greedy.copy(tmp_path / "run")
    undo(run, stage)
    snakemake = subprocess.Popen(
        run.command(*STAGES[stage]), cwd=run.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_work(run, stage)
    rows = stored_rows(run)
    kill(snakemake, whom)
    assert stored_rows(run) >= rows

    subprocess.run([sys.executable, "scripts/unlock.py"], cwd=run.folder, check=True)
    run.snakemake(*STAGES[stage])
    for path in STAGES[stage]:
        assert (run.folder / path).read_bytes() == (greedy.folder / path).read_bytes(), path
    if stage == "completions":
        assert sorted(row_keys(run)) == sorted(set(row_keys(run))), "a finished row was generated twice"


def stored_rows(run: Run) -> int:
    return len(row_keys(run))


def row_keys(run: Run) -> list[bytes]:
    files: list[Path] = sorted((run.folder / "results/.resume/rows").rglob("*.jsonl"))
    return [line for file in files for line in file.read_bytes().split()]
