"""Training of the drafter of presets/qwen3.6-27b.yaml, from files of hidden states, beside the GPU's rate of matrix products.

    .venv/bin/python benchmarks/training.py --work DIR

A part with random states is written to DIR: lengths drawn evenly from 512 to 4096, the last four fifths supervised. Batches of 8 samples
with 512 anchors of 16 slots, head and embedding of 248,320 tokens. Sides, each --rounds times over all samples:
  products   8192 x 8192 x 8192 in bf16, TFLOP/s; before, between and after the others
  draftline  a segment as a job trains it, but for its checkpoints; the part is not in memory when it begins
  resident   the same steps on samples that are on the GPU already: what reading and copying cost is the difference
  serial     a segment that reads the next sample when the last one is done
  eager      the steps of `resident` without torch's compiler, but for attention
Last, with --in-one-piece, a step with all of its samples in one forward, which may be out of memory. TFLOP/s count products with weights: 6 for a
weight and slot or context row, 4 where one side is frozen; attention counts nothing. --dry runs all on the CPU with small shapes.
"""

import argparse
import functools
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from products import products, tell, timed
from snakemake.utils import validate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from draftline.drafter import loss, segment, train  # noqa: E402
from draftline.drafter.batch import make_batches  # noqa: E402
from draftline.drafter.config import DrafterConfig  # noqa: E402
from draftline.drafter.data import Parts  # noqa: E402
from draftline.drafter.segment import initial_state  # noqa: E402
from draftline.drafter.state import State  # noqa: E402
from draftline.drafter.train import Recipe, Trainer  # noqa: E402
from draftline.heads import Heads  # noqa: E402
from draftline.kernels import versions  # noqa: E402
from draftline.states_writer import Sample as Row  # noqa: E402
from draftline.states_writer import write_states  # noqa: E402

