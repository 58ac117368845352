"""A SLURM of our own for the tests, and runs of the tiny chain on it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest
from slurm_box import Box, until, why_not
from slurm_run import SlurmRun, slurm_run


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """The running cluster. Another test run on this machine waits for this one's to end."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with filelock.FileLock("/run/lock/draftline-slurm-tests.lock"):
        box = Box(tmp_path_factory.mktemp("slurm"))
        try:
            box.start()
            yield box
        finally:
            box.stop()


@pytest.fixture(scope="session")
def finished(box: Box, tmp_path_factory: pytest.TempPathFactory) -> SlurmRun:
    """An undisturbed local run up to the last segment of training."""
    run = slurm_run(tmp_path_factory.mktemp("local") / "run")
    run.snakemake("results/drafters/small/segments/2/state.safetensors")
    return run


@pytest.fixture
def fresh(box: Box, tmp_path: Path) -> Iterator[SlurmRun]:
    run = slurm_run(tmp_path / "run")
    yield run
    end(run)


@pytest.fixture
def run(finished: SlurmRun, tmp_path: Path) -> Iterator[SlurmRun]:
    """A copy of the finished run."""
    run = SlurmRun(finished.copy(tmp_path / "run").folder)
    yield run
    end(run)


def end(run: SlurmRun) -> None:
    """Leave nothing of a test behind, whatever became of it."""
    for snakemake in run.started:
        snakemake.kill()
        snakemake.wait()
    ids = [job for job, _, _ in run.jobs("PENDING", "RUNNING", "COMPLETING")]
    if ids:
        subprocess.run(["scancel", *ids], check=False)
        until(lambda: not run.jobs("PENDING", "RUNNING", "COMPLETING"), "the test's jobs ended")
    for partition in ("gpu", "cpu"):
        subprocess.run(["scontrol", "update", f"partition={partition}", "state=UP"], check=True)
