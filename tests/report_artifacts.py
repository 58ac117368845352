"""A finished run's artifacts, made up but written by the real writers, for tests of report and table.

Figures follow the shape of real ones: trained above the baselines, loss falling, one source cut at the token limit.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers
import torch

from draftline import provenance
from draftline.manifest import Manifest
from draftline.report.page import Inputs

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
PROMPT = (
    "<|im_start|>user\nComplete this function.\n\n```python\ndef running_mean(values, width):\n"
    '    """Mean over a sliding window of `width` values."""\n```<|im_end|>\n<|im_start|>assistant\n'
)
THINKING = (
    "<think>\nThe window slides, so I keep a sum: add the new value, drop the oldest one. Grüße! 你好 🙂\n</think>\n\n"
)
ANSWER = (
    "```python\ndef running_mean(values, width):\n\ttotal, means = 0.0, []\n    for n, value in enumerate(values):\n"
    "        total += value\n        if n >= width:\n            total -= values[n - width]\n"
    "        means.append(total / min(n + 1, width))\n    return means\n```<|im_end|>"
)
WAIVER = {
    "source": "chat",
    "reason": "greetings are short by nature, and wanted",
    "failure": "results/tokens: source chat: 9 of 80 that stopped by themselves (11.2%) have fewer than 16 supervised tokens",
}


@dataclasses.dataclass
class Run:
    """How large the made-up run is. `scale` multiplies counts, to see big numbers."""

    drafters: tuple[str, ...] = ("demo",)
    benches: tuple[str, ...] = ("humaneval", "fresh")
    sources: tuple[str, ...] = ("python_functions", "explanation", "chat")
    budgets: tuple[int, ...] = (8, 16, 32)
    shards: int = 4
    segments: int = 2
    steps: int = 370
    checkpoints: bool = True
    thinking: bool = True
    block: int = 8
    scale: int = 1
    limit: int = 96


def record(rule: str, path: str, inputs: list[str] | None = None) -> provenance.Record:
    found = {name: provenance.read(name)["id"] for name in inputs or []}
    return {"rule": rule, "id": provenance.identity(path, rule, found), "settings": "0" * 16, "inputs": found}


def note(rule: str, name: str, artifact: str, seconds: float, started: float, device: str = "cpu") -> None:
    """The run record beside a job's log."""
    folder = Path("results/logs", rule)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "rule": rule,
        "id": provenance.read(artifact)["id"],
        "host": "box1",
        "device": device,
        "threads": 2,
        "gpus": int(device == "cuda"),
        "started": started,
        "seconds": seconds,
        "peak_memory_bytes": int(3e8 + 4e6 * seconds),
    }
    (folder / f"{name}.run.json").write_text(json.dumps(facts))


def make_run(run: Run) -> tuple[Inputs, dict[str, Any]]:
    """Write all artifacts below results/ of the working directory. Gives the report's inputs and the config."""
    random = np.random.default_rng(0)
    tokenizer = _target(run)
    note("target", "target", "results/target/manifest.json", 21, 0)
    prompts, completions, tokens = _data(run, random, tokenizer)
    mask = _mask(run, random, tokens)
    gates = _gates(run, tokens)
    states = _states(run, tokens)
    metrics = _metrics(run, random, states)
    evaluations = _evaluations(run, random)
    inputs = Inputs(
        manifest="results/target/manifest.json",
        tokenizer="results/target/tokenizer.json",
        prompts=prompts,
        completions=completions,
        tokens=tokens,
        mask=mask,
        gates=gates,
        metrics=metrics,
        evaluations=evaluations,
    )
    config = {
        "target": {"hub": "example/Tiny-135M", "revision": "abc"},
        "shards": run.shards,
        "prompts": {"sources": {name: {"paths": f"{name}.jsonl", "weight": 1} for name in run.sources}},
        "drafters": {name: {"layers": 2, "block_size": run.block, "lr": 0.002} for name in run.drafters},
        "evaluate": {"budgets": list(run.budgets)},
    }
    return inputs, config


