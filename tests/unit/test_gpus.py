"""A job gets GPUs of its own, or says who holds them. NVML is a small library here, pynvml and the locks are real."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from draftline import gpus, settings
from draftline.errors import DraftlineError
from draftline.fingerprint import fingerprint
from draftline.gpus import Device
from gpu_world import GIB, SCRIPTS, Machine, build_library, gpu, uuid

AS_NOBODY = "import pynvml; pynvml.nvmlInit(); os.setgid(65534); os.setuid(65534)"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(tmp_path: Path, library: Path):
    """Two free GPUs. Jobs are ended afterwards."""
    made = Machine(tmp_path, library)
    made.show(gpu(0), gpu(1))
    yield made
    for job in made.jobs:
        job.end()


@pytest.fixture
def server():
    """A process of somebody else's."""
    with subprocess.Popen([sys.executable, "-c", "input()", "serve-something"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_two_jobs_lease_different_gpus_at_once(machine: Machine) -> None:
    first, second = machine.job(), machine.job()
    assert {first.devices(), second.devices()} == {uuid(0), uuid(1)}


def test_a_third_job_waits_for_one_to_end(machine: Machine) -> None:
    first, second = machine.job(), machine.job()
    freed = first.devices()
    second.devices()
    third = machine.job(patience=60)
    assert "1 GPU: GPU 0 is leased by completions results/completions/000" in third.read("completions: waiting for")
    first.end()
    assert third.devices() == freed


def test_a_third_job_that_waited_in_vain_names_the_holders(machine: Machine) -> None:
    jobs = [machine.job(), machine.job()]
    for job in jobs:
        job.devices()
    reason = machine.job().refusal()
    assert reason.startswith("needs 1 GPU, and 0 of 2 are free: ")
    for number, job in enumerate(jobs):
        assert f"completions results/completions/{number:04d}.parquet (process {job.process.pid} in " in reason
    assert reason.count("\n") == 2


def test_a_job_of_two_takes_both_or_none(machine: Machine) -> None:
    first = machine.job()
    first.devices()
    assert "needs 2 GPUs, and 1 of 2 are free" in machine.job(2).refusal()
    first.end()
    assert machine.job(2).devices() == f"{uuid(0)},{uuid(1)}"


@pytest.mark.parametrize(
    "then",
    ["", "os.fork() or sys.stdin.read()", "subprocess.Popen([sys.executable, '-c', 'input()'], close_fds=False)"],
    ids=["alone", "with a forked worker", "with a program that it started"],
)
def test_a_killed_job_holds_nothing(machine: Machine, then: str) -> None:
    machine.show(gpu(0))
    first = machine.job(then=then)
    first.devices()
    left = psutil.Process(first.process.pid).children()
    os.kill(first.process.pid, signal.SIGKILL)
    os.waitpid(first.process.pid, 0)
    try:
        assert all(process.is_running() for process in left)
        assert machine.job().devices() == uuid(0)
    finally:
        for process in left:
            process.kill()


def test_what_a_killed_job_left_on_its_gpu_is_named(machine: Machine) -> None:
    machine.show(gpu(0))
    first = machine.job(then="print('server', subprocess.Popen([sys.executable, '-c', 'input()']).pid)")
    server = int(first.read("server"))
    first.devices()
    first.end()
    machine.show(gpu(0, 40 * GIB), f"compute {server} {40 * GIB}")
    try:
        assert f"GPU 0 is held by process {server} ({sys.executable} -c input()), 40.0 GiB" in machine.job().refusal()
    finally:
        os.kill(server, signal.SIGKILL)


def test_a_gpu_with_a_foreign_process_is_skipped_and_named_if_no_other_is_free(machine: Machine, server) -> None:
    machine.show(gpu(0, 47 * GIB), f"compute {server.pid} {47 * GIB}", gpu(1))
    assert machine.job().devices() == uuid(1)
    reason = machine.job().refusal()
    assert f"GPU 0 is held by process {server.pid} (" in reason
    assert "serve-something), 47.0 GiB" in reason
    assert "GPU 1 is leased by completions" in reason


def test_a_process_that_only_draws_does_not_hold_a_gpu(machine: Machine, server) -> None:
    machine.show(gpu(0, 3 * GIB), f"graphics {server.pid} {3 * GIB}")
    assert machine.job().devices() == uuid(0)


def test_memory_without_a_process_holds_a_gpu(machine: Machine) -> None:
    machine.show(gpu(0, 47 * GIB))
    assert "GPU 0 is held by a process that cannot be seen from here (another container?), 47.0 GiB" in (
        machine.job().refusal()
    )


def test_a_lost_gpu_is_skipped(machine: Machine) -> None:
    machine.show(gpu(0), "lost", gpu(1))
    assert machine.job().devices() == uuid(1)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (None, ["0", "1", "2:0", "2:1"]),
        ("", []),
        ("1,0", ["1", "0"]),
        ("0,-1,1", ["0"]),
        ("NoDevFiles", []),
        ("0,0", ["0"]),
        ("GPU-1111", ["1"]),
        (uuid(1), ["1"]),
        ("2", ["2:0", "2:1"]),
        ("GPU-2222", ["2:0", "2:1"]),
        ("MIG-b", ["2:1"]),
    ],
)
def test_cuda_visible_devices_chooses(names: str | None, labels: list[str]) -> None:
    assert [device.label for device in gpus.visible(DEVICES, names)] == labels


