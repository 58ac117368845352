"""The mask gate stops on answers that are all alike, all short, cut, looping or empty, and on a disk that is too small."""

import json
from collections import namedtuple

import numpy as np
import orjson
import pyarrow as pa
import pytest

from draftline import mask_gate, provenance
from draftline.errors import DraftlineError
from draftline.manifest import Manifest
from draftline.mask_gate import collect, gate_all, gate_shard, judge
from draftline.tokens import SCHEMA, Samples

WORDS = {1: "OK", 2: ".", 3: "<stop>"}
LIMITS = {
    "dominant_share": 0.2,
    "dominant_rows": 50,
    "short_share": 0.05,
    "truncated_share": 0.3,
    "looping_share": 0.1,
    "empty_share": 0.02,
    "waive": [],
}
BLOCK = 8
CONFIG = {"mask_gate": LIMITS, "block_size": BLOCK, "tapped_layers": 5, "hidden_states": {"storage": "bf16"}}
RECORD = {"rule": "tokens", "id": "t" * 16, "settings": "s" * 16, "inputs": {}}
MANIFEST = Manifest(**{**dict.fromkeys(Manifest.__dataclass_fields__), "hidden_size": 576})


def decode(ids):
    return "".join(WORDS.get(token, f"<{token}>") for token in ids)


def samples(answers, source="chat", finished=True, counts=None, examples=None, first=0):
    """Samples of one source with these answers behind a prompt of four tokens."""
    rows = [
        {
            "id": f"{first + n:032x}",
            "source": source,
            "status": "ok",
            "input_ids": [50, 51, 52, 53, *answer],
            "spans": [4, 4 + len(answer)],
            "finished": finished,
        }
        for n, answer in enumerate(answers)
    ]
    counts = counts if counts is not None else {"ok": len(rows), "kept": len(rows)}
    return Samples(pa.Table.from_pylist(rows, schema=SCHEMA), {source: counts}, {source: examples or {}})


def healthy(count, source="chat", first=0, seed=0):
    """Answers whose lengths lie spread between 20 and 219 tokens."""
    lengths = np.random.default_rng(seed).permutation(np.arange(count)) % 200 + 20
    return samples([[60] * (length - 1) + [3] for length in lengths], source, first=first)


def verdict(*shards, block_size=BLOCK, **changes):
    return judge(collect(shards), LIMITS | changes, block_size, decode, "results/tokens/0000.parquet")


OK = [1, 2, 3]


def test_healthy_answers_pass_with_figures():
    result = verdict(healthy(200))
    assert result.failures == []
    figures = result.figures["chat"]
    assert (figures["rows"], figures["finished"]) == (200, 200)
    assert figures["supervised_tokens"] == sum(range(20, 220))
    assert figures["dominant"]["share"] == 0.005
    assert result.limits == {k: v for k, v in LIMITS.items() if k != "waive"} | {"short_below": 16}


def test_the_famous_failure_is_told_in_full():
    """300 answers, all of them "OK."."""
    (message,) = verdict(samples([OK] * 300)).failures
    assert "\n" not in message
    for part in (
        "results/tokens/0000.parquet: source chat: ",
        "300 of 300 answers that stopped by themselves (100.0%) have exactly 3 supervised tokens, like 'OK.<stop>'",
        "mask_gate.dominant_share: 0.2",
        "have fewer than 16 supervised tokens (mask_gate.short_share: 0.05)",
        f"samples {0:032x}, {1:032x}, {2:032x};",
        "raise mask_gate.dominant_share and mask_gate.short_share, or waive it with a reason in mask_gate.waive",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("alike", "others", "fails"),
    [(40, 160, False), (41, 159, True), (49, 0, False), (50, 0, True), (10, 40, False), (11, 39, True)],
)
def test_a_dominant_mask_sum_needs_the_share_and_the_rows(alike, others, fails):
    """Over 20% of at least 50 rows; 20% itself is allowed."""
    answers = [[60] * 999 + [3]] * alike
    result = verdict(healthy(others), samples(answers, first=1000))
    assert ["dominant_share" in text for text in result.failures] == [True] * fails


