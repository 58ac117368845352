"""Completions by engine `openai` as a target of the workflow, from a real server."""

import os

import pyarrow.parquet as parquet
from tiny_run import make_run

from draftline import provenance
from transformers_serve import serving, text_only

SHARD = "results/completions/0000.parquet"
TEXT_SERVER = "engine: {{allow_retokenize: true, endpoints: [{{url: '{url}', api_key_env: SERVER_KEY}}]}}\n"


def test_a_running_server_completes_the_shards(tiny_target, tmp_path):
    run = make_run(tmp_path / "run")
    run.edit("tiny.yaml", "limit: 16}\n    code: {paths: resources/prompts/code.jsonl, limit: 16}", "limit: 6}")
    run.edit("tiny.yaml", "  sampling: {temperature: 1.0}", "  sampling: {temperature: 0}")
    run.edit("tiny.yaml", "completions:\n", "completions:\n  engine: openai\n")
    text_only(tiny_target.folder / "model", tmp_path / "served")
    with serving(tmp_path / "served", tmp_path / "log") as url:
        run.config.write_text(run.config.read_text() + TEXT_SERVER.format(url=url))
        run.snakemake(SHARD, env={**os.environ, "SERVER_KEY": "s3cret"})
    table = parquet.read_table(run.folder / SHARD)
    assert table["retokenized"].to_pylist() == [True] * 6
    assert "error" not in table["status"].to_pylist()
    assert provenance.parquet_facts(run.folder / SHARD, "engine") == "openai"
    assert provenance.parquet_facts(run.folder / SHARD, "retokenized") == 6
    for path in (run.folder / "results").rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path
    run.edit("tiny.yaml", url, "http://127.0.0.1:9")
    assert run.pending(SHARD) == {}, "where the servers are makes nothing stale"
    run.edit("tiny.yaml", "allow_retokenize: true", "allow_retokenize: false")
    assert "completions" in run.pending(SHARD)