def _target(run: Run) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROMPT, ANSWER] * 3, trainer)
    made = record("target", "results/target/manifest.json")
    values = json.loads(tokenizer.to_str())
    values["model"][provenance.KEY] = made
    with provenance.replacing("results/target/tokenizer.json") as temporary:
        temporary.write_text(json.dumps(values))
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    manifest = Manifest(
        kind="hub",
        model="/models/tiny",
        name="Tiny-135M-Instruct",
        revision="abc",
        model_type="llama",
        architecture="LlamaForCausalLM",
        wrapper=False,
        config_sha256="1" * 64,
        weights_sha256="2" * 64,
        num_layers=30,
        layer_types=["full_attention"] * 30,
        hidden_size=576,
        intermediate_size=1536,
        vocab_size=640,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        norm_plus_one=False,
        tie_word_embeddings=True,
        eos_token_ids=[ids["<|im_end|>"]],
        pad_token_id=ids["<|im_end|>"],
        mask_token_id=639,
        mask_token_rule="spare embedding row",
        tokenizer_length=600,
        chat_template=TEMPLATE,
        chat_template_sha256="3" * 64,
        special_tokens={"eos_token": "<|im_end|>"},
        think_open=ids["<think>"] if run.thinking else None,
        think_close=ids["</think>"] if run.thinking else None,
        generation={"temperature": 0.2, "top_p": 0.9},
        dtype="float32",
        trust_remote_code=False,
    )
    manifest.write("results/target/manifest.json", made)
    return tokenizer


def _data(
    run: Run, random: np.random.Generator, tokenizer: tokenizers.Tokenizer
) -> tuple[list[str], list[str], list[str]]:
    prompts, completions, tokens = [], [], []
    read = {
        name: {"read": 140 * run.scale, "kept": 120 * run.scale, "duplicate": 14 * run.scale, "overlap": 6 * run.scale}
        for name in run.sources
    }
    for shard in range(run.shards):
        name = f"{shard:04d}"
        prompts.append(f"results/prompts/{name}.parquet")
        provenance.write_parquet(prompts[-1], pa.table({"id": []}), record("prompts", prompts[0]), {"counts": read})
        completions.append(f"results/completions/{name}.parquet")
        statuses = {s: {"ok": 22 * run.scale, "truncated": 7 * run.scale, "repetition": run.scale} for s in run.sources}
        facts = {
            "counts": statuses,
            "engine": "transformers",
            "engine_version": "5.24.0",
            "sampling": {"temperature": 0, "top_p": 1},
        }
        provenance.write_parquet(
            completions[-1], pa.table({"id": []}), record("completions", completions[-1], [prompts[shard]]), facts
        )
        note("completions", name, completions[-1], 55 + 9 * shard, 60 + 70 * shard)
        rows = [_row(run, random, tokenizer, source, n) for source in run.sources for n in range(3)]
        tokens.append(f"results/tokens/{name}.parquet")
        kept = {
            s: {"ok": 22 * run.scale, "truncated": 7 * run.scale, "kept": 29 * run.scale, "no_anchor": 0}
            for s in run.sources
        }
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        columns["input_ids"] = pa.array(columns["input_ids"], pa.list_(pa.int32()))
        columns["spans"] = pa.array(columns["spans"], pa.list_(pa.int32()))
        provenance.write_parquet(
            tokens[-1], pa.table(columns), record("tokens", tokens[-1], [completions[-1]]), {"counts": kept}
        )
        note("tokens", name, tokens[-1], 1.2, 340 + shard)
    note("prompts", "prompts", prompts[0], 4.0, 30)
    return prompts, completions, tokens


