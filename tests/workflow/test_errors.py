"""What a user gets wrong is answered in one or two lines with path, key and remedy, and leaves nothing half-written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import Run


def refusal(run: Run, *targets: str, command: str | None = None) -> str:
    """The message of a run that must fail: Draftline's own last line before Snakemake's report of the failed job."""
    result = run.snakemake(*targets, check=False)
    assert result.returncode != 0
    assert "Traceback" not in result.stdout + result.stderr
    start = f"{command}: " if command else "draftline: "
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line.startswith(start)]
    assert lines, result.stdout + result.stderr
    assert leftovers(run.folder) == []
    return lines[-1]


def leftovers(folder: Path) -> list[Path]:
    return [path for path in (folder / "results").rglob(".*.tmp*") if ".resume" not in path.parts]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("shards: 1", "shards: 1\nshard: 2", "config: shard: no such key; known here: "),
        ("shards: 1", "shards: many", "config: shards: 'many': "),
        ("  small:", "  a/b:", "config: drafters.a/b: not a plain file name"),
        ("block_size: 4", "block_size: 1", "config: drafters.small.block_size: 1: "),
        ("layers: [1, 3, 5]", "layers: [1, 3, 7]", "config: hidden_states.layers: [1, 3, 7]: a target of 8 layers"),
        ("layers: [1, 3, 5]", "layers: [3, 1]", "config: hidden_states.layers: [3, 1]: must be ascending"),
    ],
)
def test_a_wrong_config_stops_before_anything_runs(fresh, old, new, message):
    fresh.edit("tiny.yaml", old, new)
    assert message in refusal(fresh, "-n")
    assert not (fresh.folder / "results").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b'{"conversations": [{"from": "human", "value": "\xff"}]}\n', "UTF-8"),
        (b'{"conversations": [{"from": "human", "value": "a"}]}\n{"conv\n', "line 2"),
    ],
)
def test_a_prompt_file_that_cannot_be_read_is_named(run, content, message):
    run.edit("tiny.yaml", "    code: {", "    mine: {paths: mine.jsonl}\n    code: {")
    if content is not None:
        (run.folder / "mine.jsonl").write_bytes(content)
    line = refusal(run, "results/prompts/0000.parquet", command="prompts")
    assert "mine.jsonl" in line
    assert message in line


def test_malformed_lines_are_counted_when_the_config_says_skip(run):
    run.edit("tiny.yaml", "    code: {", "    mine: {paths: mine.jsonl}\n    code: {")
    run.edit("tiny.yaml", "  max_tokens: 400", "  max_tokens: 400\n  on_error: skip")
    (run.folder / "mine.jsonl").write_text('{"conversations": [{"from": "human", "value": "A question."}]}\n{"conv\n')
    run.snakemake("results/prompts/0000.parquet")


def target_folder(run: Run, tmp_path: Path) -> Path:
    """The tiny target as a user's own folder, named in the config."""
    folder = tmp_path / "target"
    shutil.copytree(run.folder / "results/target/model", folder)
    run.edit("tiny.yaml", "tiny: {seed: 0}", f"path: {folder}")
    return folder


