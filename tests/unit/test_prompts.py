"""Prompts: identity, shards, what is kept and why not, and the command that writes them."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from draftline import provenance, settings, sources
from draftline.chat import Chat
from draftline.curation import REASONS, Curation, Spool
from draftline.errors import DraftlineError
from draftline.fingerprint import SCRIPTS, fingerprint
from draftline.overlap import Overlap
from draftline.prompts import PromptRow, draw_of, prompt_id, read_prompts, shard_of, write_prompts

RECORD = {"rule": "prompts", "id": "1", "settings": "2", "inputs": {}}
QUESTIONS = [f"Question {n}: what is {n} squared?" for n in range(200)]
IDS = [prompt_id([{"role": "user", "content": question}], None) for question in QUESTIONS]


@pytest.fixture(scope="module")
def chat(tiny_target) -> Chat:
    return Chat.load(tiny_target.manifest_path, tiny_target.tokenizer_path)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def conversation(*texts: str, **more: object) -> dict:
    turns = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]
    return {"conversations": turns, **more}


def prompt_file(path: str, rows: list) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def ask(path: str, questions: list[str]) -> str:
    return prompt_file(path, [conversation(question) for question in questions])


def source(*paths: str, weight: float = 1, limit: int | None = None) -> dict:
    return {"paths": list(paths), "weight": weight, "limit": limit}


def prompts_config(max_tokens: int = 1000, on_error: str = "stop", **named: dict) -> dict:
    return {"sources": named, "on_error": on_error, "max_tokens": max_tokens}


def curate(chat: Chat, config: dict, problems: list[str] | None = None) -> tuple[list[PromptRow], dict]:
    spool = Spool(Path("spool"))
    counts = Curation(config, chat, Overlap(problems or []), spool).run(Path.cwd())
    return [row for shard in spool.shards(3) for row in shard], counts


def left_out(counts: dict[str, int]) -> dict[str, int]:
    return {reason: counts[reason] for reason in REASONS if counts[reason]}


# Identity -------------------------------------------------------------------------------------------------------------


def test_id_is_a_hash_of_messages_and_tools_alone():
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert len(int(prompt_id(messages, None), 16).to_bytes(16)) == 16
    assert prompt_id(messages, None) == prompt_id([{"content": "Hi", "role": "user"}], None)
    others = [([{"role": "user", "content": "Hi "}], None), (messages, tools), ([*messages, *messages], None)]
    assert len({prompt_id(*other) for other in [(messages, None), *others]}) == 4


@pytest.mark.parametrize("shards", [1, 2, 3, 64, 1000])
def test_shards_are_equal_ranges_of_the_first_32_bits(shards):
    for number in range(shards):
        first, last = -(-number * 2**32 // shards), -(-(number + 1) * 2**32 // shards) - 1
        assert shard_of(f"{first:08x}" + "f" * 24, shards) == number
        assert shard_of(f"{last:08x}" + "0" * 24, shards) == number


def test_rows_come_back_as_they_were_written(tmp_path):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rom"}}}
    rows = [
        PromptRow("0" * 32, "a", None, [{"role": "user", "content": "Grüße 🙂"}]),
        PromptRow(
            "1" * 32,
            "b",
            "7",
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
            [{"type": "function", "function": {"name": "weather"}}],
            {"role": "assistant", "content": "Sunny.", "reasoning_content": "Hm."},
            "Hi",
        ),
    ]
    write_prompts(tmp_path / "a.parquet", iter(rows), RECORD, {"a": {"read": 2}})
    assert read_prompts(tmp_path / "a.parquet") == rows
    assert provenance.parquet_facts(tmp_path / "a.parquet", "counts") == {"a": {"read": 2}}
    columns = pyarrow.parquet.read_schema(tmp_path / "a.parquet")
    assert columns.names == ["id", "source", "name", "messages", "tools", "response", "problem"]
    assert [field.name for field in columns if not field.nullable] == ["id", "source", "messages"]


def test_a_shard_may_be_empty(tmp_path):
    write_prompts(tmp_path / "a.parquet", iter([]), RECORD, {})
    assert read_prompts(tmp_path / "a.parquet") == []


# What is kept ---------------------------------------------------------------------------------------------------------


def test_every_row_is_kept_or_counted_under_one_reason(folder, chat):
    problem = (
        "Write a function that returns the longest word of a sentence, the first one of them if there are several."
    )
    long = "word " * 400
    path = prompt_file(
        "a.jsonl",
        [
            conversation("Hi", "Hello", id="greeting"),
            conversation("Hi", "Good day"),
            conversation("  "),
            {"conversations": [{"from": "gpt", "value": "Hello"}]},
            {"conversations": [{"from": "narrator", "value": "Once"}]},
            conversation("What is this?", image="1.jpg"),
            conversation(f"Please help. {problem.upper()}"),
            conversation(long),
        ],
    )
    rows, counts = curate(chat, prompts_config(max_tokens=300, on_error="skip", a=source(path)), [problem])
    assert [(row.source, row.name, row.messages) for row in rows] == [
        ("a", "greeting", [{"role": "user", "content": "Hi"}])
    ]
    assert rows[0].response == {"role": "assistant", "content": "Hello"}
    reasons = ("duplicate", "empty", "no_user", "malformed", "non_text", "overlap", "too_long")
    assert left_out(counts["a"]) == dict.fromkeys(reasons, 1)
    assert counts["a"]["read"] == counts["a"]["kept"] + sum(left_out(counts["a"]).values()) == 8


def test_prompt_of_exactly_the_token_limit_is_kept(folder, chat):
    path = ask("a.jsonl", [f"Tell me about {' and '.join(QUESTIONS[:8])}"])
    (row,), _ = curate(chat, prompts_config(a=source(path)))
    length = len(chat.prompt_ids(row.messages, row.tools, thinking=False))
    assert curate(chat, prompts_config(max_tokens=length, a=source(path)))[0] == [row]
    with pytest.raises(DraftlineError, match="too_long 1"):
        curate(chat, prompts_config(max_tokens=length - 1, a=source(path)))


def test_duplicates_are_removed_across_files_and_sources(folder, chat):
    ask("a.jsonl", QUESTIONS[:3])
    ask("b.jsonl", QUESTIONS[2:5])
    ask("c.jsonl", QUESTIONS[4:6])
    rows, counts = curate(chat, prompts_config(first=source("a.jsonl", "b.jsonl"), second=source("c.jsonl")))
    assert sorted(row.id for row in rows) == sorted(IDS[:6])
    assert [row.source for row in rows if row.id == IDS[4]] == ["first"]
    assert (counts["first"]["duplicate"], counts["second"]["duplicate"]) == (1, 1)


def test_order_of_sources_in_the_config_does_not_count(folder, chat):
    ask("a.jsonl", QUESTIONS[:3])
    ask("b.jsonl", QUESTIONS[1:4])
    one, other = source("a.jsonl"), source("b.jsonl")
    assert curate(chat, prompts_config(x=one, y=other)) == curate(chat, prompts_config(y=other, x=one))


def test_weight_keeps_the_same_rows_whatever_else_is_there(folder, chat):
    ask("a.jsonl", QUESTIONS[:100])
    ask("b.jsonl", QUESTIONS[100:])
    alone, _ = curate(chat, prompts_config(x=source("a.jsonl", weight=0.3)))
    among, counts = curate(chat, prompts_config(y=source("b.jsonl"), x=source("b.jsonl", "a.jsonl", weight=0.3)))
    assert {row.id for row in alone} == {id for id in IDS[:100] if draw_of(id) < 0.3}
    assert {row.id for row in alone} < {row.id for row in among}
    assert 15 <= len(alone) <= 45
    assert counts["x"]["weight"] + counts["x"]["kept"] + counts["x"]["duplicate"] == 200


def test_limit_keeps_the_smallest_draws_and_spreads_them_over_all_shards(folder, chat):
    ask("a.jsonl", QUESTIONS)
    rows, counts = curate(chat, prompts_config(a=source("a.jsonl", limit=40)))
    assert [row.id for row in rows] == sorted(sorted(IDS, key=draw_of)[:40])
    assert left_out(counts["a"]) == {"limit": 160}
    assert {shard_of(row.id, 4) for row in rows} == {0, 1, 2, 3}


def test_row_beyond_one_sources_limit_may_come_from_another(folder, chat):
    ask("a.jsonl", QUESTIONS[:10])
    rows, counts = curate(chat, prompts_config(a=source("a.jsonl", limit=4), b=source("a.jsonl")))
    assert [counts[name]["kept"] for name in "ab"] == [4, 6]
    assert len({row.id for row in rows}) == 10


def test_conversation_that_the_template_refuses_is_counted(folder, tiny_target):
    from dataclasses import replace

    from tokenizers import Tokenizer

    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ messages[0].content }}"
    manifest = replace(tiny_target.manifest, chat_template=template)
    strict = Chat(manifest, Tokenizer.from_file(str(tiny_target.tokenizer_path)))
    path = prompt_file("a.jsonl", [conversation("Hi"), conversation("Hi", system="Be brief.")])
    rows, counts = curate(strict, prompts_config(a=source(path)))
    assert len(rows) == 1
    assert left_out(counts["a"]) == {"template": 1}


def test_malformed_row_stops_with_file_line_cause_and_remedy(folder, chat):
    ask("a.jsonl", QUESTIONS[:2])
    with open("a.jsonl", "a", encoding="utf-8") as file:
        file.write('{"conversations": [{"from": "human", "val')
    with pytest.raises(DraftlineError, match=r"a\.jsonl: line 3: not JSON .*prompts\.on_error: skip"):
        curate(chat, prompts_config(a=source("a.jsonl")))
    _, counts = curate(chat, prompts_config(on_error="skip", a=source("a.jsonl")))
    assert left_out(counts["a"]) == {"malformed": 1}


def test_file_of_malformed_rows_alone_stops_even_when_these_are_skipped(folder, chat):
    ask("a.jsonl", QUESTIONS[:2])
    prompt_file("b.jsonl", [{"text": "Hi"}, {"text": "Bye"}])
    with pytest.raises(DraftlineError, match=r"b\.jsonl: all 2 rows are malformed \(line 2: has neither"):
        curate(chat, prompts_config(on_error="skip", a=source("a.jsonl", "b.jsonl")))


def test_no_prompt_left_stops_with_the_path_and_the_reasons(folder, chat):
    prompt_file("a.jsonl", [conversation(" "), conversation("Hi", image="1.jpg")])
    with pytest.raises(DraftlineError, match=r"a\.jsonl: no prompt is left \(empty 1, non_text 1\)"):
        curate(chat, prompts_config(a=source("a.jsonl")))


def test_paths_are_sought_in_the_working_directory_then_beside_the_workflow(folder):
    workflow = folder / "with [brackets]"
    (workflow / "data").mkdir(parents=True)
    for name in ("data/b.jsonl", "data/a.jsonl", "c.jsonl"):
        (workflow / name).touch()
    Path("c.jsonl").touch()
    found = sources.prompt_files(["data/*.jsonl", "*.jsonl", "missing.jsonl"], workflow)
    expected = [workflow / "data/a.jsonl", workflow / "data/b.jsonl", Path("c.jsonl"), Path("missing.jsonl")]
    assert found == expected


def test_missing_prompt_file_stops_with_its_path(folder, chat):
    with pytest.raises(DraftlineError, match=r"nowhere\.jsonl: no such file"):
        curate(chat, prompts_config(a=source("nowhere.jsonl")))


# The command ----------------------------------------------------------------------------------------------------------

RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, {scripts!r})
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("loaded:", *sorted({{"torch", "transformers"}} & sys.modules.keys()))
"""


