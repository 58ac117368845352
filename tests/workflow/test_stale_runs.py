"""What a dry run shows after each kind of change to a finished run: exactly the work that the change calls for."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import Run

from draftline import provenance

TRAINING = {
    "train_segment": 1,
    "train_last_segment": 1,
    "keep_checkpoint": 1,
    "export": 1,
    "export_gate": 1,
    "evaluate": 1,
    "evaluate_checkpoint": 1,
    "report": 1,
}
STATES = {"hidden_states": 2, "hidden_states_gate": 1, "bench_hidden_states": 1, "evaluate_baseline": 2, **TRAINING}

LR = ("tiny.yaml", "lr: 0.001", "lr: 0.002")
LOSS = ("scripts/draftline/drafter/loss.py", "import torch\n", "import torch\n\nUNUSED = 1\n")


@pytest.fixture(params=["with records", "without .snakemake", "in a fresh clone"])
def changed(request, run, tmp_path) -> Run:
    """The finished run with Snakemake's records, without them, and as results moved into a fresh copy of the code."""
    if request.param == "without .snakemake":
        shutil.rmtree(run.folder / ".snakemake")
    if request.param == "in a fresh clone":
        clone = Path(shutil.copytree(run.folder, tmp_path / "clone", ignore=shutil.ignore_patterns(".snakemake")))
        for path in clone.rglob("*"):  # A copy leaves files in any order of time.
            os.utime(path, (time.time(), time.time()))
        return Run(clone)
    return run


def test_nothing_is_pending_after_a_run(changed):
    assert changed.pending() == {}


def test_touching_sources_and_comments_rerun_nothing(changed):
    for path in [*changed.folder.glob("resources/**/*.jsonl"), *changed.folder.glob("scripts/**/*.py")]:
        path.touch()
    changed.edit("tiny.yaml", "# The whole", "# Once more: the whole")
    changed.edit("scripts/draftline/drafter/loss.py", "import torch\n", "import torch  # a comment\n")
    assert changed.pending() == {}


def test_a_learning_rate_reruns_training_and_what_follows(changed):
    changed.edit(*LR)
    assert changed.pending() == TRAINING


def test_the_loss_module_reruns_training_and_what_follows(changed):
    changed.edit(*LOSS)
    assert changed.pending() == TRAINING


def test_the_tapped_layers_rerun_the_states_and_what_follows(changed):
    changed.edit("tiny.yaml", "layers: [1, 3, 5]", "layers: [1, 2, 5]")
    assert changed.pending() == STATES


def test_the_target_reruns_everything(changed):
    changed.edit("tiny.yaml", "tiny: {seed: 0}", "tiny: {seed: 1}")
    pending = changed.pending()
    pending.pop("bench_prompts", None)  # An evaluation set is the same for every target.
    assert pending == {
        "target": 1,
        "prompts": 1,
        "canary": 1,
        "completions": 1,
        "bench_completions": 1,
        "tokens": 1,
        "mask_gate_shard": 1,
        "mask_stats": 1,
        "mask_gate": 1,
        **STATES,
    }


def test_a_deleted_completions_file_reruns_that_file_and_what_follows(changed):
    (changed.folder / "results/completions/0000.parquet").unlink()
    pending = changed.pending()
    assert pending == {
        "completions": 1,
        "tokens": 1,
        "mask_gate_shard": 1,
        "mask_stats": 1,
        "mask_gate": 1,
        "hidden_states": 2,
        "hidden_states_gate": 1,
        "evaluate_baseline": 1,  # unigram; the untrained drafter has seen no tokens.
        **TRAINING,
    }


def test_a_change_and_its_undoing_with_a_dry_run_between_rerun_nothing(changed):
    before = (changed.folder / "tiny.yaml").read_text()
    changed.edit(*LR)
    assert changed.pending() == TRAINING
    (changed.folder / "tiny.yaml").write_text(before)
    assert changed.pending() == {}


