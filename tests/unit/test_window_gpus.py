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
from draftline import maintenance
from draftline.service import Service, gpu_holders, remember
service = Service("true", "true", "true", sys.argv[1] or None, 5, float(sys.argv[2]), 5)
family = service.family()
print("others before the stop:", *gpu_holders(own=[process.pid for process in family]), flush=True)


def wait(condition, seconds):
    return maintenance.wait(lambda: print("looking", flush=True) or condition(), seconds)


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
    process, _ = waiting(machine, seconds=120)
    for _ in range(3):  # It looks again as often as it was not content.
        assert process.stdout.readline() == "looking\n"
    machine.show(gpu(0), gpu(1))
    assert process.wait(120) == 0


LEFTOVER = """
import os, signal, time
def end(*_):
    os.replace("free.txt", "gpus.txt")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def leftover(machine: Machine) -> Iterator[subprocess.Popen[str]]:  # noqa: F811
    """A process whose memory is free when it has ended."""
    machine.show(gpu(0))
    machine.state.rename(machine.folder / "free.txt")
    command = [sys.executable, "-c", LEFTOVER]
    with subprocess.Popen(command, cwd=machine.folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        machine.show(gpu(0, used=47 * GIB), f"compute {process.pid} {47 * GIB}")
        yield process
        process.kill()


def test_a_leftover_of_the_service_on_a_gpu_is_ended(machine: Machine, leftover: subprocess.Popen[str]) -> None:  # noqa: F811
    process, others = waiting(machine, f"echo {leftover.pid}")
    assert others == ""
    leftover.wait(120)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert f"ending what is left of the service: process {leftover.pid} " in output


def test_another_process_on_a_gpu_is_named_and_left_alone(machine: Machine, sleeper: subprocess.Popen[bytes]) -> None:  # noqa: F811
    machine.show(gpu(0), gpu(1, used=47 * GIB), f"compute {sleeper.pid} {47 * GIB}")
    with subprocess.Popen(["sleep", "600"]) as service:
        process, others = waiting(machine, f"echo {service.pid}")
        assert service.wait(120) != 0
        _, errors = process.communicate()
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
