"""A machine with made-up GPUs, for the tests of the lease and of the preflight."""

import shutil
import subprocess
from pathlib import Path

import pytest

from gpu_world import Machine, gpu


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fake_nvml.c as libnvidia-ml.so.1."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (gcc, cc) to build the NVML library of these tests")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


@pytest.fixture
def machine(tmp_path: Path, library: Path):
    """Two free GPUs. Jobs are ended afterwards."""
    made = Machine(tmp_path, library)
    made.show(gpu(0), gpu(1))
    yield made
    for job in made.jobs:
        job.end()