@pytest.mark.parametrize(
    ("names", "message"),
    [("7", "7: no such GPU here"), ("GPU-", "fits several"), ("MIG-", "fits several"), ("first", "no such GPU here")],
)
def test_a_name_that_fits_no_gpu_or_several_is_refused(names: str, message: str) -> None:
    with pytest.raises(DraftlineError, match=message):
        gpus.visible(DEVICES, names)


DEVICES = [
    Device("0", uuid(0), "H200"),
    Device("1", uuid(1), "H200"),
    Device("2:0", "MIG-a", "H200 MIG", uuid(2)),
    Device("2:1", "MIG-b", "H200 MIG", uuid(2)),
]


def test_a_job_takes_of_what_cuda_visible_devices_names(machine: Machine) -> None:
    machine.show(gpu(0), gpu(1), gpu(2))
    assert machine.job(CUDA_VISIBLE_DEVICES="2,1").devices() == uuid(2)
    assert "needs 1 GPU, and 0 of 1 (CUDA_VISIBLE_DEVICES: GPU-2222) are free" in (
        machine.job(CUDA_VISIBLE_DEVICES="GPU-2222").refusal()
    )
    assert "needs 1 GPU, and there are 0 here (CUDA_VISIBLE_DEVICES: empty)" in (
        machine.job(CUDA_VISIBLE_DEVICES="").refusal()
    )


def test_mig_devices_are_leased_one_by_one_and_not_combined(machine: Machine, server) -> None:
    part = f"NVIDIA_H200_MIG_1g.18gb {18 * GIB}"
    machine.show(
        gpu(0, mig=True),
        f"part MIG-a {part} {GIB}",
        f"compute {server.pid} {GIB}",
        f"part MIG-b {part} 0",
        f"part MIG-c {part} 0",
    )
    assert "needs 2 GPUs, and there are 0 here; MIG devices cannot be combined" in machine.job(2).refusal()
    assert [machine.job().devices(), machine.job().devices()] == ["MIG-b", "MIG-c"]


def test_a_gpu_in_mig_mode_without_mig_devices_is_named(machine: Machine) -> None:
    machine.show(gpu(0, mig=True))
    assert "GPU 0 is in MIG mode, without MIG devices" in machine.job().refusal()


def test_no_driver_and_no_library_are_told(machine: Machine, tmp_path: Path) -> None:
    machine.state.unlink()
    assert "no NVIDIA driver answers here (Driver Not Loaded); see whether nvidia-smi works" in machine.job().refusal()
    assert "no NVIDIA driver answers here (NVML Shared Library Not Found)" in (
        machine.job(LD_LIBRARY_PATH=str(tmp_path)).refusal()
    )


def test_fewer_gpus_granted_than_needed_is_refused(machine: Machine) -> None:
    reason = machine.job(wanted=2, given=1).refusal()
    assert "needs 2 GPUs (run.device: cuda) and was given 1, the run's limit (resources: gpu)" in reason
    assert "--resources gpu=2" in reason


def test_a_job_that_needs_no_gpu_sees_none(machine: Machine) -> None:
    machine.state.unlink()
    assert machine.job(wanted=0).devices() == ""


def test_slurm_assigns(machine: Machine) -> None:
    machine.state.unlink()
    assert machine.job(SLURM_JOB_ID="7", CUDA_VISIBLE_DEVICES="3").devices() == "3"
    assert "needs 2 GPUs and SLURM gave job 7 1 on this node (CUDA_VISIBLE_DEVICES: 3)" in (
        machine.job(2, SLURM_JOB_ID="7", CUDA_VISIBLE_DEVICES="3").refusal()
    )
    assert "SLURM gave job 7 0 on this node (CUDA_VISIBLE_DEVICES: not set)" in machine.job(SLURM_JOB_ID="7").refusal()


def test_jobs_of_one_slurm_allocation_share_it_out_by_leases(machine: Machine) -> None:
    jobs = [machine.job(SLURM_JOB_ID="7", CUDA_VISIBLE_DEVICES="0,1") for _ in range(2)]
    assert {job.devices() for job in jobs} == {uuid(0), uuid(1)}


