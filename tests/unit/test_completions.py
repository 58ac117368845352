"""Prompts become completions: from the row store where they are known, else from the target."""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftline import completions, provenance, settings
from draftline.chat import Chat
from draftline.completions import COMPLETIONS_SCHEMA, bench_config, complete, share_holds
from draftline.engines import Result
from draftline.errors import DraftlineError
from draftline.fingerprint import fingerprint

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CONFIG = {
    "engine": "transformers",
    "max_new_tokens": 24,
    "extend": {"share": 0, "max_new_tokens": 24},
    "sampling": {"temperature": 0},
    "seed": 0,
    "thinking": 0,
    "loop": {"period": 64, "repeats": 4, "tokens": 64},
}
SAMPLED = {**CONFIG, "sampling": {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "min_p": 0.0}}
RUN = {"device": "cpu", "batch": 8}
COLUMNS = [name for name in COMPLETIONS_SCHEMA.names if name != "attempts"]


def prompt_row(number, response=None, source="numbers", **more):
    messages = [{"role": "user", "content": f"Add {number} and {number * number}." + " Think twice." * (number % 5)}]
    return {
        "id": hashlib.sha256(f"{number}".encode()).hexdigest()[:32],
        "source": source,
        "name": None,
        "messages": json.dumps(messages),
        "tools": None,
        "response": response and json.dumps(response),
        **more,
    }


ROWS = sorted(map(prompt_row, range(16)), key=lambda row: row["id"])


@pytest.fixture(scope="module")
def chat(tiny_target):
    return Chat.load(tiny_target.manifest_path, tiny_target.tokenizer_path)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """An empty row store, and a list that takes each batch of requests that an engine gets."""
    monkeypatch.chdir(tmp_path)
    batches = []
    real = completions.open_engine

    @contextlib.contextmanager
    def counting(*arguments):
        with real(*arguments) as engine:
            generate = engine.generate

            def counted(requests, sampling):
                batches.append(list(requests))
                return generate(requests, sampling)

            engine.generate = counted
            yield engine

    monkeypatch.setattr(completions, "open_engine", counting)
    return batches


def changed(monkeypatch, change):
    """Let what the engine answers pass through `change`, a generator function of its answers."""
    real = completions.open_engine

    @contextlib.contextmanager
    def changing(*arguments):
        with real(*arguments) as engine:
            generate = engine.generate
            engine.generate = lambda requests, sampling: change(generate(requests, sampling))
            yield engine

    monkeypatch.setattr(completions, "open_engine", changing)
    monkeypatch.setattr(completions, "BACKOFF_SECONDS", 0.0)


def test_each_prompt_gets_a_row_in_its_place(asked, chat, tiny_target):
    table = complete(ROWS, chat, tiny_target.manifest, CONFIG, RUN)
    assert table.schema == COMPLETIONS_SCHEMA
    for row, prompt in zip(table.to_pylist(), ROWS, strict=True):
        ids = chat.prompt_ids(json.loads(prompt["messages"]))
        assert (row["id"], row["source"], row["prompt_ids"]) == (prompt["id"], "numbers", ids)
        assert row["assistant_spans"] == [len(ids), len(ids) + len(row["completion_ids"])]
        stopped = row["completion_ids"][-1] in tiny_target.manifest.eos_token_ids
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(row["completion_ids"]) == CONFIG["max_new_tokens"]
        assert (row["attempts"], row["thinking"]) == (1, False)
        assert row["text"] is not None


def test_no_row_is_generated_twice(asked, chat, tiny_target):
    manifest = tiny_target.manifest
    first = complete(ROWS[:12], chat, manifest, CONFIG, RUN)
    assert [len(batch) for batch in asked] == [12]
    halves = [complete(part, chat, manifest, CONFIG, RUN) for part in (ROWS[:6], ROWS[6:12])]
    assert len(asked) == 1, "another number of shards costs nothing"
    assert [row for half in halves for row in half.to_pylist()] == first.to_pylist()
    complete(ROWS, chat, manifest, CONFIG, RUN)
    assert [request.id for request in asked[1]] == [row["id"] for row in ROWS[12:]], "new prompts cost their own rows"
    complete(ROWS, chat, manifest, {**CONFIG, "seed": 5, "thinking": 0}, RUN)
    assert len(asked) == 2, "a greedy answer depends on no seed"
    complete(ROWS, chat, dataclasses.replace(manifest, weights_sha256="other"), CONFIG, RUN)
    assert len(asked[2]) == 16


