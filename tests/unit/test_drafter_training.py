"""Cutting, killing and starting again do not change a training; wrong inputs are refused by path."""

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import drafter_world as world
import pyarrow.parquet as pq
import pytest
import torch
from needs import needs_gpu

from draftline import provenance
from draftline.drafter import train
from draftline.drafter.batch import make_batches
from draftline.drafter.config import DrafterConfig
from draftline.drafter.data import Parts
from draftline.drafter.segment import initial_state, seen_tokens
from draftline.drafter.state import State, learned_from
from draftline.drafter.train import Recipe, Trainer
from draftline.errors import DraftlineError
from draftline.heads import Heads
from draftline.states import StatesReader
from draftline.states_writer import Sample
from draftline.visits import segment_visits


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    world.build(folder)
    return folder


@pytest.fixture
def run(built, tmp_path, monkeypatch):
    """A working directory of its own with the artifacts, one thread."""
    shutil.copytree(built / "results", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


def tensors(folder):
    return State.load(folder / "state.safetensors").tensors


def metrics(*folders):
    return [row for folder in folders for row in pq.read_table(folder / "metrics.parquet").to_pylist()]


def assert_equal_states(one, other):
    one, other = tensors(one), tensors(other)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_three_segments_equal_one_bit_for_bit(run):
    whole = world.train(1, 1)
    cut = [world.train(3, segment) for segment in (1, 2, 3)]
    assert State.load(cut[0] / "state.safetensors").carried, "no seam cuts a batch: the test would show nothing"
    assert_equal_states(whole, cut[-1])
    assert metrics(whole) == metrics(*cut)
    assert len(metrics(whole)) == 14  # 2 epochs of 20 samples in batches of 3: 13 and a short one
    assert not list(Path("results/.resume/train").rglob("*.safetensors"))


def test_a_killed_and_resumed_run_equals_an_undisturbed_one(run, hold):
    """A checkpoint after each step; the kill comes in the middle of the eleventh, at which the program waits for it."""
    undisturbed = world.train(1, 1)
    expected, rows = tensors(undisturbed), metrics(undisturbed)
    shutil.rmtree(undisturbed)
    checkpoint = Path("results/.resume/train/demo/1") / world.record("train_segment", str(undisturbed))["id"]
    hold.at("drafter_world", "draftline.drafter.train", "Trainer.train", 11)
    path = os.pathsep.join([hold.environment["PYTHONPATH"], *filter(None, sys.path)])
    process = subprocess.Popen([sys.executable, world.__file__], env={**hold.environment, "PYTHONPATH": path})
    hold.held("drafter_world")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert State.load(checkpoint / "state.safetensors").step == 10
    assert not (undisturbed / "state.safetensors").exists()

    seen = []
    train = Trainer.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", lambda self, samples: seen.append(self.step) or train(self, samples))
        resumed = world.train(1, 1)
    assert seen[0] == 10
    assert metrics(resumed) == rows
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(resumed).items())
    assert not checkpoint.exists()


def test_checkpoints_of_other_settings_are_cleared_when_a_segment_begins(run):
    other = Path("results/.resume/train/demo/1/0123456789abcdef/state.safetensors")
    untouched = Path("results/.resume/train/demo/2/0123456789abcdef/state.safetensors")
    for path in (other, untouched):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"old")
    world.train(2, 1)
    assert not other.exists()
    assert untouched.exists()


def test_a_sigterm_is_answered_with_a_checkpoint_of_the_step_in_hand(run, monkeypatch):
    """No checkpoint is due (save_every is a minute); the signal comes in the middle of the fifth step."""
    undisturbed = world.train(1, 1)
    expected, rows = tensors(undisturbed), metrics(undisturbed)
    shutil.rmtree(undisturbed)
    train = Trainer.train

    def interrupted(self, samples):
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return train(self, samples)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", interrupted)
        with pytest.raises(
            DraftlineError, match=rf"stopped by SIGTERM .* after step 5 of {len(rows)}; its state is saved"
        ):
            world.train(1, 1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not (undisturbed / "state.safetensors").exists()
    resumed = world.train(1, 1)
    assert metrics(resumed) == rows
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(resumed).items())


def test_training_lowers_the_loss(run):
    rows = metrics(world.train(1, 1, epochs=12, lr=0.01))
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["tau"] > rows[0]["tau"]


