"""Completions by engine `openai` as a target of the workflow, from a real server."""

import json
import os

import pyarrow.parquet as parquet
import pytest
from tiny_run import make_run

from draftline import provenance
from transformers_serve import serving, text_only

SHARD = "results/completions/0000.parquet"
BENCHMARKS = ("served", "own")
TEXT_SERVER = """\
engine: {{allow_retokenize: true, endpoints: [{{url: '{url}', api_key_env: SERVER_KEY}}]}}
engine_benchmarks:
  served: {{engine: openai, tokens: 50000, concurrency: [1, 2], prompts: 2}}
  own: {{engine: transformers, concurrency: [3], prompts: 8}}
"""


def test_a_running_server_completes_the_shards(tiny_target, tmp_path):
    run = make_run(tmp_path / "run")
    run.edit("tiny.yaml", "limit: 16}\n    code: {paths: resources/prompts/code.jsonl, limit: 16}", "limit: 6}")
    run.edit("tiny.yaml", "  sampling: {temperature: 1.0}", "  sampling: {temperature: 0}")
    run.edit("tiny.yaml", "completions:\n", "completions:\n  engine: openai\n")
    text_only(tiny_target.folder / "model", tmp_path / "served")
    with serving(tmp_path / "served", tmp_path / "log") as url:
        run.config.write_text(run.config.read_text() + TEXT_SERVER.format(url=url))
        figures = [f"results/benchmarks/engine/{name}.json" for name in BENCHMARKS]
        run.snakemake(SHARD, *figures, env={**os.environ, "SERVER_KEY": "s3cret"})
    stored = [path.read_bytes().count(b"\n") for path in (run.folder / "results/.resume/rows").glob("*/*/*.jsonl")]
    assert sum(stored) == 6, "no row twice, and none by the benchmarks"
    served, own = (json.loads((run.folder / path).read_text()) for path in figures)
    assert [level["concurrency"] for level in served["levels"]] == [1, 2]
    assert (served["settings"]["tokens"], served["prompts_are_repeated"], served["hardware"]) == (50000, False, None)
    assert (own["prompts_are_repeated"], own["levels"][0]["requests"]) == (True, 8)
    for level in (*served["levels"], *own["levels"]):
        assert level["errors"] == 0
        assert level["output_tokens"] >= level["requests"]
        rate = level["output_tokens"] / level["seconds"]
        assert level["output_tokens_per_second"] == pytest.approx(rate, rel=0.01)
    assert served["levels"][0]["latency_seconds"]["p95"] >= served["levels"][0]["latency_seconds"]["median"] > 0
    assert own["engine_version"].startswith("transformers")
    table = parquet.read_table(run.folder / SHARD)
    assert table["retokenized"].to_pylist() == [True] * 6
    assert "error" not in table["status"].to_pylist()
    assert provenance.parquet_facts(run.folder / SHARD, "engine") == "openai"
    assert provenance.parquet_facts(run.folder / SHARD, "retokenized") == 6
    for path in (run.folder / "results").rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path
    run.edit("tiny.yaml", url, "http://127.0.0.1:9")
    pending = run.pending(SHARD, *figures)
    assert pending == {"engine_benchmark": 1}, "where the servers are makes nothing stale but what measured them"
    run.edit("tiny.yaml", "allow_retokenize: true", "allow_retokenize: false")
    assert "completions" in run.pending(SHARD)