@pytest.mark.parametrize("config", [CONFIG, SAMPLED], ids=["greedy", "sampled"])
def test_a_larger_limit_continues_cut_rows_and_a_smaller_one_cuts_them_back(asked, chat, tiny_target, config):
    manifest = tiny_target.manifest
    small, large = {**config, "max_new_tokens": 5}, {**config, "max_new_tokens": 24}
    before = complete(ROWS, chat, manifest, small, RUN)
    cut = {row["id"]: row for row in before.to_pylist() if row["finish_reason"] == "length"}
    after = complete(ROWS, chat, manifest, large, RUN)
    assert {request.id: list(request.sampled_ids) for request in asked[1]} == {
        name: row["completion_ids"] for name, row in cut.items()
    }
    assert {request.max_new_tokens for request in asked[1]} == {19}
    assert complete(ROWS, chat, manifest, small, RUN).to_pylist() == before.to_pylist()
    assert len(asked) == 2
    os.rename("results", "earlier")
    assert complete(ROWS, chat, manifest, large, RUN).to_pylist() == after.to_pylist(), "as if never interrupted"


def test_a_share_of_the_rows_goes_on_to_a_larger_limit(asked, chat, tiny_target):
    config = {**CONFIG, "max_new_tokens": 4, "extend": {"share": 0.5, "max_new_tokens": 9}}
    rows = complete(ROWS, chat, tiny_target.manifest, config, RUN).to_pylist()
    for row in rows:
        limit = 9 if share_holds("extend", row["id"], 0.5) else 4
        assert row["finish_reason"] == "stop" or len(row["completion_ids"]) == limit
    assert {len(row["completion_ids"]) for row in rows if row["finish_reason"] == "length"} == {4, 9}


def test_thinking_is_on_for_its_share_of_the_prompts(asked, chat, tiny_target):
    rows = complete(ROWS, chat, tiny_target.manifest, {**CONFIG, "thinking": 0.5}, RUN).to_pylist()
    for row, prompt in zip(rows, ROWS, strict=True):
        assert row["thinking"] == share_holds("thinking", row["id"], 0.5)
        assert row["prompt_ids"] == chat.prompt_ids(json.loads(prompt["messages"]), thinking=row["thinking"])
        assert (row["reasoning"] is not None) == row["thinking"]
    assert {row["thinking"] for row in rows} == {True, False}


def test_shares_are_nested_and_of_their_size():
    ids = [hashlib.sha256(f"{n}".encode()).hexdigest()[:32] for n in range(4000)]
    shares = [{i for i in ids if share_holds("thinking", i, share)} for share in (0, 0.25, 0.7, 1)]
    assert shares[0] < shares[1] < shares[2] < shares[3] == set(ids)
    assert not shares[0]
    assert abs(len(shares[1]) / 4000 - 0.25) < 0.03
    both = {i for i in ids if share_holds("extend", i, 0.5)} & shares[2]
    assert abs(len(both) / 4000 - 0.35) < 0.03, "one share says nothing of another"


def test_a_row_that_fails_is_tried_again_and_its_tries_are_counted(asked, chat, tiny_target, monkeypatch):
    calls = []

    def flaky(answers):
        calls.append(None)
        for number, (request, result) in enumerate(answers):
            if number % 4 == 0:
                continue  # An engine may lose a request without a word.
            yield request, Result([], "error", "the server is gone") if number % 4 == 1 and len(calls) < 3 else result

    undisturbed = complete(ROWS, chat, tiny_target.manifest, CONFIG, RUN)
    os.rename("results", "earlier")
    changed(monkeypatch, flaky)
    table = complete(ROWS, chat, tiny_target.manifest, CONFIG, RUN)
    errors = [row for row in table.to_pylist() if row["status"] == "error"]
    done = table.filter([row["status"] != "error" for row in table.to_pylist()])
    assert {1, 2, 3} <= set(done["attempts"].to_pylist())
    assert all(row["attempts"] == completions.ATTEMPTS and row["completion_ids"] == [] for row in errors)
    assert errors, "the first row of each batch never comes"
    expected = {row["id"]: row for row in undisturbed.select(COLUMNS).to_pylist()}
    assert all(row == expected[row["id"]] for row in done.select(COLUMNS).to_pylist())
    monkeypatch.undo()
    assert completions.count(table) == {
        "numbers": {
            status: table["status"].to_pylist().count(status) for status in sorted(set(table["status"].to_pylist()))
        }
    }