def run_prompts(tiny_target, config: dict, shards: int, found: dict[str, str] | None = None):
    names = [f"results/prompts/{shard:04d}.parquet" for shard in range(shards)]
    values = {"rule": "prompts", "config": {"prompts": config, "shards": shards}, "code": fingerprint("prompts")}
    values["sources"] = found or sources.prompts(config["sources"], Path.cwd(), Path("digests"))
    file = settings.write(values, Path("results/settings/prompts"))
    options = ["--settings", file, "--manifest", tiny_target.manifest_path, "--tokenizer", tiny_target.tokenizer_path]
    benches = ["results/benches/set/prompts.parquet"]
    command = [sys.executable, "-c", RUN.format(scripts=str(SCRIPTS)), SCRIPTS / "prompts.py", *options]
    done = subprocess.run(
        [*map(str, command), "--benches", *benches, "--outputs", *names], capture_output=True, text=True, timeout=60
    )
    return done, [Path(name) for name in names]


@pytest.fixture
def bench(folder) -> Path:
    path = folder / "results/benches/set/prompts.parquet"
    text = QUESTIONS[0]
    row = PromptRow(IDS[0], "set", "1", [{"role": "user", "content": f"Answer this: {text}"}], problem=text)
    write_prompts(path, [row], RECORD, {})
    return path


