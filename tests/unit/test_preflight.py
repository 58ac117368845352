"""A node is looked at once, by probes that may hang or crash; what is off is named, and the node is left out until it is mended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from draftline import preflight, settings
from draftline.errors import DraftlineError
from draftline.fingerprint import fingerprint
from draftline.gpus import Device
from draftline.preflight import Load, look, refuse
from draftline.preflight.limits import DENSE_BF16, checks
from draftline.preflight.measure import Probe, await_probes
from draftline.preflight.scene import Scene, describe, mount_point, node_name
from gpu_world import Machine, build_library, gpu, uuid

SCRIPTS = Path(preflight.__file__).resolve().parent.parent.parent
LIMITS = {
    "gemm_share": 0.4,
    "gemm_peer_share": 0.7,
    "memory_free_share": 0.8,
    "disk_write_mb_s": 0.1,
    "disk_read_mb_s": 0.1,
    "timeout_s": 120,
}
LAX = LIMITS | {"gemm_peer_share": 0.001}
"""For rates that are measured on a machine with other work."""
SMALL = Load(on="cpu", size=64, seconds=0.05, megabytes=1, rounds=2)
NO_TIME = LAX | {"timeout_s": 0.01}
"""Too little for any probe: what passes with it was not measured."""


def scene_of(*uuids, node="gpu1", kind="a CPU", versions=None):
    devices = tuple(Device(str(index), uuid, kind) for index, uuid in enumerate(uuids))
    return Scene(node, "580.1", devices, versions or {"torch": "2"}, {mount_point("results"): "results"})


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# Probes ---------------------------------------------------------------------------------------------------------------


def device_probe(folder=None, **arguments):
    every = {"device": "cpu", "size": 64, "seconds": 0.05, "modules": []}
    return Probe("device", every | arguments, {"PYTHONPATH": str(folder)} if folder else None)


def test_figures_of_a_device_and_a_disk(tmp_path):
    (tmp_path / "kernel.py").write_text("import os; print('{}'); os.write(1, b'{\"figures\": 1}')")
    disk_folder = tmp_path / "disk"
    disk_folder.mkdir()
    probes = [device_probe(tmp_path, modules=["kernel"]), Probe("disk", {"folder": str(disk_folder), "megabytes": 32})]
    device, disk = await_probes(probes, 120)
    assert device["tflops"] > 0, "what a package prints is not taken for an answer"
    assert disk["write_mb_s"] > 0
    assert disk["read_mb_s"] > 0
    assert not list(disk_folder.iterdir())


def test_a_probe_that_hangs_is_ended_and_named():
    probe = device_probe(seconds=3600)
    (answer,) = await_probes([probe], 5)
    assert answer["error"].endswith(": no answer within 5 s")
    assert probe.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.abort()", "import kernel: ended by SIGABRT"),
        ("raise ImportError('libcudart.so.12: not found')", "import kernel: ImportError: libcudart.so.12: not found"),
    ],
)
def test_a_package_that_crashes_or_fails_is_named(tmp_path, code, error):
    (tmp_path / "kernel.py").write_text(code)
    (answer,) = await_probes([device_probe(tmp_path, modules=["kernel"])], 120)
    assert answer == {"error": error, "stage": "import kernel"}


def test_a_disk_that_cannot_be_written_is_an_error(tmp_path):
    (answer,) = await_probes([Probe("disk", {"folder": str(tmp_path / "none"), "megabytes": 1})], 120)
    assert "No such file or directory" in answer["error"]


def test_a_probe_ends_with_a_killed_parent():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from draftline.preflight.measure import Probe, await_probes\n"
        "probe = Probe('device', {'device': 'cpu', 'size': 64, 'seconds': 3600, 'modules': []})\n"
        "print(probe.process.pid, flush=True)\n"
        "await_probes([probe], 3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(SCRIPTS)], stdout=subprocess.PIPE, text=True) as parent:
        probe = psutil.Process(int(parent.stdout.readline()))
        while not any("libtorch" in file.path for file in probe.memory_maps()):
            time.sleep(0.1)  # It has asked to end with its parent by then.
        parent.kill()
    try:
        probe.wait(120)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            probe.kill()


def ranks(tmp_path, *devices):
    common = {"world": len(devices), "store": str(tmp_path / "store"), "megabytes": 1, "rounds": 2}
    return [Probe("all_reduce", {"device": device, "rank": i, **common}) for i, device in enumerate(devices)]


def test_a_rank_that_dies_ends_the_others_and_is_the_one_named(tmp_path):
    well, ill = await_probes(ranks(tmp_path, "cpu", "nowhere"), 120, together=True)
    assert well["stopped"]
    assert "stopped" not in ill
    assert "nowhere" in ill["error"]


# Verdicts -------------------------------------------------------------------------------------------------------------

GOOD = {"tflops": 790, "memory_free_mb": 143000, "memory_total_mb": 143771}


def problems(figures, rates=None, kind="NVIDIA H200", limits=LIMITS, part="GPU-0"):
    scene = replace(scene_of("GPU-0", "GPU-1", kind=kind), folders={"/data": "results"})
    return [check.problem for check in checks(scene, {part: figures}, limits, {kind: rates or {}}) if check.problem]


@pytest.mark.parametrize(
    ("figures", "more", "problem"),
    [
        ({}, {}, None),
        ({"tflops": 396}, {}, None),
        ({"tflops": 395}, {}, "matrix products at 395 TFLOP/s, limit 396 (0.4 of the data sheet's 989)"),
        ({"tflops": 500}, {"rates": {"GPU-1": 780, "b": 800, "c": 790}}, "limit 553 (0.7 of the median of 3 others)"),
        ({"tflops": 395}, {"limits": LIMITS | {"gemm_share": 0}}, None),
        ({"tflops": 1}, {"kind": "a new card"}, None),
        ({"tflops": 1}, {"kind": "a new card", "rates": {"GPU-0": 100}}, None),
        ({"tflops": 69}, {"kind": "a new card", "rates": {"GPU-1": 100}}, "limit 70 (0.7 of the median of 1 others)"),
        ({"tflops": 71}, {"kind": "a new card", "rates": {"GPU-1": 100}}, None),
        ({"memory_free_mb": 96000}, {}, "only 96000 of 143771 MB are free, limit 115017"),
    ],
)
def test_a_gpu_is_held_against_its_data_sheet_and_its_like(figures, more, problem):
    found = problems(GOOD | figures, **more)
    assert problem in found[0] if problem else not found


def test_a_slow_disk_and_a_failed_step_are_problems():
    disk = {"folder": "/data/results", "write_mb_s": 0.09, "read_mb_s": 900}
    assert "written at 0.09 MB/s, limit 0.1" in problems(disk, part="/data")[0]
    failed = {"error": "GPU-1: all-reduce: no answer within 300 s", "stage": "all-reduce"}
    assert problems(failed, part="GPU-0 GPU-1")[0].startswith("GPU-1: all-reduce: no answer within 300 s; look at")


def test_mig_devices_are_not_held_against_the_whole_card():
    assert not any("MIG" in kind for kind in DENSE_BF16)
    assert not problems(GOOD | {"tflops": 60}, kind="NVIDIA H200 MIG 1g.18gb")


# Records --------------------------------------------------------------------------------------------------------------


def test_a_good_node_is_looked_at_once():
    first = look(scene_of("GPU-0", "GPU-1"), LAX, load=SMALL)
    assert not first.problems
    assert [*first.figures] == [mount_point("results"), "GPU-0", "GPU-1", "GPU-0 GPU-1"]
    assert first.figures["GPU-0 GPU-1"]["gb_s"] > 0
    (path,) = preflight.ROOT.glob("*.json")
    assert path.name == "gpu1-580.1-a_CPU.json"
    record = json.loads(path.read_text())
    assert record["verdict"] == "passed"
    assert record["limits"] == LAX
    assert record["figures"] == first.figures
    assert look(scene_of("GPU-0", "GPU-1"), NO_TIME).figures == first.figures
    assert look(scene_of("GPU-1"), NO_TIME).figures["GPU-1"] == first.figures["GPU-1"]


def test_another_device_is_looked_at_alone_and_a_new_torch_at_all_devices():
    first = look(scene_of("GPU-0"), LAX, load=SMALL)
    second = look(scene_of("GPU-1"), LAX, load=SMALL)
    assert [*second.figures] == [mount_point("results"), "GPU-1"]
    assert second.figures[mount_point("results")] == first.figures[mount_point("results")]
    assert not look(scene_of("GPU-0"), NO_TIME).problems
    assert look(scene_of("GPU-0", versions={"torch": "3"}), NO_TIME).problems
    assert look(replace(scene_of("GPU-0"), driver="590.2"), NO_TIME).problems
    assert look(scene_of("GPU-0", node="gpu2"), NO_TIME).problems


def test_a_recorded_figure_is_held_against_the_limits_and_the_cards_of_today():
    look(scene_of("GPU-0"), LAX, load=SMALL)
    (path,) = preflight.ROOT.glob("*.json")
    record = json.loads(path.read_text())
    record["figures"]["GPU-0"]["tflops"] = 1e-9
    path.write_text(json.dumps(record))
    assert not look(scene_of("GPU-0"), NO_TIME).problems, "alone, it is as good as any"
    other = {"kind": "a CPU", "versions": {}, "tflops": 1.0}
    (preflight.ROOT / "gpu2-580.1-a_CPU.json").write_text(json.dumps({"node": "gpu2", "figures": {"GPU-1": other}}))
    report = look(scene_of("GPU-0"), NO_TIME)
    assert "no answer" in report.problems[0].problem, "slow beside another: measured again"


def test_a_bad_device_is_refused_until_it_is_seen_to_be_mended():
    ill = scene_of("GPU-0", kind="NVIDIA H200")
    report = look(ill, LAX, load=SMALL)
    bad = preflight.BAD / "gpu1.json"
    assert json.loads(bad.read_text())["reason"].startswith("GPU 0 (GPU-0, NVIDIA H200): matrix products at ")
    lines = preflight.verdict(report)
    assert lines[0].startswith("node gpu1: failed its preflight: GPU 0 (GPU-0, NVIDIA H200): matrix products at ")
    assert "limit 396 (0.4 of the data sheet's 989)" in lines[0]
    assert str(bad) in lines[1]
    with pytest.raises(DraftlineError, match=r"node gpu1: failed its preflight on .*GPU-0"):
        refuse(ill)
    refuse(scene_of("GPU-1"))
    well = LAX | {"gemm_share": 0}
    assert not look(ill, well, load=SMALL).problems
    assert bad.exists(), "a card that is well now and then is a bad one"
    look(scene_of("GPU-1"), well, again=True, load=SMALL)
    assert bad.exists(), "another card is no proof"
    look(ill, well, again=True, load=SMALL)
    assert not bad.exists()
    refuse(ill)


def test_a_slow_disk_is_the_whole_nodes():
    assert look(scene_of("GPU-0"), LAX | {"disk_read_mb_s": 1e9}, load=SMALL).problems
    with pytest.raises(DraftlineError, match=r"read back at .* MB/s, limit 1e\+09"):
        refuse(scene_of("GPU-1"))


def test_broken_packages_count_against_a_node_only_if_they_work_on_another():
    versions = {"torch": "2", "fla": "0"}
    broken = scene_of("GPU-0", versions=versions)
    report = look(broken, LAX, load=SMALL)
    assert "import fla" in report.problems[0].problem
    assert not preflight.BAD.exists()
    assert "Not held against the node" in preflight.verdict(report)[1]
    other = {"kind": "a CPU", "versions": versions, "tflops": 1.0}
    (preflight.ROOT / "gpu2-580.1-a_CPU.json").write_text(json.dumps({"node": "gpu2", "figures": {"GPU-9": other}}))
    look(broken, LAX, load=SMALL)
    assert (preflight.BAD / "gpu1.json").exists()


def test_jobs_that_start_at_once_look_once():
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_preflight as t, logging; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "assert not t.look(t.scene_of('GPU-0'), t.LAX, load=t.SMALL).problems\n"
    )
    command = [sys.executable, "-c", code, str(SCRIPTS), *map(str, Path(__file__).parents[:2])]
    jobs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [job.communicate()[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], said
    assert "".join(said).count("preflight of node gpu1: 1 x a CPU") == 1


def test_a_torn_record_is_named():
    preflight.ROOT.mkdir(parents=True)
    (preflight.ROOT / "gpu1-580.1-a_CPU.json").write_text("{")
    with pytest.raises(DraftlineError, match=r"gpu1-580\.1-a_CPU\.json: not a preflight record"):
        look(scene_of("GPU-0"), LAX, load=SMALL)


# The scene ------------------------------------------------------------------------------------------------------------


def test_the_node_has_its_name_in_slurm(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu7")
    assert node_name() == "gpu7"


def test_kernels_for_linear_attention_matter_to_a_target_that_has_it(tmp_path, monkeypatch):
    info = tmp_path / "flash_linear_attention-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-linear-attention\nVersion: 1.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    manifest = tmp_path / "manifest.json"
    for layers, installed in ((["full_attention"], None), (["linear_attention", "full_attention"], "1.5")):
        manifest.write_text(json.dumps({"layer_types": layers}))
        assert describe("1", [], str(manifest)).versions.get("fla") == installed


def test_scratch_and_results_on_one_file_system_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert describe("1", []).folders == {mount_point("results"): "results"}
    if os.path.ismount("/dev/shm"):
        monkeypatch.setenv("TMPDIR", "/dev/shm")
        assert describe("1", []).folders == {"/dev/shm": "/dev/shm", mount_point("results"): "results"}


def test_without_a_gpu_the_script_says_so_in_one_line():
    done = subprocess.run(
        [sys.executable, SCRIPTS / "preflight.py"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("preflight: ")
    assert done.stderr.count("\n") == 1


# In a job -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path):
    """Two free GPUs that only NVML shows. Jobs are ended afterwards."""
    made = Machine(tmp_path, build_library(tmp_path))
    made.show(gpu(0), gpu(1))
    yield made
    for process in made.jobs:
        process.end()


def job(machine: Machine, **how: object) -> subprocess.CompletedProcess:
    """A command that wants one GPU, on a machine whose driver shows GPUs and whose torch is the CPU's."""
    values = {"rule": "report", "config": {}, "code": fingerprint("report")}
    path = settings.write(values, machine.folder / "settings" / "report")
    run = {"device": "cuda", "gpus": 1, "preflight": LAX}
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from draftline.cli import Command\n"
        "command = Command('report', 'A command.')\n"
        "command.output('output')\n"
        "command.run(lambda job: open(job.output, 'w').close())\n"
    )
    options = ["--settings", path, "--output", "out", "--gpus", "1", "--run", json.dumps(run)]
    return subprocess.run(
        [sys.executable, "-c", code, SCRIPTS, *options],
        cwd=machine.folder,
        env=machine.environment | how,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_job_whose_preflight_fails_does_no_work(machine: Machine):
    done = job(machine, SLURMD_NODENAME="gpu7", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 1
    start = f"report: node gpu7: failed its preflight: GPU 0 ({uuid(0)}, NVIDIA H200): import torch: "
    line = next(line for line in done.stderr.splitlines() if line.startswith(start))
    assert "is built without CUDA; install one that has it" in line
    assert not (machine.folder / "out").exists()


def test_a_job_on_a_bad_node_ends_at_once(machine: Machine):
    bad = machine.folder / preflight.BAD / "gpu7.json"
    bad.parent.mkdir(parents=True)
    bad.write_text(json.dumps({"problems": [{"when": "today", "text": "/scratch is slow", "devices": []}]}))
    done = job(machine, SLURMD_NODENAME="gpu7")
    assert "report: node gpu7: failed its preflight on today: /scratch is slow\nIt is left out" in done.stderr
    assert not (machine.folder / "out").exists()


def test_the_script_prints_the_figures_and_leaves_leased_gpus_out(machine: Machine):
    machine.job(CUDA_VISIBLE_DEVICES="0").devices()
    done = subprocess.run(
        [sys.executable, SCRIPTS / "preflight.py"],
        cwd=machine.folder,
        env=machine.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "GPU 0 is left out: leased by completions" in done.stdout
    assert "written" in done.stdout
    assert "read back" in done.stdout
    assert f"GPU 1 ({uuid(1)}, NVIDIA H200): import torch: " in done.stderr