def test_a_row_in_error_is_asked_for_again_by_the_next_run(asked, chat, tiny_target, monkeypatch):
    with monkeypatch.context() as patch:
        changed(patch, lambda answers: iter(()))
        table = complete(ROWS[:3], chat, tiny_target.manifest, CONFIG, RUN)
        assert table["status"].to_pylist() == ["error"] * 3
    table = complete(ROWS[:3], chat, tiny_target.manifest, CONFIG, RUN)
    assert "error" not in table["status"].to_pylist()


def test_a_shard_is_not_finished_by_an_engine_that_answers_no_more(asked, chat, tiny_target, monkeypatch):
    def ends(answers):
        for _, (request, result) in zip(range(4 if len(asked) == 1 else 0), answers):
            yield request, result

    with monkeypatch.context() as patch:
        changed(patch, ends)
        with pytest.raises(DraftlineError, match=r"12 of 16 rows failed 4 times, and the last try answered none \("):
            complete(ROWS, chat, tiny_target.manifest, CONFIG, RUN)
    asked.clear()
    assert "error" not in complete(ROWS, chat, tiny_target.manifest, CONFIG, RUN)["status"].to_pylist()
    assert [len(batch) for batch in asked] == [12], "the four that were answered are kept"


def test_ids_behind_the_first_stop_token_are_cut(asked, chat, tiny_target, monkeypatch):
    stop = tiny_target.manifest.eos_token_ids[0]

    def babbling(answers):
        for request, result in answers:
            yield request, Result([*result.ids[:3], stop, 7, 7], "length")

    changed(monkeypatch, babbling)
    for row in complete(ROWS, chat, tiny_target.manifest, CONFIG, RUN).to_pylist():
        assert row["finish_reason"] == "stop"
        assert row["completion_ids"].index(row["completion_ids"][-1]) == len(row["completion_ids"]) - 1


def test_the_mask_token_in_a_prompt_or_a_completion_stops_the_run(asked, chat, tiny_target):
    manifest = tiny_target.manifest
    used = dataclasses.replace(manifest, mask_token_id=chat.prompt_ids(json.loads(ROWS[0]["messages"]))[-1])
    with pytest.raises(
        DraftlineError, match=r"target\.mask_token_id: \d+: occurs in the data .*of numbers"
    ) as in_prompt:
        complete(ROWS, chat, used, CONFIG, RUN)
    assert not asked
    assert "\n" not in str(in_prompt.value)
    sampled = complete(ROWS, chat, manifest, CONFIG, RUN)["completion_ids"].to_pylist()
    prompts = {token for row in ROWS for token in chat.prompt_ids(json.loads(row["messages"]))}
    token = next(token for ids in sampled for token in ids if token not in prompts)
    for _ in range(2):
        with pytest.raises(DraftlineError, match=rf"target\.mask_token_id: {token}: occurs"):
            complete(ROWS, chat, dataclasses.replace(manifest, mask_token_id=token), CONFIG, RUN)
        os.rename("results", "earlier") if os.path.exists("results") else None


def test_a_prompt_that_leaves_no_room_for_its_answer_is_refused(asked, chat, tiny_target):
    manifest = dataclasses.replace(tiny_target.manifest, max_position_embeddings=60)
    with pytest.raises(DraftlineError, match=r"max_new_tokens 24 exceed the target's context of 60"):
        complete(ROWS, chat, manifest, CONFIG, RUN)


