"""A training small enough for tests: real artifacts of a made-up target, and the segments that a workflow would run.

Run as a program it trains one segment in a folder made by `build`, with a checkpoint after each step: what a test kills.
"""

import math
from pathlib import Path

import pyarrow as pa
import torch

from draftline import provenance
from draftline.drafter import segment as training
from draftline.manifest import Manifest
from draftline.states_writer import Sample, write_states
from draftline.visits import segment_visits

V, H, LAYERS = 64, 16, [1, 3]
SHARDS, PARTS, SAMPLES = 2, 2, 5
MANIFEST, HEADS = "results/target/manifest.json", "results/target/heads.safetensors"
MASK, LABELS = "results/stats/mask.parquet", "results/stats/tokens.parquet"

SETTINGS = {
    "layers": 2,
    "block_size": 4,
    "heads": None,
    "kv_heads": None,
    "head_dim": None,
    "intermediate_size": None,
    "rope_theta": None,
    "max_position_embeddings": None,
    "sliding_window": None,
    "layer_types": None,
    "epochs": 2,
    "batch": 3,
    "anchors": 6,
    "gamma": None,
    "lr": 0.01,
    "warmup": 0.1,
    "weight_decay": 0.01,
    "clip": 1.0,
    "head": "seen",
    "seed": 0,
}


def record(rule, name):
    return {"rule": rule, "id": provenance.digest(name), "settings": "0" * 16, "inputs": {}}


def manifest(**changes):
    values = {
        "kind": "path",
        "model": "model",
        "name": "made-up",
        "revision": None,
        "model_type": "llama",
        "architecture": "LlamaForCausalLM",
        "wrapper": False,
        "config_sha256": "c" * 64,
        "weights_sha256": "a" * 64,
        "num_layers": 6,
        "layer_types": ["full_attention"] * 6,
        "hidden_size": H,
        "intermediate_size": 24,
        "vocab_size": V,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "norm_plus_one": False,
        "tie_word_embeddings": False,
        "eos_token_ids": [1],
        "pad_token_id": None,
        "mask_token_id": 63,
        "mask_token_rule": "spare embedding row",
        "tokenizer_length": 60,
        "chat_template": "",
        "chat_template_sha256": "b" * 64,
        "special_tokens": {},
        "think_open": None,
        "think_close": None,
        "generation": {},
        "dtype": "float32",
        "trust_remote_code": False,
    }
    return Manifest(**{**values, **changes})


def part_path(shard, part):
    return f"results/hidden_states/{shard}/{part}.safetensors"


def write_part(path, samples, weights_sha256="a" * 64, layers=LAYERS, kernels=None, storage="bf16"):
    generator = torch.Generator().manual_seed(int(Path(path).parent.name + Path(path).stem))
    facts = {
        "target": {"name": "made-up", "weights_sha256": weights_sha256},
        "kernels": kernels or {"full_attention": "sdpa"},
        "dtype": "float32",
        "versions": {"torch": "2"},
    }
    with write_states(path, record("hidden_states", str(path)), samples, layers, H, storage, facts) as writer:
        for n, sample in enumerate(samples):
            writer.put(n, torch.randn(len(sample.input_ids), len(layers) * H, generator=generator))


def build(folder):
    """Manifest, heads, parts and stats below `folder`/results."""
    folder, generator = Path(folder), torch.Generator().manual_seed(0)
    manifest().write(folder / MANIFEST, record("target", "target"))
    heads = {name: torch.randn(V, H, generator=generator) for name in ("embed_tokens.weight", "lm_head.weight")}
    facts = {"tie_word_embeddings": False, "norm_plus_one": False, "rms_norm_eps": 1e-6}
    provenance.write_safetensors(
        folder / HEADS, {**heads, "norm.weight": torch.ones(H)}, record("target", "target"), facts
    )
    rows, labels = [], set()
    for number in range(SHARDS * PARTS):
        shard, part = f"{number // PARTS:04d}", f"{number % PARTS:04d}"
        samples = []
        for n in range(SAMPLES):
            length = int(torch.randint(12, 40, (), generator=generator))
            ids = torch.randint(2, 20, (length,), generator=generator).int()
            mask = torch.arange(length) >= 6
            samples.append(Sample(f"{number * SAMPLES + n:032x}", ids, mask))
            rows.append({"id": samples[-1].id, "source": "a", "length": length, "mask_sum": length - 6})
            labels |= set(ids[mask].tolist())
        write_part(folder / part_path(shard, part), samples)
    provenance.write_parquet(folder / MASK, pa.Table.from_pylist(rows), record("mask_stats", "stats"))
    tokens = pa.table({"token": pa.array(sorted(labels), pa.int32())})
    provenance.write_parquet(folder / LABELS, tokens, record("mask_stats", "stats"))


def folder_of(segments, segment):
    return f"results/drafters/of_{segments}/segments/{segment}"


def train(segments, segment, save_every=60.0, device="cpu", **changes):
    """Train one of `segments` segments in the working directory; the folder of its artifacts."""
    values = {**SETTINGS, **changes}
    folder = folder_of(segments, segment)
    visits = segment_visits(SHARDS, PARTS, values["epochs"], segments, segment)
    training.train_segment(
        config={
            "drafters": {"demo": values},
            "segments": segments,
            "shards": SHARDS,
            "hidden_states": {"parts_per_shard": PARTS},
        },
        drafter="demo",
        segment=segment,
        manifest=Manifest.load(MANIFEST),
        heads=HEADS,
        mask=MASK,
        labels=LABELS,
        previous=f"{folder_of(segments, segment - 1)}/state.safetensors" if segment > 1 else None,
        parts=list(dict.fromkeys(part_path(shard, part) for _, shard, part in visits)),
        state=f"{folder}/state.safetensors",
        metrics=f"{folder}/metrics.parquet",
        record=record("train_segment", folder),
        device=device,
        save_every=save_every,
    )
    return Path(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    training.SAVE_SHARE = math.inf
    train(1, 1, save_every=0.0)