@pytest.mark.parametrize(
    ("short", "others", "fails"), [(10, 190, False), (11, 189, True), (1, 3, False), (2, 2, True), (20, 0, True)]
)
def test_short_answers_have_a_share_and_a_single_row_is_none(short, others, fails):
    answers = [[60] * (length - 1) + [3] for length in np.arange(short) % 15 + 1]
    result = verdict(healthy(others), samples(answers, first=1000), dominant_share=1.0)
    assert [f"{short} of {short + others} answers" in text for text in result.failures] == [True] * fails


@pytest.mark.parametrize(
    ("loops", "of", "fails"),
    [(2, 8, False), (3, 8, False), (4, 8, True), (14, 49, False), (15, 49, True), (11, 50, True)],
)
def test_a_share_of_few_rows_is_over_its_limit_only_beyond_chance(loops, of, fails):
    """Wilson's bounds of 3, 4 of 8 and 14, 15 of 49 are 0.161, 0.249 and 0.193, 0.210."""
    answers = [[60] * (19 + n) + [3] for n in range(60)]
    counts = {"ok": of - loops, "repetition": loops, "kept": of}
    found = verdict(samples(answers, counts=counts), looping_share=0.2).failures
    assert bool(found) == fails


@pytest.mark.parametrize(("length", "fails"), [(15, True), (16, False)])
def test_short_means_under_two_blocks(length, fails):
    answers = samples([[60] * (length - 1) + [3]] * 20)
    assert bool(verdict(answers, dominant_rows=50).failures) == fails
    assert verdict(answers, block_size=16).failures


def test_rows_that_were_cut_are_not_judged_by_length():
    cut = samples([[60] * 96] * 300, finished=False, counts={"truncated": 300, "kept": 300}, first=1000)
    result = verdict(healthy(60), cut, truncated_share=1.0)
    assert result.failures == []
    assert (result.figures["chat"]["rows"], result.figures["chat"]["finished"]) == (360, 60)


@pytest.mark.parametrize(
    ("status", "key", "word"),
    [
        ("truncated", "truncated_share", "truncated"),
        ("repetition", "looping_share", "loops"),
        ("empty", "empty_share", "empty"),
    ],
)
def test_statuses_have_limits_over_all_completions_kept_or_not(status, key, word):
    answers = [[60] * (19 + n) + [3] for n in range(60)]
    counts = {"ok": 60, status: 40, "kept": 60, "no_anchor": 0}
    examples = {status: ["a" * 32, "b" * 32, "c" * 32]}
    (message,) = verdict(samples(answers, counts=counts, examples=examples)).failures
    assert f"40 of 100 completions (40.0%) are {word} (mask_gate.{key}: {LIMITS[key]})" in message
    assert f"samples {'a' * 32}, {'b' * 32}, {'c' * 32};" in message
    allowed = verdict(samples(answers, counts=counts, examples=examples), **{key: 0.4})
    assert allowed.failures == []
    assert allowed.figures["chat"][key] == 0.4


def test_a_source_of_which_no_row_was_kept_is_still_judged():
    (message,) = verdict(samples([], counts={"empty": 9, "ok": 1}, examples={"empty": ["a" * 32]})).failures
    assert "9 of 10 completions (90.0%) are empty" in message


def test_sources_are_judged_apart():
    """A source that is right does not hide one that is wrong."""
    result = verdict(healthy(5000), samples([OK] * 60, source="code", first=9000))
    assert [message.split(": ")[1] for message in result.failures] == ["source code"]


def test_a_waiver_lets_a_source_pass_and_keeps_its_reason_and_failure():
    waiver = {"source": "chat", "reason": "a yes or no is right here"}
    result = verdict(samples([OK] * 300), samples([OK] * 100, source="code"), waive=[waiver])
    assert len(result.failures) == 1
    assert "source code" in result.failures[0]
    (waived,) = result.waived
    assert waived | waiver == waived
    assert "300 of 300 answers" in waived["failure"]