def test_an_unknown_engine_is_named(asked, chat, tiny_target):
    with pytest.raises(DraftlineError, match=r"completions\.engine: vllm: no such engine"):
        complete(ROWS, chat, tiny_target.manifest, {**CONFIG, "engine": "vllm"}, RUN)


def test_dataset_takes_the_answers_of_the_files(asked, chat, tiny_target):
    turns = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Another."},
    ]
    rows = [
        prompt_row(1, {"role": "assistant", "content": "OK."}, messages=json.dumps(turns)),
        prompt_row(2, {"role": "assistant", "content": "Blue it is."}),
        prompt_row(3),
        prompt_row(4, {"role": "assistant", "content": ""}),
    ]
    found = complete(rows, chat, tiny_target.manifest, {**CONFIG, "engine": "dataset"}, RUN).to_pylist()
    assert [row["status"] for row in found] == ["ok", "ok", "error", "empty"]
    assert not asked
    whole, spans = chat.conversation([*turns, {"role": "assistant", "content": "OK."}])
    (earlier, last) = spans
    assert found[0]["prompt_ids"] == whole[: last[0]]
    assert found[0]["completion_ids"] == whole[slice(*last)]
    assert found[0]["assistant_spans"] == [*earlier, *last]
    assert found[0]["completion_ids"][-1] in tiny_target.manifest.eos_token_ids
    assert [row["text"] for row in found] == ["OK.", "Blue it is.", None, ""]


def test_an_evaluation_set_is_completed_greedily():
    config = bench_config(
        {
            "engine": "transformers",
            "evaluate": {"max_new_tokens": 24, "thinking": True},
            "completions": {"loop": CONFIG["loop"]},
        }
    )
    assert config["sampling"]["temperature"] == 0
    assert (config["thinking"], config["max_new_tokens"]) == (1, 24)


def command(target, place, rows):
    """Command line of scripts/completions.py in `place`, for a shard with `rows`."""
    import pyarrow

    record = {"rule": "prompts", "id": "p", "settings": "s", "inputs": {}}
    provenance.write_parquet(place / "prompts.parquet", pyarrow.Table.from_pylist(rows), record)
    values = {"rule": "completions", "config": {"completions": CONFIG}, "code": fingerprint("completions")}
    return [
        *(sys.executable, SCRIPTS / "completions.py", "--settings", settings.write(values, place / "settings")),
        *("--run", json.dumps({**RUN, "batch": 2}), "--threads", "1"),
        *("--manifest", target.manifest_path, "--tokenizer", target.tokenizer_path),
        *("--prompts", place / "prompts.parquet", "--output", place / "0000.parquet"),
    ]


def stored(place):
    return sum(path.read_bytes().count(b"\n") for path in (place / "results/.resume/rows").glob("*/*/*.jsonl"))


def test_a_killed_job_goes_on_where_it_was_and_ends_as_an_undisturbed_one(asked, chat, tiny_target, tmp_path, hold):
    """It is killed when it would store its fourth row, where it waits for that."""
    place = tmp_path / "job"
    place.mkdir()
    line = command(tiny_target, place, ROWS)
    hold.at("completions", "draftline.rows", "RowStore.add", 4)
    job = subprocess.Popen(line, cwd=place, env=hold.environment, stderr=subprocess.DEVNULL)
    hold.held("completions")
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    assert stored(place) == 3
    assert not (place / "0000.parquet").exists()
    again = subprocess.run(line, cwd=place, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "3 of 16 rows are in the store" in again.stderr
    assert stored(place) == len(ROWS)
    undisturbed = complete(ROWS, chat, tiny_target.manifest, CONFIG, RUN)
    table = provenance.read_parquet(place / "0000.parquet")
    assert table.to_pylist() == undisturbed.to_pylist()
    facts = {
        name: provenance.parquet_facts(place / "0000.parquet", name)
        for name in ("sampling", "engine", "engine_version", "counts")
    }
    assert (facts["sampling"], facts["engine"]) == ({"temperature": 0}, "transformers")
    assert facts["engine_version"].startswith("transformers 5.")
    assert facts["counts"] == completions.count(undisturbed)
