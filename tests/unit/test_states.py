"""Files of hidden states: what is written is what is read, and nothing half-written is ever seen."""

import errno
import json
import os
import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from states_fixtures import RECORD, samples_of

from draftline import provenance
from draftline.errors import DraftlineError
from draftline.states import CONVENTION, StatesReader
from draftline.states_writer import QUEUE, write_states
from draftline.storage import decode, encode

LAYERS, HIDDEN = [1, 4, 7], 16
FACTS = {
    "target": {"name": "some-model", "weights_sha256": "ab" * 32},
    "kernels": {"full_attention": "sdpa"},
    "dtype": "float32",
    "versions": {"torch": "2"},
}


class OtherTarget:
    name, weights_sha256 = "another-model", "cd" * 32


def features_of(samples, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(len(s.input_ids), len(LAYERS) * HIDDEN, generator=draw) * 3 + 0.5 for s in samples]


def write(path, samples, features, storage="fp32", order=None, facts=FACTS):
    with write_states(path, RECORD, samples, LAYERS, HIDDEN, storage, facts) as writer:
        for n in order or range(len(samples)):
            writer.put(n, features[n])


@pytest.fixture
def samples():
    return samples_of()


@pytest.fixture
def part(tmp_path, samples):
    path = tmp_path / "0000.safetensors"
    write(path, samples, features_of(samples))
    return path


