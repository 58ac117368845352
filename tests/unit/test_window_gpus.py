"""A window waits until NVML shows free GPUs, ends what is left of the service there, and names others untouched."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from test_gpus import library, machine  # noqa: F401 - fixtures

from gpu_world import GIB, SCRIPTS, Machine, gpu

WAIT = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from draftline.errors import DraftlineError
from draftline.maintenance import wait
from draftline.service import Service, gpu_holders, remember
service = Service("true", "true", "true", sys.argv[1] or None, 5, float(sys.argv[2]), 5)
family = service.family()
print("others before the stop:", *gpu_holders(own=[process.pid for process in family]), flush=True)
try:
    service.await_end(remember(family), wait)
except DraftlineError as error:
    sys.exit(str(error))
"""


def waiting(machine: Machine, processes: str = "", seconds: float = 1) -> tuple[subprocess.Popen[str], str]:  # noqa: F811
    """A process that waits for free GPUs after a stop, and whom it saw on them beside the service before."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT, processes, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=machine.folder,
        env=machine.environment,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().partition(":")[2].strip()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_memory_that_is_still_allocated_is_waited_for(machine: Machine) -> None:  # noqa: F811
    machine.show(gpu(0), gpu(1, used=47 * GIB))
    process, _ = waiting(machine, seconds=60)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    machine.show(gpu(0), gpu(1))
    assert process.wait(60) == 0


def test_a_leftover_of_the_service_on_a_gpu_is_ended(machine: Machine, sleeper: subprocess.Popen[bytes]) -> None:  # noqa: F811
    machine.show(gpu(0, used=47 * GIB), f"compute {sleeper.pid} {47 * GIB}")
    process, others = waiting(machine, f"echo {sleeper.pid}", seconds=5)
    assert others == ""
    sleeper.wait()
    machine.show(gpu(0))
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert f"ending what is left of the service: process {sleeper.pid} " in output


def test_another_process_on_a_gpu_is_named_and_left_alone(machine: Machine, sleeper: subprocess.Popen[bytes]) -> None:  # noqa: F811
    machine.show(gpu(0), gpu(1, used=47 * GIB), f"compute {sleeper.pid} {47 * GIB}")
    with subprocess.Popen(["sleep", "600"]) as service:
        process, others = waiting(machine, f"echo {service.pid}")
        _, errors = process.communicate()
        assert service.wait() != 0
    assert process.returncode == 1
    holder = f"GPU 1 is held by process {sleeper.pid} (sleep 600), 47.0 GiB of user "
    assert others.startswith(holder)
    assert holder in errors
    assert sleeper.poll() is None


def test_a_gpu_that_is_not_visible_is_nobodys_business(machine: Machine, sleeper: subprocess.Popen[bytes]) -> None:  # noqa: F811
    machine.show(gpu(0), gpu(1, used=47 * GIB), f"compute {sleeper.pid} {47 * GIB}")
    machine.environment["CUDA_VISIBLE_DEVICES"] = "0"
    process, _ = waiting(machine)
    assert process.wait() == 0
