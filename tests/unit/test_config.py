"""A config that cannot work is refused before anything runs, by key and value."""

import copy
from pathlib import Path

import pytest
import yaml
from snakemake.utils import validate

from draftline.config import check, check_benchmarks, check_keys, check_schema
from draftline.errors import DraftlineError

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMA = ROOT / "schemas" / "config.schema.yaml"


def checked(change=None):
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    (change or (lambda config: None))(config)
    check_schema(config, yaml.safe_load(SCHEMA.read_text()))
    check_benchmarks(config, yaml.safe_load(SCHEMA.read_text()))
    validate(config, str(SCHEMA))
    check(config)
    return config


def put(path, value):
    def change(config):
        *parents, last = path.split(".")
        for name in parents:
            config = config.setdefault(name, {})
        config[last] = copy.deepcopy(value)

    return change


def test_the_default_config_is_right_and_gets_its_defaults():
    config = checked()
    assert config["completions"]["sampling"]["top_p"] == 1
    assert config["drafters"]["demo"]["weight_decay"] == 0


@pytest.mark.parametrize("preset", sorted((ROOT / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_are_right(preset):
    checked(lambda config: (config.clear(), config.update(yaml.safe_load(preset.read_text()))))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("completions.temperature", 1, "completions.temperature: no such key; known here: "),
        ("drafters.demo.lr", "fast", "drafters.demo.lr: 'fast': "),
        ("drafters.demo.block_size", 1, "drafters.demo.block_size: 1: "),
        ("drafters.a b", {}, "drafters.a b: not a plain file name"),
        ("drafters.untrained", {}, "drafters.untrained: this name is taken"),
        ("benches.a/b", {"path": "x.jsonl"}, "benches.a/b: not a plain file name"),
        (
            "hidden_states.layers",
            [0, 29],
            r"hidden_states.layers: \[0, 29\]: a target of 30 layers can be tapped at 0..28",
        ),
        ("hidden_states.layers", [5, 3], r"hidden_states.layers: \[5, 3\]: must be ascending"),
        ("target", {"path": "x", "gguf": "y"}, "target: needs exactly one of: path"),
        ("target", {"hub": "a/b"}, "target: needs exactly one of: path | hub\\+revision"),
        ("prompts.decontaminate", ["gsm8k"], "prompts.decontaminate: gsm8k: no such bench; known: humaneval, fresh"),
        ("mask_gate.waive", [{"source": "x", "reason": "because it is so"}], "mask_gate.waive: x: no such source"),
        ("drafters.demo.checkpoints", [3], "drafters.demo.checkpoints: 3: there are only 2 segments"),
        ("drafters.demo.layer_types", ["full_attention"], "drafters.demo.layer_types: 1 entries for 2 layers"),
        ("run.train_segment", {"gpus": 2}, "run.train_segment.gpus: 2: a segment trains on one GPU; set 1"),
        ("segments", 1000, "segments: 1000: drafter demo has only"),
        ("completions.engine", "sglang", "run.device: cpu: engine sglang works on GPUs that the job leases"),
        ("completions.engine", "openai", "engine.endpoints: empty, but the engine is openai"),
        ("engine_benchmarks.a", {"engine": "openai"}, "engine.endpoints: empty, but the engine is openai"),
        ("engine.memory_fraction", 1, "engine.memory_fraction: 1: "),
        ("engine.endpoints", [{"url": "gpu7:8000"}], "engine.endpoints.0.url: 'gpu7:8000': "),
        ("engine_benchmarks.a", {"concurrency": [4]}, "engine_benchmarks.a.engine: missing; add it"),
        ("engine_benchmarks.a", {"engine": "dataset"}, "engine_benchmarks.a.engine: 'dataset': "),
        (
            "engine_benchmarks.a",
            {"engine": "openai", "flgs": []},
            "engine_benchmarks.a.flgs: no such key; known",
        ),
        ("engine_benchmarks.a", {"engine": "openai", "tokens": 0}, "engine_benchmarks.a.tokens: 0: "),
        ("engine_benchmarks.a", {"engine": "sglang"}, "run.device: cpu: engine sglang works on GPUs"),
        ("engine.stall_seconds", 0, "engine.stall_seconds: 0: "),
        ("drafters.demo.lr", "6e-4", "drafters.demo.lr: '6e-4': text to YAML; write a number with a point, as 1.0e-3"),
        ("drafters.demo.lr", "fast", "drafters.demo.lr: 'fast': 'fast' is not of type 'number'"),
        ("drafters.demo", {"heads": 4, "kv_heads": 8}, "drafters.demo.kv_heads: 8: must divide heads, which are 4"),
    ],
)
def test_wrong_values_are_named(key, value, message):
    with pytest.raises(DraftlineError, match=f"config: {message}") as caught:
        checked(put(key, value))
    assert str(caught.value).count("\n") <= 1


def test_a_key_that_stands_twice_is_named_with_its_line(tmp_path):
    """Also where a list lies between; the same key in two places is none."""
    path = tmp_path / "config.yaml"
    path.write_text("a: {x: 1}\nb:\n  - {x: 1, y: 2}\n  - x: 1\n    y: 2\n    x: 3\n")
    with pytest.raises(DraftlineError, match=rf"^{path}: line 6: x: stands here for the second time; remove one$"):
        check_keys(path)
    path.write_text("a: {x: 1}\nb: {x: 1}\n")
    check_keys(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "run.completions.gpus",
            1,
            r"run.completions.gpus: 1: engine sglang takes tensor_parallel x data_parallel = 4",
        ),
        ("engine.flags", ["--port", 1], r"engine.flags: --port: not to be given here \(Draftline sets it itself\)"),
        ("engine.flags", ["--tp=4"], r"engine.flags: --tp: not to be given here \(set engine.tensor_parallel\)"),
        ("engine.flags", ["--api-k", "x"], r"engine.flags: --api-k: not to be given here"),
        ("engine.flags", ["--log-level", "error"], r"engine.flags: --log-level: .*watchdog reads the log"),
        ("target.dtype", "float32", r"target.dtype: float32: SGLang's GPU kernels have no float32; set bfloat16"),
    ],
)
def test_what_an_sglang_server_cannot_be_given_is_named(key, value, message):
    def change(config):
        config["completions"]["engine"] = "sglang"
        config["run"]["device"] = "cuda"
        config["target"]["dtype"] = "bfloat16"
        config["engine"] = {"tensor_parallel": 2, "data_parallel": 2}
        put(key, value)(config)

    with pytest.raises(DraftlineError, match=f"config: {message}"):
        checked(change)


def test_further_flags_of_sglang_are_free():
    def change(config):
        config["completions"]["engine"] = "sglang"
        config["run"]["device"] = "cuda"
        config["target"]["dtype"] = "bfloat16"
        config["engine"] = {"flags": ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", 3, "-x"]}

    assert checked(change)["engine"]["tensor_parallel"] == 1


def test_a_missing_section_is_named():
    with pytest.raises(DraftlineError, match=r"^config: drafters: missing; add it$"):
        checked(lambda config: config.pop("drafters"))


@pytest.mark.parametrize("key", [7, True, None])
@pytest.mark.parametrize("place", ["", "tokens", "drafters.demo"])
def test_a_key_that_is_no_text_is_named(place, key):
    def change(config):
        for name in filter(None, place.split(".")):
            config = config[name]
        config[key] = 1

    with pytest.raises(DraftlineError, match=f"config: {'.'.join(filter(None, [place, str(key)]))}: no such key"):
        checked(change)
