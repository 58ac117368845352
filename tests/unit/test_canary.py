"""The canary takes a few prompts of every source all the way: completions, tokens, mask, and every decoder layer."""

import copy
import json

import orjson
import pyarrow as pa
import pytest

from draftline import canary, provenance
from draftline.chat import Chat
from draftline.errors import DraftlineError
from draftline.tokens import SCHEMA

RECORD = {"rule": "canary", "id": "c" * 16, "settings": "s" * 16, "inputs": {}}
COMPLETIONS = {
    "engine": "transformers",
    "max_new_tokens": 12,
    "extend": {"share": 0, "max_new_tokens": 12},
    "sampling": {"temperature": 0},
    "seed": 0,
    "thinking": 0,
    "loop": {"period": 64, "repeats": 4, "tokens": 64},
}
LIMITS = {
    "dominant_share": 0.2,
    "dominant_rows": 50,
    "short_share": 0.05,
    "truncated_share": 1.0,
    "looping_share": 0.2,
    "empty_share": 0.02,
    "waive": [],
}
CONFIG = {
    "canary": {"prompts_per_source": 3},
    "completions": COMPLETIONS,
    "tokens": {"keep": ["ok", "truncated"], "max_length": 640, "turns": "last"},
    "mask_gate": LIMITS,
    "block_size": 8,
}
PROMPTS = pa.schema([(name, pa.string()) for name in ("id", "source", "name", "messages", "tools", "response")])
GATE = "results/gates/canary.json"


def prompt(number, source="chat", text="Say something about tea.", response=None):
    return {
        "id": f"{number:032x}",
        "source": source,
        "name": None,
        "messages": json.dumps([{"role": "user", "content": text}]),
        "tools": None,
        "response": response and json.dumps({"role": "assistant", "content": response}),
    }


def write(rows, shard=0):
    path = f"results/prompts/{shard:04d}.parquet"
    provenance.write_parquet(path, pa.Table.from_pylist(rows, PROMPTS), RECORD)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def chat(tiny_target):
    return Chat.load(tiny_target.manifest_path, tiny_target.tokenizer_path)


def run(paths, chat, target, **changes):
    canary.run_canary(paths, GATE, chat, target.manifest, CONFIG | changes, {"device": "cpu"}, RECORD)


def test_the_first_prompts_of_every_source_are_taken_from_all_shards(folder):
    paths = [
        write([prompt(n, ("chat", "code")[n % 2]) for n in range(10)]),
        write([prompt(n, ("chat", "rare")[n == 13]) for n in range(10, 20)], 1),
    ]
    chosen = [(int(row["id"], 16), row["source"]) for row in canary.choose(paths, 3)]
    assert sorted(chosen) == [
        (0, "chat"),
        (1, "code"),
        (2, "chat"),
        (3, "code"),
        (4, "chat"),
        (5, "code"),
        (13, "rare"),
    ]


def test_another_number_of_shards_chooses_the_same_prompts(folder):
    rows = [prompt(n, ("chat", "code")[n % 3 == 0]) for n in range(30)]
    whole = canary.choose([write(rows)], 4)
    assert canary.choose([write(rows[:7]), write(rows[7:25], 1), write(rows[25:], 2)], 4) == whole


def test_a_working_target_passes_with_figures_of_sources_and_layers(folder, chat, tiny_target):
    texts = [
        "Tea?",
        "Say something about tea.",
        "Tell me, in a few words, what tea is made of.",
        "And now about coffee.",
    ]
    paths = [write([prompt(n, ("chat", "code")[n % 2], text) for n, text in enumerate(texts * 2)])]
    run(paths, chat, tiny_target, mask_gate=LIMITS | {"short_share": 1.0})
    result = orjson.loads((folder / GATE).read_bytes())
    assert result["passed"] is True
    assert {source: sum(f["counts"].get(s, 0) for s in ("ok", "truncated", "repetition", "empty", "malformed_think"))
            for source, f in result["figures"]["sources"].items()} == {"chat": 3, "code": 3}  # fmt: skip
    layers = result["figures"]["layers"]
    assert [layer["layer"] for layer in layers] == list(range(tiny_target.manifest.num_layers - 1))
    for layer in layers:
        assert layer["std"] > 0
        assert layer["absmax"] > 0
        assert layer["mean_cosine"] >= 0.999
    first = (folder / GATE).read_bytes()
    run(paths, chat, tiny_target, mask_gate=LIMITS | {"short_share": 1.0})
    assert (folder / GATE).read_bytes() == first


