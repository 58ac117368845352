"""The lock of a dead run is cleared, a living run's is not, and jobs of a dead run are ended."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import unlock

SLEEP = "import time; print('up', flush=True); time.sleep(120)"


@contextmanager
def living(folder: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that works in `folder` and has begun to."""
    values = {key: value for key, value in os.environ.items() if key != unlock.RUN_FILE} | environment
    with subprocess.Popen(command, cwd=folder, env=values, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            process.kill()


def lock(folder: Path) -> list[Path]:
    """The lock files as Snakemake 9 writes them."""
    place = folder / ".snakemake" / "locks"
    place.mkdir(parents=True, exist_ok=True)
    files = [place / "0.input.lock", place / "0.output.lock"]
    for file in files:
        file.write_text("results/target/manifest.json\n")
    return files


@pytest.fixture
def snakemake(tmp_path: Path) -> tuple[str, ...]:
    """A long-lived stand-in with Snakemake's command line: an interpreter and a script of that name."""
    script = tmp_path / "bin" / "snakemake"
    script.parent.mkdir()
    script.write_text(SLEEP)
    return sys.executable, str(script)


def test_lock_of_a_dead_run_is_cleared(tmp_path: Path) -> None:
    files = lock(tmp_path)
    assert unlock.unlock(tmp_path) is None
    assert not any(file.exists() for file in files)


def test_nothing_to_clear_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unlock.unlock(tmp_path) is None
    assert capsys.readouterr().out == ""


def test_lock_of_a_living_run_stays_and_names_it(tmp_path: Path, snakemake: tuple[str, ...]) -> None:
    with living(tmp_path, *snakemake) as process:
        files = lock(tmp_path)
        reason = unlock.unlock(tmp_path)
    assert reason is not None
    assert f"kill {process.pid}" in reason
    assert all(file.exists() for file in files)


def test_snakemake_in_another_folder_holds_nothing(tmp_path: Path, snakemake: tuple[str, ...]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with living(elsewhere, *snakemake):
        files = lock(tmp_path)
        assert unlock.unlock(tmp_path) is None
    assert not any(file.exists() for file in files)


def test_snakemake_younger_than_the_lock_does_not_hold_it(tmp_path: Path, snakemake: tuple[str, ...]) -> None:
    files = lock(tmp_path)
    for file in files:
        os.utime(file, (time.time() - 60, time.time() - 60))
    with living(tmp_path, *snakemake):  # A dry run, say: it takes no lock.
        assert unlock.unlock(tmp_path) is None
    assert not any(file.exists() for file in files)


def test_job_of_a_killed_run_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with living(tmp_path, sys.executable, "-c", SLEEP, DRAFTLINE_RUN="run.json") as process:
        assert unlock.unlock(tmp_path) is None
        assert not psutil.pid_exists(process.pid) or process.wait(5) != 0
    assert f"ending process {process.pid}" in capfd.readouterr().out


def test_command_started_by_hand_is_left_alone(tmp_path: Path) -> None:
    with living(tmp_path, sys.executable, "-c", SLEEP) as process:
        assert unlock.unlock(tmp_path) is None
        assert process.poll() is None


def test_job_under_slurm_is_left_to_the_next_run(tmp_path: Path) -> None:
    with living(tmp_path, sys.executable, "-c", SLEEP, DRAFTLINE_RUN="run.json", SLURM_JOB_ID="7") as process:
        assert unlock.unlock(tmp_path) is None
        assert process.poll() is None


def test_job_of_a_living_run_is_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "snakemake"
    script.parent.mkdir()
    script.write_text(
        "import os, subprocess, sys, time\n"
        f"job = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{**os.environ, 'DRAFTLINE_RUN': 'run.json'}})\n"
        "time.sleep(120)\n"
    )
    with living(tmp_path, sys.executable, str(script)) as process:
        (job,) = psutil.Process(process.pid).children()
        try:
            assert unlock.unlock(tmp_path) is None
            assert job.is_running()
        finally:
            job.kill()


def test_script_says_who_holds_the_lock_and_exits_with_1(tmp_path: Path, snakemake: tuple[str, ...]) -> None:
    with living(tmp_path, *snakemake):
        lock(tmp_path)
        done = subprocess.run([sys.executable, unlock.__file__], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("draftline: .snakemake/locks: Snakemake (process ")
    assert "Traceback" not in done.stderr
