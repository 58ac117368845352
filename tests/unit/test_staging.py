"""A model's copy on a node: made once, whole or not at all, shared, and not removed under a job."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from snakemake.utils import validate
from states_fixtures import save_target

from draftline import memory, plan, staging
from draftline.checkpoint import Checkpoint, weights_sha256
from draftline.errors import DraftlineError
from draftline.loading import load_model
from draftline.staging import staged, unstage

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
JOB = f"""
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
sys.path.insert(0, {str(SCRIPTS)!r})
from draftline.manifest import Manifest
from draftline.staging import staged
print("model", staged(Manifest.load(sys.argv[1]), sys.argv[2]).model, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def manifest(tmp_path):
    found = save_target("llama", tmp_path / "model")
    found = dataclasses.replace(found, weights_sha256=weights_sha256(Checkpoint(Path(found.model))))
    found.write(tmp_path / "manifest.json", {"rule": "target", "id": "0", "settings": "1", "inputs": {}})
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"the same again")
    return found


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "stage"
    for lock in staging._held:
        lock.close()
    staging._held.clear()


def copy_of(manifest, folder):
    return folder / manifest.weights_sha256[:16]


class Job:
    """A process that uses a copy until it is told to end."""

    def __init__(self, tmp_path, folder):
        command = [sys.executable, "-c", JOB, str(tmp_path / "manifest.json"), str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines = []

    def until(self, text):
        """Read what it says up to a line with `text`."""
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        pytest.fail(f"ended without {text!r}: {self.lines}")

    def end(self):
        out, _ = self.process.communicate("")
        assert self.process.returncode == 0, out
        return "".join([*self.lines, out])

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stdin.close()


def halting_file(manifest):
    """A file of the model whose copying waits until `release`."""
    path = Path(manifest.model) / "vocabulary.txt"
    os.mkfifo(path)
    return path


def release(path):
    path.write_bytes(b"")
    path.unlink()


def test_a_model_is_loaded_from_its_copy(manifest, folder):
    original = load_model(manifest)
    found = staged(manifest, str(folder))
    assert found == dataclasses.replace(manifest, model=str(copy_of(manifest, folder)))
    shutil.rmtree(manifest.model)
    ids = torch.arange(9)[None]
    again = load_model(manifest, {"device": "cpu", "stage_to": str(folder)})
    assert torch.equal(original(ids).logits, again(ids).logits)


def test_only_what_is_read_is_copied(manifest, folder):
    staged(manifest, str(folder))
    names = {"config.json", "generation_config.json", "model.safetensors", staging.LIST}
    assert {path.name for path in copy_of(manifest, folder).iterdir()} == names


def test_without_a_folder_nothing_is_copied(manifest):
    assert staged(manifest, None) is manifest


def test_two_jobs_at_once_copy_once(tmp_path, manifest, folder):
    halt = halting_file(manifest)
    with Job(tmp_path, folder) as first, Job(tmp_path, folder) as second:
        for job in (first, second):
            job.until(" ")
        (copies,) = [job for job in (first, second) if "copying" in job.lines[0]]
        (waits,) = [job for job in (first, second) if "waiting for" in job.lines[0]]
        assert f"waiting for process {copies.process.pid}" in waits.lines[0]
        release(halt)
        said = first.end() + second.end()
    assert said.count("copying") == 1
    assert said.count(f"model {copy_of(manifest, folder)}") == 2


def test_a_copy_killed_half_way_is_made_again(tmp_path, manifest, folder):
    halt = halting_file(manifest)
    with Job(tmp_path, folder) as job, open(halt, "wb"):  # opened once the job reads it, in the middle of its copying
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
    halt.unlink()
    assert copy_of(manifest, folder).exists()
    assert not staging._whole(copy_of(manifest, folder), manifest)
    left = copy_of(manifest, folder) / "left.json"
    left.write_text("{}")
    staged(manifest, str(folder))
    assert not left.exists()
    assert staging._whole(copy_of(manifest, folder), manifest)


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "list"])
def test_a_damaged_copy_is_made_again(manifest, folder, damage):
    copy = copy_of(manifest, folder)
    staged(manifest, str(folder))
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "cut":
        os.truncate(weights, 100)
    if damage == "changed":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    if damage == "gone":
        (copy / "config.json").unlink()
    if damage == "list":
        (copy / staging.LIST).write_text("{")
    for lock in staging._held:
        lock.close()
    staged(manifest, str(folder))
    assert weights.read_bytes() == whole
    assert (copy / "config.json").read_bytes() == (Path(manifest.model) / "config.json").read_bytes()