def _row(run: Run, random: np.random.Generator, tokenizer: tokenizers.Tokenizer, source: str, n: int) -> dict[str, Any]:
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    answer = tokenizer.encode((THINKING if run.thinking else "") + ANSWER, add_special_tokens=False).ids
    if n == 2:
        answer = answer[:-20] + random.integers(10, 500, 400).tolist()
    return {
        "id": hashlib.sha256(f"{source}{n}".encode()).hexdigest()[:32],
        "source": source,
        "status": "truncated" if n == 2 else "ok",
        "input_ids": prompt + answer,
        "spans": [len(prompt), len(prompt) + len(answer)],
        "finished": n != 2,
    }


def _mask(run: Run, random: np.random.Generator, tokens: list[str]) -> str:
    names, sums, finished = [], [], []
    for place, source in enumerate(run.sources):
        own = np.clip(random.lognormal(3.2 + 0.5 * place % 1.5, 0.6, 400), 2, run.limit).astype(np.int32)
        if source == "chat":
            own[:90] = 6
        names += [source] * len(own)
        sums.append(own)
        finished.append(own < run.limit)
    values = np.concatenate(sums)
    table = pa.table({
        "id": ["0" * 32] * len(values),
        "source": names,
        "status": ["ok"] * len(values),
        "shard": np.zeros(len(values), np.int32),
        "length": values + 80,
        "mask_sum": values,
        "finished": np.concatenate(finished),
    })  # fmt: skip
    path = "results/stats/mask.parquet"
    provenance.write_parquet(path, table, record("mask_stats", path, tokens))
    note("mask_stats", "mask_stats", path, 2.5, 350)
    return path


def _gates(run: Run, tokens: list[str]) -> list[str]:
    masks = {
        source: {
            "rows": 96 * run.scale,
            "finished": 80,
            "dominant": {"mask_sum": 6, "rows": 9, "share": 0.1125, "text": "Hello!<|im_end|>"},
            "short": {"rows": 9, "share": 0.1125},
            "truncated_share": 0.24,
        }
        for source in run.sources
    }
    limits = {"dominant_share": 0.2, "short_share": 0.05, "truncated_share": 0.3}
    shards = [f"mask/{shard:04d}" for shard in range(run.shards)]
    figures: dict[str, dict[str, Any]] = {
        "canary": {"sources": masks, "rows": 12},
        **{name: {"sources": masks, "hidden_states": {"tokens": 23_600, "bytes": 135_936_000}} for name in shards},
        "mask": {"sources": masks},
        "hidden_states": {
            "cosine": {"1": {"mean": 0.99998, "min": 0.9997}, "14": {"mean": 0.99996, "min": 0.9991}},
            "best_offset": {"layer": 0, "token": 0},
            "samples": 8,
        },
        **{f"{drafter}/export": {"tensors": 25, "parameters": 9_876_543} for drafter in run.drafters},
    }
    paths = []
    for name, values in figures.items():
        paths.append(f"results/gates/{name}.json")
        waived = [WAIVER] if name == "mask" and "chat" in run.sources else []
        rule = "mask_gate_shard" if name in shards else f"{name.split('/')[-1]}_gate"
        gate = {"passed": True, "figures": values, "limits": limits if "mask" in name else {}, "waived": waived}
        provenance.write_json(paths[-1], gate, record(rule, paths[-1], tokens))
    note("hidden_states_gate", "hidden_states_gate", "results/gates/hidden_states.json", 14, 480)
    return paths


def _states(run: Run, tokens: list[str]) -> list[str]:
    paths = []
    for shard, source in enumerate(tokens):
        paths.append(f"results/hidden_states/{shard:04d}/0000.safetensors")
        facts = {
            "layers": [1, 8, 14, 20, 27],
            "convention": "output of decoder layer i, 0-based, before any final norm",
            "kernels": {"full_attention": "torch sdpa"},
            "dtype": "float32",
            "storage": "bf16",
            "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
            "statistics": {"1": {"mean": 0.1}},
        }
        provenance.write_safetensors(
            paths[-1], {"features": torch.zeros(1)}, record("hidden_states", paths[-1], [source]), facts
        )
        note("hidden_states", f"{shard:04d}-0000", paths[-1], 28 + shard, 360 + 30 * shard)
    return paths


