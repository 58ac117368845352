"""Samples are prompt and completion joined; what the target wrote is supervised, and nothing else."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from draftline import provenance, settings
from draftline.errors import DraftlineError
from draftline.fingerprint import fingerprint
from draftline.manifest import Manifest
from draftline.tokens import SCHEMA, mask_sums, read_samples, supervised, tokenize

SCRIPTS = Path(provenance.__file__).resolve().parent.parent
STOP, MASK = 2, 90
SETTINGS = {"keep": ["ok", "truncated"], "max_length": 100, "turns": "last"}
RECORD = {"rule": "completions", "id": "c" * 16, "settings": "s" * 16, "inputs": {}}


def manifest(**changes):
    values = dict.fromkeys(Manifest.__dataclass_fields__)
    values |= {"vocab_size": 100, "eos_token_ids": [STOP, 3], "pad_token_id": STOP, "mask_token_id": MASK}
    return Manifest(**values | changes)


def row(number, prompt, answer, status="ok", finish="stop", source="chat", spans=None):
    return {
        "id": f"{number:032x}",
        "source": source,
        "prompt_ids": prompt,
        "completion_ids": answer,
        "finish_reason": finish,
        "status": status,
        "assistant_spans": spans or [len(prompt), len(prompt) + len(answer)],
    }


def completions(*rows):
    ids = pa.list_(pa.int32())
    types = {"prompt_ids": ids, "completion_ids": ids, "assistant_spans": ids}
    names = row(0, [], []).keys()
    return pa.table({name: pa.array([r[name] for r in rows], types.get(name, pa.string())) for name in names})


def made(*rows, engine="transformers", manifest=manifest(), **changes):  # noqa: B008 - frozen
    return tokenize(completions(*rows), engine, manifest, SETTINGS | changes, "results/completions/0000.parquet")


def test_the_completion_is_supervised_with_its_think_block_and_stop_token():
    samples = made(row(1, [5, 6, 7], [40, 8, 41, 9, STOP]))
    assert samples.table.to_pylist() == [
        {
            "id": f"{1:032x}",
            "source": "chat",
            "status": "ok",
            "input_ids": [5, 6, 7, 40, 8, 41, 9, STOP],
            "spans": [3, 8],
            "finished": True,
        }
    ]
    assert samples.table.schema == SCHEMA


def test_a_pad_id_that_is_the_stop_token_hides_nothing():
    """The pad id of `manifest()` is the stop token: only lengths may decide."""
    samples = made(row(1, [STOP, 6, STOP], [8, STOP, 9, STOP]), row(2, [5], [STOP, STOP]))
    ids, mask = supervised(samples.table)
    assert ids.tolist() == [STOP, 6, STOP, 8, STOP, 9, STOP, 5, STOP, STOP]
    assert mask.tolist() == [False] * 3 + [True] * 4 + [False] + [True] * 2


def test_a_sample_is_cut_at_max_length_and_then_not_finished():
    samples = made(row(1, [5, 6], [7, 8, 9, STOP]), row(2, [5], [7, 8, STOP]), max_length=5)
    assert samples.table["input_ids"].to_pylist() == [[5, 6, 7, 8, 9], [5, 7, 8, STOP]]
    assert samples.table["spans"].to_pylist() == [[2, 5], [1, 4]]
    assert samples.table["finished"].to_pylist() == [False, True]


def test_a_row_that_ran_into_its_limit_is_not_finished():
    samples = made(row(1, [5], [7, 8], status="truncated", finish="length"))
    assert samples.table["finished"].to_pylist() == [False]


def test_rows_without_two_supervised_tokens_in_a_row_are_counted_and_left_out():
    samples = made(
        row(1, [5, 6, 7], [STOP]),
        row(2, [5, 6, 7], [8, STOP], source="code"),
        row(3, [5] * 9, [7, 8, STOP]),
        row(4, [5] * 10, [7, 8, STOP]),
        row(5, [5] * 12, [7, 8, STOP]),
        max_length=11,
    )
    assert samples.table["id"].to_pylist() == [f"{2:032x}", f"{3:032x}"]
    assert samples.counts == {"chat": {"ok": 4, "no_anchor": 3, "kept": 1}, "code": {"ok": 1, "kept": 1}}


def test_only_statuses_of_tokens_keep_are_kept_and_all_are_counted():
    rows = [
        row(1, [5], [7, STOP]),
        row(2, [5], [7, 8], status="truncated", finish="length"),
        row(3, [5], [7, 7, 7], status="repetition", finish="length"),
        row(4, [5], [], status="error", finish="error"),
        *(row(n, [5], [STOP], status="empty") for n in range(5, 10)),
    ]
    samples = made(*rows)
    assert samples.table["status"].to_pylist() == ["ok", "truncated"]
    assert samples.counts == {"chat": {"ok": 1, "truncated": 1, "repetition": 1, "error": 1, "empty": 5, "kept": 2}}
    assert samples.examples["chat"]["empty"] == [f"{n:032x}" for n in (5, 6, 7)]
    assert made(*rows, keep=["repetition"]).table["status"].to_pylist() == ["repetition"]


CONVERSATION = row(1, [5, 10, 11, STOP, 6, 7], [12, 13, STOP], spans=[1, 4, 6, 9])


@pytest.mark.parametrize(
    ("engine", "turns", "spans"),
    [
        ("dataset", "last", [6, 9]),
        ("dataset", "all", [1, 4, 6, 9]),
        ("transformers", "all", [6, 9]),  # Earlier turns of a prompt are not the target's own words.
    ],
)
def test_turns_all_supervises_every_assistant_turn_of_a_dataset(engine, turns, spans):
    assert made(CONVERSATION, engine=engine, turns=turns).table["spans"].to_pylist() == [spans]


def test_spans_behind_the_cut_are_dropped():
    samples = made(CONVERSATION, engine="dataset", turns="all", max_length=6)
    assert samples.table["spans"].to_pylist() == [[1, 4]]


@pytest.mark.parametrize("spans", [[1, 4], [1, 4, 6, 10], [4, 1, 6, 9], [1, 7, 6, 9], [-1, 4, 6, 9], [1, 4, 6]])
def test_spans_outside_the_conversation_are_refused(spans):
    with pytest.raises(DraftlineError, match=r"^results/completions/0000.parquet: sample 0+1: assistant_spans"):
        made({**CONVERSATION, "assistant_spans": spans}, engine="dataset", turns="all")


@pytest.mark.parametrize("spans", [[1, 3, 6, 9], [1, 1, 6, 9]])
def test_a_finished_turn_without_its_stop_token_is_refused(spans):
    with pytest.raises(
        DraftlineError, match=r"the finished turn at tokens 1..\d does not end with a stop token .*\[2, 3\]"
    ):
        made({**CONVERSATION, "assistant_spans": spans}, engine="dataset", turns="all")


def test_a_completion_said_to_have_stopped_ends_with_a_stop_token():
    with pytest.raises(DraftlineError, match=r"the finished turn at tokens 1..3"):
        made(row(1, [5], [7, 8]))
    assert made(row(1, [5], [7, 3])).counts["chat"]["kept"] == 1  # Any of the stop tokens will do.


def test_a_mask_token_in_the_data_stops_with_the_key_and_a_sample():
    rows = [row(1, [5], [7, STOP]), row(2, [MASK], [7, STOP]), row(3, [MASK], [7, STOP])]
    with pytest.raises(DraftlineError, match=r"target.mask_token_id: 90: occurs in the data \(sample 0+2 of results/c"):
        made(*rows)


def test_a_mask_token_behind_the_cut_does_no_harm():
    assert made(row(1, [5], [7, 8, MASK, STOP]), max_length=3).counts["chat"]["kept"] == 1


def test_ids_of_another_target_are_refused():
    with pytest.raises(DraftlineError, match=r"sample 0+1: token id 100 is none of the target's 100"):
        made(row(1, [5], [100, STOP]))


def test_no_rows_make_an_empty_table():
    samples = made()
    assert samples.table.schema == SCHEMA
    assert len(samples.table) == len(mask_sums(samples.table["spans"])) == len(supervised(samples.table)[0]) == 0


def test_masks_equal_those_painted_token_by_token():
    generator = np.random.default_rng(0)
    rows = []
    for number in range(200):
        edges = np.sort(generator.choice(np.arange(1, 60), size=2 * generator.integers(1, 4), replace=False)).tolist()
        whole = generator.integers(4, 80, edges[-1])
        whole[[end - 1 for end in edges[1::2]]] = STOP
        prompt, answer = np.split(whole, [edges[-2]])
        rows.append(row(number, prompt.tolist(), answer.tolist(), spans=edges))
    samples = made(*rows, engine="dataset", turns="all", max_length=40)
    kept = {r["id"]: r for r in rows}
    painted = []
    for name in samples.table["id"].to_pylist():
        spans = kept[name]["assistant_spans"]
        length = min(40, len(kept[name]["prompt_ids"] + kept[name]["completion_ids"]))
        painted.append([any(a <= t < b for a, b in zip(spans[::2], spans[1::2])) for t in range(length)])
    ids, mask = supervised(samples.table)
    assert mask.tolist() == list(itertools.chain(*painted))
    assert mask_sums(samples.table["spans"]).tolist() == [sum(paint) for paint in painted]
    whole = [(kept[name]["prompt_ids"] + kept[name]["completion_ids"])[:40] for name in samples.table["id"].to_pylist()]
    assert ids.tolist() == list(itertools.chain(*whole))
    assert 100 < len(samples.table) < 200  # Some had no anchor before the cut.


def test_the_reader_takes_slices_for_what_they_are():
    """Parquet row groups and filters give arrays with an offset; it must not shift the rows."""
    whole = made(row(1, [5], [7, STOP]), row(2, [5, 6], [8, 9, STOP]), row(3, [5], [7, 8, 9, STOP])).table
    assert mask_sums(whole.slice(1)["spans"]).tolist() == [3, 4]
    assert mask_sums(whole.slice(1, 1)["spans"]).tolist() == [3]
    ids, mask = supervised(whole.slice(1, 1))
    assert (ids.tolist(), mask.tolist()) == ([5, 6, 8, 9, STOP], [False, False, True, True, True])


COMMAND = """
import sys
sys.path.insert(0, {scripts!r})
sys.argv = ["tokens.py", *{arguments!r}]
import runpy
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit as end:
    print(end.code, sorted({{"torch", "transformers"}} & sys.modules.keys()))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results").mkdir()
    record = {**RECORD, "rule": "target"}
    manifest().write(tmp_path / "results/manifest.json", record)
    provenance.write_json(tmp_path / "results/tokenizer.json", {"model": {provenance.KEY: record}}, record)
    facts = {"engine": "transformers"}
    table = completions(row(1, [5], [7, STOP]), row(2, [5], [7, STOP]))
    provenance.write_parquet(tmp_path / "results/completions.parquet", table, RECORD, facts)
    return tmp_path


