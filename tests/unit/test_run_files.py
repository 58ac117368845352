"""What ran last in a folder is told by the run files, also after a change of the config and its undoing."""

import os
from pathlib import Path

import yaml
from snakemake.utils import validate

import preflight
from draftline import plan

ROOT = Path(__file__).resolve().parents[2]


def run(least):
    """Plan a run with that limit of the preflight."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["run"]["preflight"] = {"gemm_share": least}
    plan.Plan(plan.resolve(config, ROOT, validate, main=True), ROOT, [], main=True).announce([])


def test_limits_are_those_of_the_last_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTLINE_RUN", "")  # The plan sets it, and the test is to leave nothing behind.
    for age, least in ((30, 0.3), (20, 0.2)):
        run(least)
        for path in Path("results/settings/run").glob("*.json"):
            os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    assert preflight.limits()["gemm_share"] == 0.2
    run(0.3)
    assert preflight.limits()["gemm_share"] == 0.3