def test_metrics_have_the_documented_columns(run):
    folder = world.train(1, 1)
    schema = pq.read_schema(folder / "metrics.parquet")
    named = {field.name: str(field.type) for field in schema}
    integers, floats = ("step", "epoch", "tokens", "anchors"), ("loss", "accuracy", "tau", "lr", "grad_norm")
    assert named == {**dict.fromkeys(integers, "int32"), **dict.fromkeys(floats, "float")}
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert sum(row["tokens"] for row in rows) == 2 * sum(pq.read_table(world.MASK)["length"].to_pylist())
    assert rows[-1]["lr"] < rows[-2]["lr"] < world.SETTINGS["lr"]


def test_every_sample_is_visited_once_an_epoch_in_an_order_of_its_own(run):
    visits = segment_visits(world.SHARDS, world.PARTS, 2, 1, 1)
    parts = Parts([world.part_path(s, p) for _, s, p in visits[:4]], world.manifest(), visits, "cpu")
    orders = [[sample.id for sample in parts.samples(visit, 0, 0)] for visit in visits]
    everything = [f"{n:032x}" for n in range(20)]
    assert sorted(itertools.chain(*orders[:4])) == everything
    assert sorted(itertools.chain(*orders[4:])) == everything
    assert orders[0] != orders[4]
    assert orders[0] != [sample.id for sample in parts.samples(visits[0], 1, 0)]
    assert orders[0][2:] == [sample.id for sample in parts.samples(visits[0], 0, 2)]


def make_batch(*arguments):
    (batch,) = make_batches(*arguments)
    return batch


def trainer(changes, device="cpu"):
    values = {**world.SETTINGS, **changes}
    recipe = Recipe.from_settings(values)
    config = DrafterConfig.from_settings(values, world.manifest(), world.LAYERS)
    vocabulary = seen_tokens(world.LABELS) if recipe.head == "seen" else None
    return Trainer(initial_state(config, recipe.seed, 20), recipe, Heads.load(world.HEADS, device), vocabulary, device)


def some_samples(device="cpu"):
    visits = segment_visits(world.SHARDS, world.PARTS, 1, 1, 1)[:1]
    return list(Parts([world.part_path("0000", "0000")], world.manifest(), visits, device).samples(visits[0], 0, 0))


def test_a_step_does_not_modify_features_or_labels(run):
    samples = some_samples()
    before = [(s.features.clone(), s.input_ids.clone(), s.loss_mask.clone()) for s in samples]
    trainer({}).train(samples)
    for sample, (features, ids, mask) in zip(samples, before):
        assert torch.equal(sample.features, features)
        assert torch.equal(sample.input_ids, ids)
        assert torch.equal(sample.loss_mask, mask)


def test_a_step_in_parts_is_the_step_in_one_piece(run, monkeypatch):
    """Memory holds the forward of some samples at a time; loss, figures and weights are those of all under one denominator."""
    samples, found = some_samples(), []
    for slots in (10**6, 60, 1):
        monkeypatch.setattr(train, "make_batches", functools.partial(make_batches, slots=slots))
        model = trainer({})
        found.append((model.train(samples), model.tensors(), make_batches(samples, 6, 4, 63, 0, None, slots)))
    (whole, weights, (batch,)), *others = found
    assert [len(batches) for *_, batches in others] == [3, len(samples)]
    for row, parameters, batches in others:
        assert row == pytest.approx(whole, rel=1e-5)
        assert {name: pytest.approx(tensor, rel=1e-4, abs=1e-7) for name, tensor in weights.items()} == parameters
        assert torch.equal(torch.cat([part.labels for part in batches]), batch.labels)
        assert max(part.blocks.numel() for part in batches) <= 60


@needs_gpu
def test_steps_on_a_gpu_are_those_on_the_cpu_but_for_rounding(run):
    changes = {"head_dim": 16}  # the least that flex_attention takes
    ours, theirs = trainer(changes, "cuda"), trainer(changes)
    for samples in ([*some_samples("cuda"), *some_samples()], some_samples("cuda")):
        row, expected = ours.train(samples), theirs.train([sample.on("cpu") for sample in samples])
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-2)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-2)


@needs_gpu
def test_heads_too_small_for_a_gpus_kernel_are_refused(run):
    with pytest.raises(DraftlineError, match=r"drafters: head_dim: 8: on a GPU a head has 16 elements at least"):
        trainer({}, "cuda").train(some_samples("cuda"))