def test_300_conversations_answered_ok_stop_at_the_canary(folder, chat, tiny_target):
    rows = [prompt(n, "everything", f"Question {n}: why?", response="OK.") for n in range(300)]
    paths = [write(rows[:150]), write(rows[150:], 1)]
    with pytest.raises(DraftlineError) as caught:
        run(paths, chat, tiny_target, completions=COMPLETIONS | {"engine": "dataset"})
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        "results/prompts: source everything: 100 of 100 answers that stopped by themselves (100.0%) have exactly"
    )
    assert "OK.<|im_end|>" in first
    assert second == "see results/gates/canary.failed.json"
    assert not (folder / GATE).exists()


def test_a_data_set_without_any_answer_stops(folder, chat, tiny_target):
    with pytest.raises(
        DraftlineError, match=r"results/prompts: no sample is left to train on \(completions: 5 error\)"
    ):
        run([write([prompt(n) for n in range(5)])], chat, tiny_target, completions=COMPLETIONS | {"engine": "dataset"})


def samples(*lengths):
    rows = [
        {"id": f"{n:032x}", "source": "chat", "status": "ok", "input_ids": [7] * n, "spans": [0, n], "finished": True}
        for n in lengths
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


@pytest.mark.parametrize(
    ("lengths", "probed"),
    [
        ([30, 10, 10, 20, 40, 50], [10, 20, 30, 40]),
        ([10, 10], [10]),
        ([600, 700, 800, 900, 1000], [512, 448, 384, 320]),
        ([100, 900], [100, 448]),
    ],
)
def test_probes_are_short_and_of_different_lengths(lengths, probed):
    assert [len(ids) for ids in canary.probes(samples(*lengths)).values()] == probed


@pytest.fixture(scope="module")
def model(tiny_target):
    from draftline.loading import load_model

    return load_model(tiny_target.manifest, last_layer=tiny_target.manifest.num_layers - 2)


SEQUENCES = {"a" * 32: [11, 12, 13, 14, 15], "b" * 32: list(range(20, 60)), "c" * 32: list(range(100, 117))}


def check(model):
    return canary.check_layers(model, len(model.layers), SEQUENCES, "the model")


def test_layer_figures_equal_those_of_transformers_hidden_states(model):
    """`hidden_states[i + 1]` of a forward of one sequence is the output of layer i, but for the last, which is normed."""
    import torch

    figures, failures = check(model)
    assert failures == []
    with torch.no_grad():
        states = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in SEQUENCES.values()]
    for layer, values in enumerate(figures[:-1]):
        flat = torch.cat([state[layer + 1].double().flatten() for state in states])
        assert values["std"] == pytest.approx(flat.std(correction=0).item(), rel=1e-3)
        assert values["absmax"] == pytest.approx(flat.abs().max().item(), rel=1e-3)


def spoiled(model, change):
    """The model with the output of layer 1 changed by `change`, as a broken kernel would."""
    broken = copy.deepcopy(model)

    def hook(layer, inputs, output):
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    broken.layers[1].register_forward_hook(hook)
    return broken


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x * float("nan"), "the model: layer 1 holds NaN or Inf"),
        (lambda x: x * 0, "the model: layer 1 is all zero"),
        (lambda x: x[:, :1].expand_as(x).clone(), "the model: layer 1 has one state for all tokens"),
        (lambda x: x + (len(x) > 1) * x.flip(-1), "the model: layer 1 gives other states in a batch than alone"),
    ],
)
def test_a_broken_layer_is_named(model, change, words):
    _, failures = check(spoiled(model, change))
    assert words in failures[0]
