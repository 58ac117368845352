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

PLACES = {
    "completions": ("draftline.rows", "RowStore.add", 4),
    "hidden_states": ("draftline.states_writer", "StatesWriter.put", 3),
    "train_segment": ("draftline.drafter.train", "Trainer.train", 3),
}
"""Where a stage's job waits for the kill. It has something to lose there: rows, a file begun, or training steps."""


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


def kill(snakemake: subprocess.Popen, whom: str) -> None:
    if whom == "job":
        while snakemake.poll() is None:  # Jobs that it starts meanwhile too: they would wait for ever.
            end(psutil.Process(snakemake.pid).children(recursive=True))
            time.sleep(0.05)
        return
    family = psutil.Process(snakemake.pid).children(recursive=True)
    os.kill(snakemake.pid, signal.SIGKILL)
    if whom == "both":
        end(family)
    snakemake.wait()


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize("whom", ["job", "snakemake", "both"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_run_goes_on_and_ends_the_same(greedy, tmp_path, hold, stage, whom):
    run = greedy.copy(tmp_path / "run")
    undo(run, stage)
    rows = stored_rows(run)
    hold.at(stage, *PLACES[stage])
    snakemake = subprocess.Popen(
        run.command(*STAGES[stage]),
        cwd=run.folder,
        env=hold.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    hold.held(stage)
    kill(snakemake, whom)
    assert stored_rows(run) == (3 if stage == "completions" else rows)

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