@needs_gpu
def test_features_on_a_gpu_are_those_of_the_file(run):
    for ours, theirs in zip(some_samples("cuda"), some_samples(), strict=True):
        assert ours.features.is_cuda
        assert torch.equal(ours.features.cpu(), theirs.features)


@pytest.mark.parametrize("noise", [0.05, 10.0])
def test_labels_come_from_token_ids_whatever_the_features(run, noise):
    samples = some_samples()
    noisy = [replace(s, features=s.features + noise * torch.randn(s.features.shape)) for s in samples]
    clean, other = (make_batch(chosen, 6, 4, 63, 0, None) for chosen in (samples, noisy))
    for name in ("labels", "counts", "anchors", "blocks"):
        assert torch.equal(getattr(clean, name), getattr(other, name))


def test_only_features_before_the_last_anchor_are_read(run):
    samples = some_samples()
    batch = make_batch(samples, 3, 4, 63, 0, None)
    starts = [*batch.context_start.unique().tolist(), len(batch.features)]
    for start, end in itertools.pairwise(starts):
        assert end - start == int(batch.anchors[batch.context_start == start].max())
    assert (batch.blocks[:, 1:] == 63).all()
    assert torch.equal(batch.positions[starts[1] : starts[2]], torch.arange(starts[2] - starts[1]))


def test_blocks_hold_the_anchors_own_token_and_masks(run):
    (sample, *_) = some_samples()
    batch = make_batch([sample], 3, 4, 63, 0, None)
    expected = [[int(sample.input_ids[anchor]), 63, 63, 63] for anchor in batch.anchors]
    assert batch.blocks.tolist() == expected


def test_anchors_are_drawn_anew_each_epoch(run):
    sample = max(some_samples(), key=lambda sample: len(sample.input_ids))
    first, again, next_epoch = (
        make_batch([replace(sample, epoch=epoch)], 3, 4, 63, 0, None).anchors.tolist() for epoch in (0, 0, 1)
    )
    assert first == again
    assert first != next_epoch