def test_a_symbolic_link_is_no_lock(machine: Machine, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    machine.leases.mkdir()
    (machine.leases / uuid(0)).symlink_to(precious)
    assert f"{machine.leases / uuid(0)}: no usable lock file" in machine.job().refusal()
    (machine.leases / uuid(0)).unlink()
    os.link(precious, machine.leases / uuid(0))
    assert "not a lock file of Draftline's" in machine.job().refusal()
    assert precious.read_text() == "content"
    shutil.rmtree(machine.leases)
    machine.leases.symlink_to(tmp_path)
    assert f"{machine.leases}: no place for GPU leases" in machine.job().refusal()


def test_users_of_a_machine_share_the_leases(library: Path) -> None:
    if os.getuid():
        pytest.skip("only root can start a job that becomes another user")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # Not tmp_path: pytest keeps that to its own user.
    folder.chmod(0o755)
    shared = folder / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    machine = Machine(folder, library)
    machine.environment["DRAFTLINE_GPU_LEASES"] = str(shared / "leases")
    machine.show(gpu(0), gpu(1))
    try:
        first = machine.job(first=AS_NOBODY)
        first_gpu = first.devices()
        second = machine.job()
        assert {first_gpu, second.devices()} == {uuid(0), uuid(1)}
        assert "is leased by completions results/completions/0001.parquet" in machine.job(first=AS_NOBODY).refusal()
        first.end(), second.end()
        for who in (AS_NOBODY, "", AS_NOBODY):
            job = machine.job(2, first=who)
            assert job.devices() == f"{uuid(0)},{uuid(1)}"
            job.end()
        assert (shared / "leases").stat().st_mode & 0o7777 == 0o1777
    finally:
        for job in machine.jobs:
            job.end()
        shutil.rmtree(folder)


COMMAND = """
import os, sys
sys.path.insert(0, {scripts!r})
from draftline.cli import Command, Job
command = Command("report", "A command.")
command.output("output")

def work(job: Job) -> None:
    from draftline import provenance
    seen = {{"devices": os.environ.get("CUDA_VISIBLE_DEVICES"), "nvml": "pynvml" in sys.modules}}
    provenance.write_json(job.output, seen, job.record)

command.run(work)
"""


@pytest.fixture
def command(machine: Machine):
    """Run a command with options of `run:`; gives what it saw, or its refusal."""
    path = settings.write({"rule": "report", "config": {}, "code": fingerprint("report")}, machine.folder / "report")
    script = machine.folder / "command.py"
    script.write_text(COMMAND.format(scripts=str(SCRIPTS)))

    def run(options: dict, given: int) -> dict | str:
        words = ["--settings", path, "--run", json.dumps(options), "--gpus", str(given), "--output", "out.json"]
        done = subprocess.run(
            [sys.executable, script, *words, "--log", "out.log"],
            cwd=machine.folder,
            env=machine.environment,
            capture_output=True,
            text=True,
        )
        return json.loads((machine.folder / "out.json").read_text()) if done.returncode == 0 else done.stderr

    return run


def test_a_command_on_the_gpu_leases_before_it_works(command) -> None:
    assert command({"device": "cuda", "gpus": 1}, given=1)["devices"] == uuid(0)


def test_a_command_that_was_given_no_gpu_refuses_in_a_line(command) -> None:
    reason = command({"device": "cuda", "gpus": 1}, given=0)
    assert reason.startswith("report: needs 1 GPU (run.device: cuda) and was given 0")
    assert reason.count("\n") == 1


def test_a_command_on_the_cpu_asks_no_nvml(command) -> None:
    seen = command({"device": "cpu"}, given=0)
    assert seen["devices"] is None
    assert not seen["nvml"]


def show(machine: Machine, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPTS / "gpus.py"],
        cwd=machine.folder,
        env=machine.environment | environment,
        capture_output=True,
        text=True,
    )


def test_the_table_shows_leases_and_foreign_processes(machine: Machine, server) -> None:
    machine.show(gpu(0), gpu(1), gpu(2), gpu(3))
    job = machine.job(then="print('child', subprocess.Popen([sys.executable, '-c', 'input()']).pid)")
    child = int(job.read("child"))
    job.devices()
    dead = machine.job()
    dead.devices()
    dead.end()
    machine.show(
        gpu(0, 90 * GIB),
        f"compute {child} {90 * GIB}",
        gpu(1),
        gpu(2, 47 * GIB),
        f"compute {server.pid} {47 * GIB}",
        gpu(3),
    )
    lines = show(machine, CUDA_VISIBLE_DEVICES="0,1,2").stdout.splitlines()
    text = " ".join(" ".join(lines).split())
    assert "90.0 / 140.0 GiB leased completions results/completions/0000.parquet, " in text
    assert f"pid {job.process.pid} in" in text
    assert f"pid {child}" not in text
    assert any(line.split()[:1] == ["1"] and line.split()[-1] == "free" for line in lines)
    assert (
        f"foreign pid {server.pid}, {psutil.Process().username()}: {sys.executable} -c input() serve-something" in text
    )
    assert "left out not in CUDA_VISIBLE_DEVICES" in text


def test_the_table_without_a_driver_says_so(machine: Machine) -> None:
    machine.state.unlink()
    done = show(machine)
    assert done.returncode == 1
    assert done.stderr == (
        "gpus: no NVIDIA driver answers here (Driver Not Loaded); see whether nvidia-smi works, or set run.device: cpu\n"
    )


def test_text_of_others_cannot_steer_a_terminal() -> None:
    assert gpus.plain("python\x1b[2J\nserve.py") == "python [2J serve.py"