PRESET = ROOT / "presets/qwen3.6-27b.yaml"
TARGET = {"hidden_size": 5120, "vocab_size": 248320, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""What the preset leaves to its target."""
OF_TARGET = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "max_position_embeddings",
)
"""What the preset's drafter says itself."""
SMALL_TARGET = {"hidden_size": 64, "vocab_size": 1000, "mask_token_id": 999}
SMALL_DRAFTER = {"intermediate_size": 96, "heads": 4, "kv_heads": 2, "head_dim": 32}


def shapes(small: bool) -> tuple[DrafterConfig, Recipe]:
    """The preset's drafter and how it is trained."""
    preset = yaml.safe_load(PRESET.read_text(encoding="utf-8"))
    validate(preset, str(ROOT / "schemas/config.schema.yaml"))  # with defaults
    target, (values,) = {**TARGET, **preset["target"]}, preset["drafters"].values()
    if small:
        target, values = target | SMALL_TARGET, values | SMALL_DRAFTER
    manifest: Any = SimpleNamespace(**target, **dict.fromkeys(OF_TARGET))
    config = DrafterConfig.from_settings(values, manifest, preset["hidden_states"]["layers"])
    return config, Recipe.from_settings(values)


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, "cpu" if options.dry else "cuda"
        self.config, recipe = shapes(options.dry)
        draw = torch.Generator().manual_seed(0)
        least, most = (16, 64) if options.dry else (512, 4096)
        lengths = torch.randint(least, most + 1, (options.samples,), generator=draw).tolist()
        self.part = options.work / "hidden_states/0000/0000.safetensors"
        self.part.parent.mkdir(parents=True, exist_ok=True)
        vocabulary, width, layers = self.config.vocab_size, self.config.hidden_size, self.config.target_layer_ids
        rows = [
            Row(
                f"{n:032x}", torch.randint(vocabulary, (length,), generator=draw, dtype=torch.int32), supervised(length)
            )
            for n, length in enumerate(lengths)
        ]
        facts = {"target": {"name": "random", "weights_sha256": ""}, "kernels": {}, "dtype": "bfloat16", "versions": {}}
        record = {"rule": "benchmark", "id": "", "settings": "", "inputs": {}}
        with write_states(self.part, record, rows, layers, width, options.storage, facts) as writer:
            for n, length in enumerate(lengths):
                writer.put(n, torch.randn(length, len(layers) * width, device=self.device, dtype=torch.bfloat16))
        self.visits = [(0, "0000", "0000")]
        self.parts = Parts([str(self.part)], None, self.visits, self.device)  # type: ignore[arg-type]
        heads = (torch.randn(vocabulary, width, device=self.device, dtype=torch.bfloat16) * 0.02 for _ in range(2))
        embed_VH, head_VH = (rows_VH if self.device == "cuda" else rows_VH.float() for rows_VH in heads)
        self.heads = Heads(embed_VH, torch.ones(width), head_VH, False, 1e-6)
        self.state = initial_state(self.config, 0, 10**6)
        self.trainer = Trainer(self.state, recipe, self.heads, None, self.device)
        self.samples = list(self.parts.samples(self.visits[0], 0, 0))
        self.tokens = sum(lengths)
        self.flops = self.count()

    def count(self) -> float:
        """FLOPs of products with weights in one round."""
        recipe, config = self.trainer.recipe, self.config
        shape = (recipe.anchors, config.block_size, config.mask_token_id, recipe.seed)
        batches = make_batches(self.samples, *shape, None)
        slots, rows = (sum(getattr(batch, name).numel() for batch in batches) for name in ("blocks", "positions"))
        counted = sum(int(batch.counts.sum()) for batch in batches)
        weights = {name: p.numel() for name, p in self.trainer.drafter.named_parameters() if p.dim() == 2}
        fc = weights.pop("fc.weight")
        shared = sum(number for name, number in weights.items() if "k_proj" in name or "v_proj" in name)
        head = config.hidden_size * config.vocab_size
        tell(
            side="round",
            samples=len(self.samples),
            tokens=self.tokens,
            slots=slots,
            context_rows=rows,
            batches=len(batches),
        )
        return 6.0 * sum(weights.values()) * slots + (6.0 * shared + 4.0 * fc) * rows + 4.0 * head * counted

    def draftline(self) -> None:
        with open(self.part, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        state = State(self.config, self.trainer.step, self.state.total_steps, 0, 0, {})
        record = {"rule": "benchmark", "id": "", "settings": "", "inputs": {}}
        checkpoint = self.options.work / "never.safetensors"
        segment.run(self.trainer, state, self.parts, self.visits, 0, True, checkpoint, record, math.inf)

    def serial(self) -> None:
        hurried, segment.ahead = segment.ahead, lambda items, _: items  # type: ignore[attr-defined, assignment]
        try:
            self.draftline()
        finally:
            segment.ahead = hurried  # type: ignore[attr-defined]

    def resident(self) -> None:
        size = self.trainer.recipe.batch
        for first in range(0, len(self.samples), size):
            self.trainer.train(self.samples[first : first + size])

    def eager(self) -> None:
        for layer in self.trainer.drafter.layers:
            vars(layer).pop("forward", None)
        loss._compiled = lambda: loss._measured  # type: ignore[assignment]
        self.resident()

    def measure(self, side: Callable[[], None]) -> dict[str, float]:
        warm = timed(side, self.device)
        self.forget_peak()
        seconds = [timed(side, self.device) for _ in range(self.options.rounds)]
        median = statistics.median(seconds)
        figures = {"tokens_per_s": round(self.tokens / median), "tflops": round(self.flops / median / 1e12, 1)}
        rounds = [round(self.tokens / second) for second in seconds]
        tell(side=side.__name__, rounds=rounds, **figures, warm_s=round(warm, 1), peak_gb=self.peak_gb())
        return figures

    def forget_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_gb(self) -> float:
        return round(torch.cuda.max_memory_allocated() / 1e9, 1) if self.device == "cuda" else 0.0

    def in_one_piece(self) -> None:
        whole = functools.partial(make_batches, slots=10**9)
        train.make_batches = whole  # type: ignore[attr-defined, assignment]
        self.forget_peak()
        try:
            seconds = timed(lambda: self.trainer.train(self.samples[: self.trainer.recipe.batch]), self.device)
            tell(
                side="in one piece",
                seconds=round(seconds, 2),
                peak_gb=self.peak_gb(),
            )
        except torch.OutOfMemoryError as error:
            tell(side="in one piece", failure=str(error)[:200])


def supervised(length: int) -> torch.Tensor:
    return torch.arange(length) >= length // 5


def main(options: argparse.Namespace) -> None:
    bench = Bench(options)
    tell(side="versions", **versions())
    rates, sides = products(bench.device), (bench.draftline, bench.resident, bench.serial, bench.eager)
    found = [next(rates)]
    measured = {}
    for side in sides:
        measured[side.__name__] = bench.measure(side)
        found.append(next(rates))
    rate = statistics.median(figures["tflops"] for figures in found)
    shares = {name: round(figures["tflops"] / rate, 3) for name, figures in measured.items()}
    tell(side="compared", shares_of_products=shares)
    if options.in_one_piece:
        bench.in_one_piece()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--storage", default="bf16")
    parser.add_argument("--in-one-piece", action="store_true")
    parser.add_argument("--dry", action="store_true")
    main(parser.parse_args())