def test_the_list_holds_the_sha256_of_each_file(manifest, folder):
    staged(manifest, str(folder))
    copy = copy_of(manifest, folder)
    for name, (size, digest) in json.loads((copy / staging.LIST).read_text()).items():
        found = subprocess.run(["sha256sum", str(copy / name)], capture_output=True, text=True, check=True).stdout
        assert (size, digest) == ((copy / name).stat().st_size, found.split()[0])


def test_a_source_that_is_not_the_manifests_is_refused(manifest, folder):
    other = dataclasses.replace(manifest, weights_sha256="f" * 64)
    with pytest.raises(DraftlineError, match=r"model: other weights than results/target/manifest\.json"):
        staged(other, str(folder))
    assert not copy_of(other, folder).exists()


def test_a_model_whose_copy_is_not_whole_is_refused_and_not_copied_again_and_again(manifest, folder, monkeypatch):
    copied = []
    monkeypatch.setattr(staging, "_copy", lambda manifest, copy: copied.append(copy) or copy.mkdir())
    with pytest.raises(
        DraftlineError, match="is not the whole model; keep all weight files of the model in one folder"
    ):
        staged(manifest, str(folder))
    assert copied == [copy_of(manifest, folder)]
    assert not copy_of(manifest, folder).exists()


def test_only_copies_are_removed(tmp_path, manifest, folder):
    staged(manifest, str(folder))
    staging._held.pop().close()
    for other in ("data", "0123456789abcdeg"):
        (folder / other).mkdir()
        (folder / f"{other}.lock").touch()
    assert unstage(str(folder)) == [copy_of(manifest, folder)]
    assert (folder / "data").is_dir()
    assert (folder / "0123456789abcdeg").is_dir()
    command = [sys.executable, str(SCRIPTS / "unstage.py"), ""]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "name one folder" in done.stderr


def test_a_copy_in_use_is_not_removed_and_its_user_is_named(tmp_path, manifest, folder):
    command = [sys.executable, str(SCRIPTS / "unstage.py"), str(folder)]
    with Job(tmp_path, folder) as job:
        job.until("model ")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert f"{copy_of(manifest, folder)}: in use by process {job.process.pid}" in done.stderr
        assert staging._whole(copy_of(manifest, folder), manifest)
        job.end()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"removed {copy_of(manifest, folder)}\n"
    assert not copy_of(manifest, folder).exists()
    assert unstage(str(folder)) == []


def test_too_little_room_is_refused_with_figures_and_leaves_nothing(manifest, folder, monkeypatch):
    """The disk is the machine's: only its free space is made up here."""
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 0, 1000))
    with pytest.raises(DraftlineError, match=r"takes \S+ GB, 1e-06 GB of room are free"):
        staged(manifest, str(folder))
    assert not copy_of(manifest, folder).exists()


@pytest.fixture
def in_memory(folder):
    place = Path("/dev/shm") / f"draftline-test-{os.getpid()}"
    if staging._file_system(place.parent) not in staging.IN_MEMORY:
        pytest.skip("/dev/shm is no memory here")
    yield place
    shutil.rmtree(place, ignore_errors=True)


def test_a_copy_in_memory_counts_as_memory(manifest, in_memory, monkeypatch):
    """The memory is the machine's: only what is free of it is made up here."""
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available", lambda: 1000)
        with pytest.raises(DraftlineError, match="of memory, in which this folder lies, are free"):
            staged(manifest, str(in_memory))
    staged(manifest, str(in_memory))


def test_where_a_model_is_staged_makes_nothing_stale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plans = []
    for stage_to in (None, "/dev/shm/draftline"):
        config = yaml.safe_load((ROOT / "config.yaml").read_text())
        config["target"]["stage_to"] = stage_to
        validate(config, str(ROOT / "schemas/config.schema.yaml"))
        plans.append(plan.Plan(config, ROOT, [], main=True))
    for rule in ("target", "hidden_states", "report"):
        assert plans[0].values(rule, None) == plans[1].values(rule, None)
    assert "stage_to" not in plans[0].run_options("hidden_states")
    for rule in ("canary", "completions", "hidden_states", "hidden_states_gate", "bench_hidden_states"):
        assert plans[1].run_options(rule)["stage_to"] == "/dev/shm/draftline"
    assert "stage_to" not in plans[1].run_options("evaluate")