def _metrics(run: Run, random: np.random.Generator, states: list[str]) -> list[str]:
    paths = []
    total = run.steps * run.segments
    for drafter_place, drafter in enumerate(run.drafters):
        for segment in range(1, run.segments + 1):
            steps = np.arange(run.steps * (segment - 1), run.steps * segment, dtype=np.int32)
            course = 1 - np.exp(-4 * steps / total)
            noise = random.normal(0, 1, len(steps))
            table = pa.table({
                "step": steps,
                "epoch": (steps * 12 // total).astype(np.int32),
                "loss": (6.4 - (3.1 - 0.3 * drafter_place) * course + 0.12 * noise).astype(np.float32),
                "accuracy": (0.03 + 0.24 * course + 0.015 * noise).astype(np.float32),
                "tau": (1.02 + 0.55 * course + 0.04 * noise).astype(np.float32),
                "lr": np.full(len(steps), 2e-3, np.float32),
                "grad_norm": np.ones(len(steps), np.float32),
                "tokens": np.full(len(steps), 1100 * run.scale, np.int32),
                "anchors": np.full(len(steps), 192 * run.scale, np.int32),
            })  # fmt: skip
            paths.append(f"results/drafters/{drafter}/segments/{segment}/metrics.parquet")
            provenance.write_parquet(paths[-1], table, record("train_segment", paths[-1], states))
            note("train_segment", f"{drafter}-{segment}", paths[-1], 164 + 9 * segment, 500 + 180 * segment)
    return paths


def _evaluations(run: Run, random: np.random.Generator) -> list[str]:
    paths = []

    def way(tau: float, spread: float) -> dict[str, Any]:
        return {
            "tau": tau,
            "tau_pooled": tau - 0.01,
            "ci95": [tau - spread, tau + spread * 1.1],
            "histogram": [3, 2, 1],
        }

    def write(path: str, drafter: str, bench: str, strength: float, spread: float) -> None:
        first = strength * 0.34
        per_position = [first * 0.5**k for k in range(run.block - 1)]
        chain = {**way(1 + sum(per_position), spread), "per_position": per_position}
        trees = {
            str(b): way(1 + sum(per_position) * (1.6 + 0.03 * b) + (0.012 * b if strength < 1 else 0), 1.4 * spread)
            for b in run.budgets
        }
        values = {
            "drafter": drafter,
            "bench": bench,
            "prompts": 40 if bench == "humaneval" else 10,
            "rounds": 2_345,
            "chain": chain,
            "ddtree": trees,
            "looping_share": 0.05,
            "per_prompt": [],
            "harness": {"temperature": 0, "max_new_tokens": 96, "bonus_token": "counted", "thinking": False},
        }
        provenance.write_json(path, values, record("evaluate", path))
        paths.append(path)
        note("evaluate", f"{drafter}-{bench}-{len(paths)}", path, 9, 900 + len(paths))

    for bench in run.benches:
        spread = 0.03 if bench == "humaneval" else 0.07
        for place, drafter in enumerate(run.drafters):
            write(f"results/evaluation/{drafter}/{bench}.json", drafter, bench, 1.05 - 0.12 * place, spread)
        write(f"results/evaluation/untrained/{bench}.json", "untrained", bench, 0.02, 0.004)
        write(f"results/evaluation/unigram/{bench}.json", "unigram", bench, 0.11, 0.012)
    if run.checkpoints:
        for drafter in run.drafters:
            for segment in range(1, run.segments):
                for bench in run.benches:
                    path = f"results/evaluation/{drafter}/checkpoints/{segment}/{bench}.json"
                    write(path, drafter, bench, 1.05 * segment / run.segments, 0.04)
    return paths