@pytest.mark.parametrize(("storage", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_what_is_put_in_any_order_is_read_back(tmp_path, samples, storage, dtype):
    features, path = features_of(samples), tmp_path / "0000.safetensors"
    write(path, samples, features, storage, order=torch.randperm(len(samples)).tolist())
    part = StatesReader(path)
    assert len(part) == len(samples)
    assert part.ids == [sample.id for sample in samples]
    assert part.lengths == [len(sample.input_ids) for sample in samples]
    for n, sample in enumerate(samples):
        assert part.features(n).dtype == dtype
        assert torch.equal(part.features(n), features[n].to(dtype))
        assert torch.equal(part.input_ids(n), sample.input_ids.long())
        assert part.input_ids(n).dtype == torch.int64
        assert torch.equal(part.loss_mask(n), sample.loss_mask)
        assert part.loss_mask(n).dtype == torch.bool


def test_safetensors_own_loader_finds_the_documented_tensors(part, samples):
    tensors = load_file(part)
    total = sum(len(sample.input_ids) for sample in samples)
    assert {name: (list(t.shape), t.dtype) for name, t in tensors.items()} == {
        "features": ([total, len(LAYERS) * HIDDEN], torch.float32),
        "input_ids": ([total], torch.int32),
        "loss_mask": ([total], torch.uint8),
        "offsets": ([len(samples) + 1], torch.int64),
        "ids": ([len(samples), 16], torch.uint8),
    }
    assert torch.equal(tensors["features"], torch.cat(features_of(samples)))


def test_fp8_lies_in_the_file_as_documented_and_is_read_back_as_bf16(tmp_path, samples):
    features, path = features_of(samples), tmp_path / "0000.safetensors"
    write(path, samples, features, "fp8_e4m3", order=torch.randperm(len(samples)).tolist())
    tensors, reader, expected = (
        load_file(path),
        StatesReader(path),
        encode(torch.cat(features), "fp8_e4m3", len(LAYERS)),
    )
    assert {name: tensors[name].dtype for name in expected} == {
        "scales": torch.float32,
        "features": torch.float8_e4m3fn,
    }
    assert all(torch.equal(tensors[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    assert path.stat().st_size < torch.cat(features).numel() * 2
    for n, features_TF in enumerate(features):
        assert reader.features(n).dtype == torch.bfloat16
        assert torch.equal(reader.features(n), decode(encode(features_TF, "fp8_e4m3", len(LAYERS))))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    low, high = (int(x, 16) for x in mapped[0].split()[0].split("-"))
    assert all(low <= tensor.data_ptr() < high for tensor in reader.stored(1).values())


def test_features_are_views_of_one_mapped_file(part):
    reader = StatesReader(part)
    first, second = reader.features(0), reader.features(1)
    assert second.data_ptr() - first.data_ptr() == first.numel() * 4
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(part))]
    low, high = (int(x, 16) for x in mapped[0].split()[0].split("-"))
    assert low <= first.data_ptr() < high


def test_header_says_what_the_features_are_and_what_made_them(part):
    facts = StatesReader(part).facts
    statistics = facts.pop("statistics")
    assert facts == {**FACTS, "layers": LAYERS, "convention": CONVENTION, "storage": "fp32"}
    assert [sorted(entry) for entry in statistics] == [["absmax", "mean", "std", "zero_fraction"]] * len(LAYERS)
    assert provenance.read(part) == RECORD


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_statistics_are_those_of_the_stored_numbers_in_float64(tmp_path, samples, storage):
    features, path = features_of(samples), tmp_path / "0000.safetensors"
    features[2][3:9] = 0
    features[4][1, HIDDEN + 5] = -300.0
    write(path, samples, features, storage)
    stored = decode(encode(torch.cat(features), storage, len(LAYERS))).double().numpy().reshape(-1, len(LAYERS), HIDDEN)
    for k, found in enumerate(StatesReader(path).facts["statistics"]):
        values = stored[:, k]
        assert found["mean"] == pytest.approx(np.mean(values), rel=1e-12)
        assert found["std"] == pytest.approx(np.std(values), rel=1e-12)
        assert found["absmax"] == np.max(np.abs(values))
        assert found["zero_fraction"] == np.mean(values == 0)


def test_order_of_computation_does_not_change_the_file(tmp_path, part, samples):
    write(tmp_path / "again.safetensors", samples, features_of(samples), order=list(reversed(range(len(samples)))))
    assert (tmp_path / "again.safetensors").read_bytes() == part.read_bytes()


def test_a_part_without_samples_is_a_file_like_any_other(tmp_path):
    write(tmp_path / "0000.safetensors", [], [])
    assert len(StatesReader(tmp_path / "0000.safetensors")) == 0
    assert load_file(tmp_path / "0000.safetensors")["features"].shape == (0, len(LAYERS) * HIDDEN)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_cut_part_is_refused_by_path(part, share):
    os.truncate(part, int(part.stat().st_size * share))
    with pytest.raises(DraftlineError, match=str(part)):
        StatesReader(part)


def test_a_part_of_another_target_is_refused_by_path(part):
    with pytest.raises(DraftlineError, match=f"{part}.*another target.*some-model.*another-model"):
        StatesReader(part, OtherTarget())


def test_a_part_of_other_layers_is_refused_by_path(part):
    StatesReader(part, layers=LAYERS)
    with pytest.raises(DraftlineError, match=rf"{part}.*\[1, 4, 7\].*\[1, 4, 8\]"):
        StatesReader(part, layers=[1, 4, 8])


def test_another_kind_of_safetensors_is_refused_by_path(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"features": torch.zeros(2, 2)}, path, {provenance.KEY: json.dumps(RECORD)})
    with pytest.raises(DraftlineError, match=f"{path}.*no file of hidden states"):
        StatesReader(path)


@pytest.mark.parametrize("storage", ["fp32", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("rows", "value", "problem"),
    [
        (slice(None), float("nan"), "NaN or Inf"),
        (2, float("nan"), "NaN or Inf"),
        (2, float("inf"), "NaN or Inf"),
        (2, float("-inf"), "NaN or Inf"),
        (slice(None), 0.0, "all zero"),
        (slice(None), 0.25, "one state for all tokens"),
    ],
)
def test_a_broken_layer_is_refused_with_path_layer_and_sample(tmp_path, samples, rows, value, problem, storage):
    features, path = features_of(samples), tmp_path / "0000.safetensors"
    features[3][rows, HIDDEN : 2 * HIDDEN] = value
    with pytest.raises(DraftlineError, match=f"{path}: layer 4 .*{problem}.*{samples[3].id}"):
        write(path, samples, features, storage)
    assert os.listdir(tmp_path) == []


def test_a_layer_that_gives_every_token_the_same_state_is_refused(tmp_path, samples):
    features, path = features_of(samples), tmp_path / "0000.safetensors"
    features[5][:, :HIDDEN] = features[5][0, :HIDDEN].clone()
    with pytest.raises(DraftlineError, match=f"{path}: layer 1 .*{samples[5].id}"):
        write(path, samples, features)


def test_bf16_overflow_counts_as_inf(tmp_path, samples):
    features = features_of(samples)
    features[0][1, 1] = 3.4e38
    with pytest.raises(DraftlineError, match="layer 1 holds NaN or Inf"):
        write(tmp_path / "0000.safetensors", samples, features, "bf16")


def test_a_sample_left_out_leaves_no_file(tmp_path, samples):
    with pytest.raises(ValueError, match="9 of 10 samples"):
        write(tmp_path / "0000.safetensors", samples, features_of(samples), order=list(range(9)))
    assert os.listdir(tmp_path) == []


def test_an_error_of_the_computation_leaves_no_file(tmp_path, samples):
    path = tmp_path / "0000.safetensors"
    with pytest.raises(IndexError):
        write(path, samples, features_of(samples[:4]))
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_files():
    """Files may not grow beyond 64 KB: writing fails in the middle, in the writing thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_failing_write_surfaces_with_the_path_and_leaves_no_file(tmp_path):
    samples = samples_of((50,) * (5 * QUEUE))
    path = tmp_path / "0000.safetensors"
    with pytest.raises(OSError, match="too large") as caught:
        write(path, samples, features_of(samples))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


class FillingTheDisk(list):
    """Features during whose computation somebody else fills the disk, before the first of them is written."""

    def __init__(self, features, other):
        super().__init__(features)
        self.other = other

    def __getitem__(self, n):
        if not self.other.exists():
            self.other.write_bytes(bytes(700_000))
        return super().__getitem__(n)


def test_a_disk_that_fills_up_surfaces_as_full_disk_and_leaves_no_file(small_disk):
    samples, path = samples_of((200,) * 20), small_disk / "0000.safetensors"
    features = features_of(samples)
    with pytest.raises(OSError, match="No space left") as caught:
        write(path, samples, FillingTheDisk(features, small_disk / "other"))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert os.listdir(small_disk) == ["other"]


def test_a_disk_that_cannot_keep_what_it_took_surfaces_and_leaves_no_file(tmp_path, monkeypatch):
    """Written pages come to the disk later; its error is told once, and has no path. No disk here breaks at command."""
    told = []

    def broken(descriptor):
        if not told:
            told.append(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", broken)
    samples, path = samples_of((200,) * 20), tmp_path / "0000.safetensors"
    with pytest.raises(OSError, match="Input/output error") as caught:
        write(path, samples, features_of(samples))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert os.listdir(tmp_path) == []


def test_too_small_a_disk_is_refused_before_anything_is_computed(small_disk):
    samples, path = samples_of((200,) * 80), small_disk / "0000.safetensors"
    with (
        pytest.raises(DraftlineError, match=f"{path}: takes 0.00316 GB"),
        write_states(path, RECORD, samples, LAYERS, HIDDEN, "fp32", FACTS),
    ):
        pytest.fail("must not be reached")
    assert os.listdir(small_disk) == []


@pytest.mark.parametrize("storage", ["fp32", "fp8_e4m3"])
@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_a_file_that_comes_back_different_is_refused(tmp_path, samples, storage, factor):
    """Twice the features are the same fp8 numbers with other scales."""
    features = features_of(samples)
    write(tmp_path / "a.safetensors", samples, features, storage)
    with write_states(tmp_path / "b.safetensors", RECORD, samples, LAYERS, HIDDEN, storage, FACTS) as writer:
        for n, features_TF in enumerate(features):
            writer.put(n, features_TF * factor)
    writer.compare(StatesReader(tmp_path / "b.safetensors"))
    with pytest.raises(DraftlineError, match="came back from the disk different"):
        writer.compare(StatesReader(tmp_path / "a.safetensors"))


def test_what_a_killed_writer_left_is_removed(tmp_path, samples):
    (tmp_path / ".0000.safetensors.4711.tmp.safetensors").write_bytes(b"half a part")
    write(tmp_path / "0000.safetensors", samples, features_of(samples))
    assert os.listdir(tmp_path) == ["0000.safetensors"]
