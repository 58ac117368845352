"""A machine with made-up GPUs: NVML's library of fake_nvml.c behind the real pynvml, and jobs that lease from it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
GIB = 2**30
JOB = """
import os, subprocess, sys
sys.path.insert(0, {scripts!r})
from draftline import gpus, progress
from draftline.errors import DraftlineError
progress.terminal = sys.stdout
{first}
gpus.PATIENCE, gpus.SETTLING = {patience}, 0.0
try:
    gpus.lease({wanted}, {given}, "completions", {output!r})
except DraftlineError as error:
    sys.exit(str(error))
{then}
print("CUDA_VISIBLE_DEVICES", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
sys.stdin.read()
"""


def build_library(folder: Path) -> Path:
    """fake_nvml.c as libnvidia-ml.so.1; without a C compiler the test is skipped."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (gcc, cc) to build the NVML library of these tests")
    path = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


class Job:
    """A process that leases GPUs and keeps them until it is ended."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process
        self.lines: list[str] = []

    def read(self, start: str) -> str:
        """The rest of the next line that starts with `start`."""
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(start):
                return line[len(start) :].strip()
        raise AssertionError(f"no line {start!r}: {self.lines} {self.process.stderr.read()}")

    def devices(self) -> str:
        """CUDA_VISIBLE_DEVICES as the job set it."""
        return self.read("CUDA_VISIBLE_DEVICES")

    def refusal(self) -> str:
        """What the job ends with when it gets no GPU."""
        _, text = self.process.communicate()
        assert self.process.returncode == 1, text
        return text

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Machine:
    """GPUs as `fake_nvml.c` reads them, a folder of leases, and an environment that shows a process both."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder, self.state, self.leases = folder, folder / "gpus.txt", folder / "leases"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "SLURM_"))},
            "LD_LIBRARY_PATH": str(library.parent),
            "FAKE_NVML": str(self.state),
            "DRAFTLINE_GPU_LEASES": str(self.leases),
        }
        self.jobs: list[Job] = []

    def show(self, *lines: str) -> None:
        """Replace what NVML shows, at once: a job may look at any time."""
        new = self.state.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.state)

    def job(
        self, wanted: int = 1, given: int | None = None, patience: float = 0, first: str = "", then: str = "", **how
    ) -> Job:
        """Start a job. `first` and `then` run in it before and after it gets GPUs; `how` are variables of its environment."""
        script = JOB.format(
            scripts=str(SCRIPTS),
            patience=patience,
            wanted=wanted,
            given=wanted if given is None else given,
            output=f"results/completions/{len(self.jobs):04d}.parquet",
            first=first,
            then=then,
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment | how,
        )
        self.jobs.append(Job(process))
        return self.jobs[-1]


def gpu(number: int, used: int = 0, mig: bool = False) -> str:
    """A line for `Machine.show`: an H200 with a UUID that begins with its number."""
    return f"gpu GPU-{number}{number}{number}{number}aaaa-0000 NVIDIA_H200 {140 * GIB} {used} {int(mig)}"


def uuid(number: int) -> str:
    return f"GPU-{number}{number}{number}{number}aaaa-0000"
