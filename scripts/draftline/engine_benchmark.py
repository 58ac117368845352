"""Throughput and latency of an engine on real prompts, at several numbers of requests in flight.

Everything is sampled anew: neither does it look into the row store, nor does it leave rows there.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from draftline import gpus, provenance
from draftline.chat import Chat
from draftline.completions import as_prompt
from draftline.engines import Engine, Request, Sampling, engine_version, open_engine
from draftline.errors import DraftlineError
from draftline.manifest import Manifest
from draftline.progress import say

WARM_TOKENS = 8
"""New tokens of the first request, whose answer tells that the engine is ready."""


def make_benchmark(
    prompts: str,
    output: str,
    chat: Chat,
    manifest: Manifest,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
    record: provenance.Record,
) -> None:
    """A prompts.parquet -> benchmarks/engine/{name}.json. `config` is the job's: benchmark, completions."""
    benchmark = config["benchmark"]
    requests = _requests(prompts, chat, config["completions"])
    sampling = Sampling(**config["completions"]["sampling"])
    began = time.monotonic()
    with open_engine(benchmark["engine"], manifest, run, chat) as engine:
        ((_, first),) = engine.generate([replace(requests[0], id="first", max_new_tokens=WARM_TOKENS)], sampling)
        if first.finish_reason == "error":
            raise DraftlineError(f"engine {benchmark['engine']}: {first.error}; correct its settings, then run again")
        ready = time.monotonic() - began
        say(f"{output}: ready after {ready:.1f} s")
        levels = []
        for number, in_flight in enumerate(benchmark["concurrency"]):
            sample = _sample(requests, benchmark["prompts"], number)
            levels.append(_measure(engine, sample, sampling, in_flight))
            say(f"{output}: {_in_words(levels[-1])}")
    result = {
        "engine": benchmark["engine"],
        "engine_version": engine_version(benchmark["engine"], run),
        "settings": benchmark["settings"],
        "sampling": config["completions"]["sampling"],
        "max_new_tokens": config["completions"]["max_new_tokens"],
        "hardware": None if benchmark["engine"] == "openai" else _hardware(run),
        "ready_seconds": round(ready, 2),
        "prompts_are_repeated": len(requests) < benchmark["prompts"] * len(benchmark["concurrency"]),
        "levels": levels,
    }
    provenance.write_json(output, result, record)


def _requests(path: str, chat: Chat, completions: Mapping[str, Any]) -> list[Request]:
    """The prompts of a file as completions ask them, by id. Ids are hashes, so any run of them is a sample."""
    prompts = [as_prompt(row, chat, completions) for row in provenance.read_parquet(path).to_pylist()]
    if not prompts:
        raise DraftlineError(f"{path}: holds no prompts; an engine cannot be measured without")
    return [Request(prompt.id, prompt.ids, [], prompt.limit, prompt.seed) for prompt in prompts]


def _sample(requests: Sequence[Request], count: int, number: int) -> list[Request]:
    """`count` requests, other ones for each `number`: a server answers sooner what it has seen. Begins anew where they end."""
    start = number * count
    return [replace(requests[place % len(requests)], id=f"{number}-{place}") for place in range(start, start + count)]


def _measure(engine: Engine, requests: Sequence[Request], sampling: Sampling, in_flight: int) -> dict[str, Any]:
    """Figures of one call, from its first request to its last result."""
    engine.in_flight = in_flight
    began = time.monotonic()
    results = [result for _, result in engine.generate(requests, sampling)]
    seconds = time.monotonic() - began
    good = [result for result in results if result.finish_reason != "error"]
    latencies = [result.seconds for result in good if result.seconds is not None]
    tokens = sum(len(result.ids) for result in good)
    return {
        "concurrency": in_flight,
        "requests": len(requests),
        "errors": len(requests) - len(good),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
        "output_tokens": tokens,
        "output_tokens_per_second": round(tokens / seconds, 2),
        "requests_per_second": round(len(good) / seconds, 4),
        "latency_seconds": _latency(latencies) if latencies else None,
    }


def _latency(seconds: Sequence[float]) -> dict[str, float]:
    median, p95 = np.percentile(seconds, [50, 95])
    return {"median": round(float(median), 4), "p95": round(float(p95), 4)}


def _in_words(level: Mapping[str, Any]) -> str:
    latency = level["latency_seconds"]
    more = f", latency {latency['median']:.3g} s (median), {latency['p95']:.3g} s (p95)" if latency else ""
    errors = f", {level['errors']} errors" if level["errors"] else ""
    return (
        f"{level['concurrency']} in flight: {level['output_tokens_per_second']:.0f} output tokens/s,"
        f" {level['requests_per_second']:.3g} requests/s{more}{errors}"
    )


def _hardware(run: Mapping[str, Any]) -> dict[str, Any]:
    """What the job works on: its GPUs, or its processor and threads."""
    if run["device"] == "cuda":
        with gpus.Nvml() as nvml:
            return {"gpus": [device.name for device in nvml.visible()]}
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {"cpu": models[0] if models else "unknown", "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or None}
