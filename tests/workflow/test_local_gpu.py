"""profiles/local-gpu lowers its limit to the free GPUs and says so; a run whose config and limit do not fit is told."""

import os
import re

import pytest

from gpu_world import GIB, Machine, build_library, gpu

LOCAL = ("--workflow-profile", "profiles/local-gpu")


@pytest.fixture
def machine(tmp_path) -> Machine:
    made = Machine(tmp_path, build_library(tmp_path))
    made.show(gpu(0), gpu(1, 47 * GIB), f"compute {os.getpid()} {47 * GIB}", gpu(2))
    return made


def test_the_limit_is_the_number_of_free_gpus(fresh, machine):
    fresh.edit("tiny.yaml", "run:\n", "run:\n  device: cuda\n")
    done = fresh.snakemake("results/benches/fresh/prompts.parquet", *LOCAL, env=machine.environment)
    assert "draftline: 2 of 3 GPUs here are free; GPU 1 is held by process " in done.stderr
    assert re.search(r"Provided resources: gpu\D+2\b", done.stderr)


def test_a_limit_without_gpus_is_told_and_the_job_refuses(run):
    run.edit("tiny.yaml", "run:\n", "run:\n  device: cuda\n")
    (run.folder / "results/evaluation/small/fresh.json").unlink()
    done = run.snakemake("results/evaluation/small/fresh.json", check=False)
    assert done.returncode != 0
    assert "run.device is cuda, a job of completions needs gpu=1, and jobs may hold gpu=0 together" in done.stderr
    assert "evaluate: needs 1 GPU (run.device: cuda) and was given 0, the run's limit (resources: gpu)" in done.stderr


def test_a_config_without_gpus_is_told(fresh, machine):
    assert (
        "run.device is cpu, so no job will use a GPU" in fresh.snakemake("-n", *LOCAL, env=machine.environment).stderr
    )


def test_no_driver_is_told_before_anything_runs(fresh, machine):
    machine.state.unlink()
    fresh.edit("tiny.yaml", "run:\n", "run:\n  device: cuda\n")
    done = fresh.snakemake("-n", *LOCAL, env=machine.environment)
    assert "draftline: no NVIDIA driver answers here (Driver Not Loaded)" in done.stderr