def test_a_second_drafter_is_left_alone(run):
    small = "small: {layers: 1, block_size: 4, epochs: 2, batch: 4, anchors: 8, lr: 0.001, checkpoints: [1]}"
    other = small.replace("small", "other").replace("lr: 0.001", "lr: 0.003")
    run.edit("tiny.yaml", f"  {small}\n", f"  {small}\n  {other}\n")
    assert run.pending() == {**TRAINING, "report": 1}
    run.snakemake()
    run.edit(*LR)
    outputs = run.outputs()
    assert {name for name in outputs if "other" in name} == set()
    assert "results/drafters/small/model/model.safetensors" in outputs


def test_turns_of_a_data_set_mean_nothing_to_an_engine_that_answers(run):
    run.edit("tiny.yaml", "max_length: 448", "turns: all, max_length: 448")
    assert run.pending() == {"report": 1}


def test_a_gate_that_is_loosened_reruns_only_gates_and_report(run):
    run.edit("tiny.yaml", "looping_share: 1.0", "looping_share: 0.99")
    assert run.pending() == {"canary": 1, "mask_gate_shard": 1, "mask_gate": 1, "report": 1}


def test_a_new_prompt_file_generates_only_its_own_rows(run):
    before = stored_rows(run)
    source = json.loads((run.folder / "resources/prompts/chat.jsonl").read_text().splitlines()[0])
    source["conversations"][0]["value"] = "Name three rivers that nobody has named before."
    (run.folder / "more.jsonl").write_text(json.dumps(source) + "\n")
    run.edit("tiny.yaml", "    code: {", "    more: {paths: more.jsonl}\n    code: {")
    pending = run.pending()
    assert pending["prompts"] == pending["completions"] == 1
    run.snakemake("results/completions/0000.parquet")
    assert stored_rows(run) == before + 1


def test_another_number_of_shards_generates_no_row(run):
    before = stored_rows(run)
    run.edit("tiny.yaml", "shards: 1", "shards: 2")
    run.snakemake("results/completions/0000.parquet", "results/completions/0001.parquet")
    assert stored_rows(run) == before


def test_a_change_while_a_job_runs_is_seen_afterwards(run, hold):
    """A job that began before the change finishes with the old settings in its header, and is made again after."""
    target = "results/drafters/small/segments/1/metrics.parquet"
    for path in (run.folder / "results/drafters").rglob("*.*"):
        path.unlink()
    hold.at("train_segment", "draftline.drafter.train", "Trainer.train")
    started = subprocess.Popen(
        run.command(target), cwd=run.folder, env=hold.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    hold.held("train_segment")
    run.edit(*LR)
    hold.release("train_segment")
    output, _ = started.communicate()
    assert started.returncode == 0, output.decode()
    assert (run.folder / target).exists()
    assert run.pending(target).get("train_segment") == 1


def test_an_accepted_artifact_is_up_to_date_and_says_so(run):
    path = "results/hidden_states/0000/0000.safetensors"
    run.edit("scripts/draftline/extraction.py", "import torch\n", "import torch\n\nUNUSED = 1\n")
    stale = run.pending()
    assert stale["hidden_states"] == 2
    parts = [path, "results/hidden_states/0000/0001.safetensors", "results/benches/fresh/hidden_states.safetensors"]
    accept = ["scripts/accept.py", "--why", "harmless", *parts, "--", "--configfile", "tiny.yaml"]
    result = subprocess.run([sys.executable, *accept], cwd=run.folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert not {"hidden_states", "train_segment", "evaluate"} & run.pending().keys()
    assert provenance.read(run.folder / path)["accepted"]["why"] == "harmless"


def stored_rows(run: Run) -> int:
    """Rows that an engine ever generated in this run, from the row store."""
    files = (run.folder / "results/.resume/rows").rglob("*.jsonl")
    return sum(len(file.read_bytes().split()) for file in files)