def test_the_text_of_a_dominant_value_is_the_one_most_rows_have():
    answers = [[1, 1, 3]] * 2 + [OK] * 60
    assert verdict(samples(answers)).figures["chat"]["dominant"]["text"] == "OK.<stop>"
    long = verdict(samples([[1] * 400 + [3]] * 60)).figures["chat"]["dominant"]["text"]
    assert long == "OK" * 24 + " ..."


def test_shares_equal_those_counted_row_by_row():
    generator = np.random.default_rng(1)
    lengths = generator.integers(2, 40, 500)
    shards = [samples([[7] * n for n in part], first=1000 * k) for k, part in enumerate(np.split(lengths, 5))]
    figures = verdict(*shards).figures["chat"]
    by_sum = {int(n): int((lengths == n).sum()) for n in lengths}
    assert figures["dominant"]["rows"] == max(by_sum.values())
    assert by_sum[figures["dominant"]["mask_sum"]] == max(by_sum.values())
    assert figures["short"]["rows"] == sum(1 for n in lengths if n < 16)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(shard, number=0):
    path = f"results/tokens/{number:04d}.parquet"
    provenance.write_parquet(path, shard.table, RECORD, {"counts": shard.counts, "examples": shard.examples})
    return path


GATE = "results/gates/mask/0000.json"


def run_shard(path, config=CONFIG):
    gate_shard(path, GATE, decode, MANIFEST, config, RECORD)


def test_a_passed_gate_states_the_bytes_to_come_and_is_equal_every_time(folder):
    shard = healthy(200)
    run_shard(write(shard))
    first = (folder / GATE).read_bytes()
    result = orjson.loads(first)
    tokens = sum(len(row) for row in shard.table["input_ids"].to_pylist())
    assert result["passed"] is True
    assert result["figures"]["hidden_states"] == {
        "tokens": tokens,
        "layers": 5,
        "hidden_size": 576,
        "storage": "bf16",
        "bytes": tokens * 5 * 576 * 2,
    }
    assert provenance.read(GATE) == RECORD
    run_shard("results/tokens/0000.parquet")
    assert (folder / GATE).read_bytes() == first


def test_a_failed_gate_leaves_its_figures_beside_its_place_until_it_passes(folder):
    path = write(samples([OK] * 300))
    with pytest.raises(DraftlineError, match=r"like 'OK.<stop>'") as caught:
        run_shard(path)
    failed = folder / "results/gates/mask/0000.failed.json"
    assert str(caught.value).splitlines()[1:] == ["see results/gates/mask/0000.failed.json"]
    result = json.loads(failed.read_text())
    assert result["passed"] is False
    assert result["figures"]["sources"]["chat"]["dominant"]["share"] == 1.0
    assert result["failures"] == str(caught.value).splitlines()[:1]
    assert not (folder / GATE).exists()
    waiver = {"source": "chat", "reason": "a yes or no is right here"}
    run_shard(path, CONFIG | {"mask_gate": LIMITS | {"waive": [waiver]}})
    assert json.loads((folder / GATE).read_text())["waived"][0]["reason"] == waiver["reason"]
    assert not failed.exists()
    with pytest.raises(DraftlineError):
        run_shard(path)
    assert not (folder / GATE).exists()


def test_several_failing_sources_are_two_lines_with_the_worst_first(folder):
    shards = [samples([OK] * 60 + [[60] * (20 + n) for n in range(60)], source="a_half")]
    shards += [samples([OK] * 60, source=f"all{n}") for n in range(3)]
    paths = [write(shard, number) for number, shard in enumerate(shards)]
    with pytest.raises(DraftlineError) as caught:
        gate_all(paths, "results/gates/mask.json", decode, CONFIG, RECORD)
    first, second = str(caught.value).splitlines()
    assert first.startswith("results/tokens: source all0: ")
    assert second == "and 3 more; see results/gates/mask.failed.json"