def test_restricted_head_gives_the_loss_of_a_vocabulary_without_the_others(run):
    samples = some_samples()
    seen = trainer({"head": "seen"})
    tokens = seen_tokens(world.LABELS)
    assert len(tokens) < world.V
    batch = make_batch(samples, 6, 4, 63, 0, None)
    with torch.no_grad():
        logits = Heads.load(world.HEADS).logits(seen.hidden(batch)[:, 1:]).double()
    others = torch.ones(world.V, dtype=torch.bool)
    others[tokens] = False
    log_shares = logits.masked_fill(others, float("-inf")).log_softmax(-1)
    weights = torch.exp(-torch.arange(3) / seen.recipe.gamma).double() * batch.counts
    of_labels = log_shares.gather(-1, batch.labels[..., None])[..., 0].where(batch.counts, 0)
    expected = -(weights * of_labels).sum() / weights.sum()
    assert seen.train(samples)["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_label_outside_the_seen_tokens_is_refused(run):
    with pytest.raises(DraftlineError, match=r"stats/tokens\.parquet: token \d+: is a label but is not listed"):
        make_batch(some_samples(), 6, 4, 63, 0, torch.tensor([2, 3]))


def test_decay_is_for_matrices_only(run):
    groups = trainer({}).optimizer.param_groups
    assert {p.dim() for p in groups[0]["params"]} == {2}
    assert groups[0]["weight_decay"] == 0.01
    assert groups[1]["weight_decay"] == 0
    assert sum(len(group["params"]) for group in groups) == 25


def test_the_targets_embedding_and_head_stay_as_they_are(run):
    one = trainer({"head": "full"})
    before = one.heads.embed_VH.clone(), one.heads.lm_head_VH.clone()
    one.train(some_samples())
    assert torch.equal(one.heads.embed_VH, before[0])
    assert torch.equal(one.heads.lm_head_VH, before[1])


def test_cut_part_is_refused_by_path(run):
    path = Path(world.part_path("0001", "0000"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DraftlineError, match=f"{path}: damaged or cut short"):
        world.train(1, 1)
    assert not Path(world.folder_of(1, 1)).exists()


def test_part_of_another_target_is_refused_by_path(run):
    path = world.part_path("0001", "0001")
    reader = StatesReader(path)
    samples = [world.Sample(reader.ids[0], reader.input_ids(0).int(), reader.loss_mask(0))]
    world.write_part(path, samples, weights_sha256="d" * 64)
    with pytest.raises(DraftlineError, match=f"{path}: hidden states of another target"):
        world.train(1, 1)


def test_part_with_other_layers_is_refused_by_path(run):
    path = world.part_path("0001", "0001")
    reader = StatesReader(path)
    samples = [world.Sample(reader.ids[0], reader.input_ids(0).int(), reader.loss_mask(0))]
    world.write_part(path, samples, layers=[1, 2])
    with pytest.raises(DraftlineError, match=rf"{path}: tapped layers \[1, 2\], wanted \[1, 3\]"):
        world.train(1, 1)


def write_again(shard, part, **changes):
    """The part with the same samples, made in another way."""
    path = world.part_path(shard, part)
    reader = StatesReader(path)
    samples = [Sample(reader.ids[n], reader.input_ids(n).int(), reader.loss_mask(n)) for n in range(len(reader))]
    world.write_part(path, samples, **changes)
    return path


FLA = {"linear_attention": {"chunk_gated_delta_rule": "fla"}}
FALLBACK = {"linear_attention": {"chunk_gated_delta_rule": "torch"}}


@pytest.mark.parametrize(
    ("changes", "values"), [({"kernels": FLA}, ["sdpa", "fla"]), ({"storage": "fp32"}, ["bf16", "fp32"])]
)
def test_parts_that_were_not_made_alike_are_refused_by_both_paths(run, changes, values):
    path = write_again("0001", "0000", **changes)
    with pytest.raises(DraftlineError) as error:
        world.train(1, 1)
    for text in (path, world.part_path("0000", "0000"), *values):
        assert text in str(error.value)


def test_parts_of_other_kernels_than_those_of_the_segment_before_are_refused(run):
    for shard, kernels in (("0000", FLA), ("0001", FALLBACK)):
        for part in ("0000", "0001"):
            write_again(shard, part, kernels=kernels)
    before = world.train(2, 1, epochs=1)
    with pytest.raises(DraftlineError) as error:
        world.train(2, 2, epochs=1)
    for text in (world.part_path("0001", "0000"), str(before / "state.safetensors"), str(FLA), str(FALLBACK)):
        assert text in str(error.value)


def test_a_drafter_learns_from_fp8_states(run):
    for shard in ("0000", "0001"):
        for part in ("0000", "0001"):
            write_again(shard, part, storage="fp8_e4m3")
    losses = [row["loss"] for row in metrics(world.train(2, 1), world.train(2, 2))]
    assert losses[-1] < losses[0]
    assert learned_from(Path(world.folder_of(2, 2)) / "state.safetensors")["storage"] == "fp8_e4m3"


def test_missing_part_is_named(run):
    visits = segment_visits(world.SHARDS, world.PARTS, 1, 1, 1)
    with pytest.raises(DraftlineError, match=r"hidden_states/0001/0001\.safetensors: missing"):
        Parts([world.part_path(s, p) for _, s, p in visits[:3]], world.manifest(), visits, "cpu")


def test_state_of_another_training_is_refused_by_path(run):
    world.train(2, 1)
    with pytest.raises(DraftlineError, match=r"segments/1/state\.safetensors: does not belong"):
        world.train(2, 2, layers=1)


def test_cut_state_is_refused_by_path(run):
    path = world.train(2, 1) / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DraftlineError, match=f"{path}: damaged or cut short"):
        world.train(2, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_refused(run):
    with pytest.raises(DraftlineError, match=r"run\.device: cuda: torch sees no GPU"):
        world.train(1, 1, device="cuda")


def test_a_diverging_training_stops_and_leaves_nothing(run):
    with pytest.raises(DraftlineError, match=r"lr: 1e\+20: training diverged at step \d+"):
        world.train(1, 1, lr=1e20, clip=1e20, epochs=4)
    assert not Path(world.folder_of(1, 1)).exists()


def test_artifacts_are_the_same_files_again(run):
    one = world.train(1, 1)
    before = {path.name: path.read_bytes() for path in one.iterdir()}
    shutil.rmtree(one)
    again = world.train(1, 1)
    assert {path.name: path.read_bytes() for path in again.iterdir()} == before
    assert provenance.read(again / "state.safetensors")["rule"] == "train_segment"