def command(folder):
    values = {"rule": "tokens", "config": {"tokens": SETTINGS}, "code": fingerprint("tokens")}
    path = settings.write(values, folder / "results/settings/tokens")
    arguments = ["--settings", str(path)]
    for name, file in {
        "manifest": "manifest.json",
        "tokenizer": "tokenizer.json",
        "completions": "completions.parquet",
    }.items():
        arguments += [f"--{name}", f"results/{file}"]
    arguments += ["--output", "results/0000.parquet"]
    text = COMMAND.format(scripts=str(SCRIPTS), script=str(SCRIPTS / "tokens.py"), arguments=arguments)
    return subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_writes_the_artifact_without_torch_or_transformers(folder):
    result = command(folder)
    assert result.stdout == "0 []\n", result.stderr
    samples = read_samples(folder / "results/0000.parquet")
    assert len(samples.table) == 2
    assert samples.counts == {"chat": {"ok": 2, "kept": 2}}
    record = provenance.read(folder / "results/0000.parquet")
    assert record["rule"] == "tokens"
    assert record["inputs"]["results/completions.parquet"] == RECORD["id"]
    before = (folder / "results/0000.parquet").read_bytes()
    command(folder)
    assert (folder / "results/0000.parquet").read_bytes() == before


def test_a_completions_file_cut_in_the_middle_is_refused_by_path(folder):
    path = folder / "results/completions.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    result = command(folder)
    assert result.stdout == "1 []\n"
    assert "results/completions.parquet: damaged or cut short" in result.stderr
    assert not (folder / "results/0000.parquet").exists()
    assert "Traceback" not in result.stderr