def test_command_writes_equal_shards_twice_and_imports_no_model_library(folder, bench, tiny_target):
    ask("a.jsonl", QUESTIONS[:50])
    done, paths = run_prompts(tiny_target, prompts_config(a=source("*.jsonl")), 4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("loaded:")[1].split() == []
    first = [path.read_bytes() for path in paths]
    rows = [row for path in paths for row in read_prompts(path)]
    assert [row.id for row in rows] == sorted(IDS[1:50])
    assert all(shard_of(row.id, 4) == number for number, path in enumerate(paths) for row in read_prompts(path))
    counts = [provenance.parquet_facts(path, "counts") for path in paths]
    assert all(count == counts[0] for count in counts)
    assert (counts[0]["a"]["read"], counts[0]["a"]["kept"], counts[0]["a"]["overlap"]) == (50, 49, 1)
    assert "source" in done.stderr
    assert "overlap" in done.stderr
    assert run_prompts(tiny_target, prompts_config(a=source("*.jsonl")), 4)[0].returncode == 0
    assert [path.read_bytes() for path in paths] == first


def test_command_that_fails_leaves_no_file_and_no_traceback(folder, bench, tiny_target):
    prompt_file("a.jsonl", [conversation("Hi"), {"conversations": 3}])
    done, paths = run_prompts(tiny_target, prompts_config(a=source("a.jsonl")), 2)
    assert done.returncode == 1
    assert "a.jsonl: line 2: conversations must be a list, not a number" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(paths[0].parent.iterdir()) == []


def test_prompt_file_that_changed_since_the_plan_is_refused(folder, bench, tiny_target):
    ask("a.jsonl", QUESTIONS[:5])
    done, paths = run_prompts(tiny_target, prompts_config(a=source("a.jsonl")), 2, {"a/0/a.jsonl": "other"})
    assert done.returncode == 1
    assert "a/0/a.jsonl: this file changed after the run was planned" in done.stderr
    assert not any(path.exists() for path in paths)
