"""What the choice of an engine means for a plan: GPUs, options of the jobs, and what is stale."""

import copy

import pytest
import yaml
from snakemake.resources import Resource, Resources
from snakemake.utils import validate
from test_config import ROOT, SCHEMA

from draftline import plan

MODEL_JOBS = ("canary", "completions", "bench_completions")


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """Makes a plan of config.yaml on GPUs, with other values for some of its sections."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(plan, "planned", lambda: {"settings": {}})

    def make(kind, **sections):
        config = yaml.safe_load((ROOT / "config.yaml").read_text())
        config["run"]["device"] = "cuda"
        config["target"]["dtype"] = "bfloat16"
        config["completions"]["engine"] = kind
        config.update(copy.deepcopy(sections))
        validate(config, str(SCHEMA))
        return plan.Plan(config, tmp_path, [], main=False)

    return make


@pytest.mark.parametrize(
    ("engine", "gpus"),
    [("transformers", [1, 1, 1]), ("openai", [1, 0, 0]), ("dataset", [1, 0, 1]), ("sglang", [2, 2, 2])],
)
def test_only_jobs_that_work_with_a_model_ask_for_gpus(planned, engine, gpus):
    of = planned(engine, engine={"tensor_parallel": 2})
    assert [of.resource(rule, "gpus") for rule in MODEL_JOBS] == gpus
    for rule, count in zip(MODEL_JOBS, gpus):
        options = of.run_options(rule)
        assert options["device"] == ("cuda" if count else "cpu")
        assert options.get("gpus", 0) == count


def test_a_benchmark_has_an_engine_and_settings_of_its_own(planned):
    entries = {"big": {"engine": "sglang", "tensor_parallel": 4}, "far": {"engine": "openai", "tokens": 7}}
    of = planned("transformers", engine={"requests": 3}, engine_benchmarks=entries)
    assert [of.resource("engine_benchmark", "gpus", entry=name) for name in entries] == [4, 0]
    options = of.run_options("engine_benchmark", "far")
    assert (options["device"], options["engine"]["tokens"], options["engine"]["requests"]) == ("cpu", 7, 3)
    assert of.run_options("completions")["engine"]["tokens"] == 2_000_000
    values = of.values("engine_benchmark", "far")["config"]["benchmark"]
    assert values["settings"] == {"endpoints": [], "allow_retokenize": False, "tokens": 7}
    assert (values["concurrency"], values["prompts"]) == ([16, 64, 256], 512)


def test_a_benchmark_of_more_gpus_than_there_are_is_named_before_it_starts(planned, capsys):
    of = planned("transformers", engine_benchmarks={"big": {"engine": "sglang", "tensor_parallel": 4}})
    of.bound_gpus(Resources({"gpu": Resource("gpu", 2)}))
    assert "a job of engine_benchmark big needs gpu=4, and jobs may hold gpu=2 together" in capsys.readouterr().err


@pytest.mark.parametrize("rule", [*MODEL_JOBS, "report"])
def test_how_servers_are_asked_makes_nothing_stale(planned, rule):
    before = planned("openai").values(rule, None)
    there = {"endpoints": [{"url": "http://a", "api_key_env": "KEY"}], "requests": 7, "tokens": 8}
    assert planned("openai", engine=there).values(rule, None) == before
    assert planned("openai", engine_benchmarks={"a": {"engine": "openai"}}).values(rule, None) == before
    allowed = planned("openai", engine={"allow_retokenize": True}).values(rule, None)
    assert (allowed == before) == (rule == "report")


@pytest.mark.parametrize("rule", MODEL_JOBS)
def test_the_permission_to_retokenize_is_nothing_to_another_engine(planned, rule):
    before = planned("transformers").values(rule, None)
    assert planned("transformers", engine={"allow_retokenize": True}).values(rule, None) == before
    assert "allow_retokenize" not in str(before)