def test_the_overall_gate_sees_what_no_shard_has_rows_enough_to_see(folder):
    """Shards of 30 rows, each with 15 of one mask sum: too few for a shard's gate."""
    paths = []
    for number in range(4):
        answers = [[60] * 299 + [3]] * 15 + [[60] * (20 + n) for n in range(number * 15, number * 15 + 15)]
        paths.append(write(samples(answers, first=1000 * number), number))
        gate_shard(paths[-1], f"results/gates/mask/{number:04d}.json", decode, MANIFEST, CONFIG, RECORD)
    with pytest.raises(DraftlineError, match=r"60 of 120 .* \(50.0%\) have exactly 300 supervised tokens"):
        gate_all(paths, "results/gates/mask.json", decode, CONFIG, RECORD)


def test_no_sample_at_all_fails_overall_and_not_in_a_shard(folder):
    path = write(samples([], counts={"error": 3}))
    run_shard(path)
    with pytest.raises(DraftlineError, match=r"no sample is left to train on \(completions: 3 error\)"):
        gate_all([path], "results/gates/mask.json", decode, CONFIG, RECORD)


Usage = namedtuple("Usage", "total used free")


def test_a_disk_too_small_for_the_states_stops_with_the_figures(folder, monkeypatch):
    """The disk is the machine's: only its free space is made up here."""
    shard = healthy(200)
    path = write(shard)
    needed = sum(len(row) for row in shard.table["input_ids"].to_pylist()) * 5 * 576 * 2
    monkeypatch.setattr(mask_gate.shutil, "disk_usage", lambda place: Usage(10**12, 0, needed - 1))
    with pytest.raises(
        DraftlineError, match=r"^results/hidden_states: the hidden states of results/tokens/0000"
    ) as caught:
        run_shard(path)
    for part in (f"take {needed / 1e6:.3g} MB", "x 5 layers x 1,152 bytes, bf16", "hidden_states.layers"):
        assert part in str(caught.value)
    assert not (folder / GATE).exists()
    monkeypatch.setattr(mask_gate.shutil, "disk_usage", lambda place: Usage(10**12, 0, needed))
    run_shard(path)


def test_fp8_states_take_a_byte_a_value_and_four_for_each_scale(folder):
    shard = healthy(200)
    run_shard(write(shard), {**CONFIG, "hidden_states": {"storage": "fp8_e4m3"}})
    tokens = sum(len(row) for row in shard.table["input_ids"].to_pylist())
    assert orjson.loads((folder / GATE).read_bytes())["figures"]["hidden_states"]["bytes"] == tokens * 5 * (576 + 4)


def test_states_that_are_there_already_need_no_room(folder, monkeypatch):
    shard = healthy(200)
    path = write(shard)
    needed = sum(len(row) for row in shard.table["input_ids"].to_pylist()) * 5 * 576 * 2
    states = folder / "results/hidden_states/0000/0000.safetensors"
    states.parent.mkdir(parents=True)
    with open(states, "wb") as file:
        file.truncate(needed)
    monkeypatch.setattr(mask_gate.shutil, "disk_usage", lambda place: Usage(10**12, 0, 0))
    run_shard(path)
    other = write(shard, 1)
    with pytest.raises(DraftlineError, match="the disk has room for 0 bytes"):
        gate_shard(other, "results/gates/mask/0001.json", decode, MANIFEST, CONFIG, RECORD)


def test_the_disk_asked_is_the_one_that_results_lies_on(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(mask_gate.shutil, "disk_usage", lambda p: asked.append(str(p)) or Usage(1, 0, 10**12))
    run_shard(write(healthy(20)))
    assert asked == ["results"]
    (folder / "results/hidden_states").mkdir()
    run_shard("results/tokens/0000.parquet")
    assert asked[1:] == ["results/hidden_states"]