def test_a_target_without_chat_template_is_refused(run, tmp_path):
    folder = target_folder(run, tmp_path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    line = refusal(run, "results/target/manifest.json", command="target")
    assert str(folder) in line
    assert "target.chat_template" in line


def test_a_quantized_target_is_refused_by_name(run, tmp_path):
    folder = target_folder(run, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    line = refusal(run, "results/target/manifest.json", command="target")
    assert "awq" in line


def test_a_wrong_number_of_layers_is_refused(run):
    run.edit("tiny.yaml", "num_layers: 8", "num_layers: 9")
    line = refusal(run, "results/target/manifest.json", command="target")
    assert "num_layers" in line


def test_a_mask_token_that_occurs_in_the_data_is_refused(run):
    run.edit("tiny.yaml", "num_layers: 8", "num_layers: 8\n  mask_token_id: 198")
    result = run.snakemake("results/tokens/0000.parquet", check=False)
    assert result.returncode != 0
    assert "target.mask_token_id" in result.stdout + result.stderr


@pytest.mark.parametrize("share", [0.2, 0.999])
def test_a_cut_part_is_refused_by_training_with_its_path(run, share):
    part = run.folder / "results/hidden_states/0000/0001.safetensors"
    os.truncate(part, int(part.stat().st_size * share))
    for path in (run.folder / "results/drafters").rglob("*.*"):
        path.unlink()
    line = refusal(run, "results/drafters/small/model/config.json", command="train_segment")
    assert "results/hidden_states/0000/0001.safetensors: damaged or cut short" in line


def test_a_cut_completions_file_is_refused_with_its_path(run):
    path = run.folder / "results/completions/0000.parquet"
    os.truncate(path, path.stat().st_size // 2)
    (run.folder / "results/tokens/0000.parquet").unlink()
    line = refusal(run, "results/tokens/0000.parquet", command="tokens")
    assert "results/completions/0000.parquet: damaged or cut short" in line


def test_a_part_of_another_target_is_refused_by_hand_and_made_again_by_the_workflow(run, tmp_path):
    part = "results/hidden_states/0000/0000.safetensors"
    other = run.copy(tmp_path / "other")
    other.edit("tiny.yaml", "tiny: {seed: 0}", "tiny: {seed: 1}")
    other.snakemake(part)
    shutil.copy(other.folder / part, run.folder / part)
    assert run.pending()["hidden_states"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_nothing_and_says_so(run):
    states = run.folder / "results/hidden_states/0000"
    shutil.rmtree(states)
    states.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", states], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        result = run.snakemake("results/hidden_states/0000/0000.safetensors", check=False)
        assert result.returncode != 0
        assert "free some space" in result.stdout + result.stderr
        assert list(states.iterdir()) == []
    finally:
        subprocess.run(["umount", states], check=True)


def without_the_right_to_write_everywhere(command: list[str]) -> list[str]:
    """A command as a usual user has it: root may write into folders that are closed to writing."""
    if os.geteuid() != 0:
        return command
    return ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override", *command]


def test_a_dry_run_works_where_results_cannot_be_written(run):
    run.edit("tiny.yaml", "lr: 0.001", "lr: 0.002")
    folders = [path for path in [run.folder / "results", *run.folder.glob("results/**/*")] if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        command = without_the_right_to_write_everywhere(run.command("-n"))
        result = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, check=False)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert result.returncode == 0, result.stderr
    assert "results/: not writable" in result.stderr
    assert "rule train_segment" in result.stdout


def test_ok_for_every_answer_stops_before_the_hidden_states(fresh):
    """300 conversations whose every answer is "OK."; the gate names the dominant share and no state is extracted."""
    with open(fresh.folder / "ok.jsonl", "w") as file:
        for n in range(300):
            turns = [{"from": "human", "value": f"What is {n} plus {n + 1}?"}, {"from": "gpt", "value": "OK."}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    text = (fresh.folder / "tiny.yaml").read_text()
    start, end = text.index("    chat: {"), text.index("  max_tokens: 400")
    (fresh.folder / "tiny.yaml").write_text(text[:start] + "    ok: {paths: ok.jsonl}\n" + text[end:])
    fresh.edit("tiny.yaml", "completions:\n", "completions:\n  engine: dataset\n")
    result = fresh.snakemake(check=False)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert "100" in output
    assert "dominant" in output or "mask_gate." in output
    assert not list(fresh.folder.glob("results/hidden_states/**/*.safetensors"))


def test_an_environment_without_path_or_home_is_enough(finished):
    result = subprocess.run(
        [
            "env",
            "-i",
            "PATH=/usr/bin:/bin",
            str(Path(sys.executable).with_name("snakemake")),
            "-n",
            "--configfile",
            "tiny.yaml",
        ],
        cwd=finished.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Nothing to be done" in result.stdout + result.stderr


def test_another_directory_holds_the_results(fresh, tmp_path):
    other = tmp_path / "elsewhere"
    other.mkdir()
    command = fresh.command("results/benches/fresh/prompts.parquet", "--directory", str(other))
    command[command.index("tiny.yaml")] = str(fresh.folder / "tiny.yaml")
    result = subprocess.run(command, cwd=fresh.folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (other / "results/benches/fresh/prompts.parquet").exists()
