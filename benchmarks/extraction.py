"""Extraction at Qwen3.6-27B's shapes, beside the GPU's rate of matrix products and a plain Hugging Face forward.

    .venv/bin/python benchmarks/extraction.py --work DIR

A model of 64 layers with random bf16 weights is made on the GPU; lengths are drawn evenly from 512 to 4096. Sides, each --rounds times:
  products   8192 x 8192 x 8192 in bf16 on random numbers: TFLOP/s of the first ten, which a cool chip does faster, and of the 1500 after
             them. Before, between and after the others
  plain      the model as transformers runs it, batches of 8 in order of arrival, padded, with a mask, output_hidden_states; states stay
             on the GPU. Tokens/s without pads
  draftline  the tapped layers' states to a file in DIR, as a job of hidden_states makes it; the file is removed
Before it is timed, each model runs on one batch (autotuning, compilers): warm_s. TFLOP/s of `draftline` count the weights of the linear
layers that run, twice for each token, and nothing else. The last line compares. --dry runs all on the CPU with small shapes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from products import products, synchronize, tell, timed
from torch import nn
from transformers import AutoModel
from transformers.models.qwen3_5 import Qwen3_5TextConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from draftline.agreement import Distance  # noqa: E402
from draftline.extraction import extract, filled, prepare  # noqa: E402
from draftline.kernels import kernels, versions  # noqa: E402
from draftline.layers import layer_ids  # noqa: E402
from draftline.loading import decoder_layers  # noqa: E402
from draftline.states_writer import Sample, write_states  # noqa: E402

SHAPES = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
SMALL |= {"num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
BATCH = 8
"""Sequences of a batch of the plain forward."""


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.device = "cpu" if options.dry else "cuda"
        self.options, self.work = options, options.work
        config = Qwen3_5TextConfig(**SHAPES, tie_word_embeddings=False, pad_token_id=0)
        if options.dry:
            config = Qwen3_5TextConfig(**{**SHAPES, **SMALL, "pad_token_id": 0})
        self.config, self.layers = config, layer_ids(5, config.num_hidden_layers, "layers")
        with torch.device(self.device):
            torch.manual_seed(0)
            self.model = AutoModel.from_config(config, dtype=torch.bfloat16).requires_grad_(False).eval()
        draw = torch.Generator().manual_seed(0)
        least, most = (16, 64) if options.dry else (512, 4096)
        lengths = torch.randint(least, most + 1, (options.samples,), generator=draw).tolist()
        self.sequences = [torch.randint(1, config.vocab_size, (n,), generator=draw, dtype=torch.int32) for n in lengths]
        run = decoder_layers(self.model)[: self.layers[-1] + 1]
        linear = [module for module in run.modules() if isinstance(module, nn.Linear)]
        self.closing = 0.0
        self.flops = 2 * sum(module.weight.numel() for module in linear)

    @torch.no_grad()
    def plain(self, sequences: list[torch.Tensor]) -> None:
        for first in range(0, len(sequences), BATCH):
            batch = sequences[first : first + BATCH]
            ids_BS = nn.utils.rnn.pad_sequence(batch, batch_first=True).to(self.device)
            mask_BS = nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in batch], batch_first=True)
            output = self.model(ids_BS, mask_BS.to(self.device), output_hidden_states=True, use_cache=False)
            assert len([output.hidden_states[i + 1] for i in self.layers]) == len(self.layers)

    def draftline(self, sequences: list[torch.Tensor]) -> None:
        path = self.work / "states.safetensors"
        samples = [
            Sample(f"{n:032x}", ids_T, torch.ones(len(ids_T), dtype=torch.bool)) for n, ids_T in enumerate(sequences)
        ]
        facts = {
            "target": {"name": "random", "weights_sha256": ""},
            "kernels": kernels(self.model, self.config.layer_types),
            "dtype": "bfloat16",
            "versions": versions(),
        }
        record = {"rule": "benchmark", "id": "", "settings": "", "inputs": {}}
        width = self.config.hidden_size
        with write_states(path, record, samples, self.layers, width, self.options.storage, facts) as writer:
            for n, features_TF in extract(self.model, self.layers, sequences, self.options.batch):
                writer.put(n, features_TF)
            synchronize(self.device)
            computed = time.perf_counter()
        self.closing = time.perf_counter() - computed
        path.unlink()

    def measure(self, side: Callable[[list[torch.Tensor]], None], count: int) -> dict[str, float]:
        """Warm up, then run a side over `count` sequences as often as is asked."""
        name, sequences = side.__name__, self.sequences[:count]
        warm = timed(lambda: side(sequences[:BATCH]), self.device)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        tokens = sum(map(len, sequences))
        rates = [tokens / timed(lambda: side(sequences), self.device) for _ in range(self.options.rounds)]
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        figures = {"tokens_per_s": statistics.median(rates), "peak_gb": round(peak / 1e9, 1), "warm_s": round(warm, 1)}
        tell(side=name, tokens=tokens, rounds=[round(rate) for rate in rates], **figures)
        return figures

    def apart(self) -> dict[str, float]:
        """Relative RMS difference of features in packed rows from those of each sequence alone, by what stands before them in the row.

        Rounding makes one; `behind others`, of the first 64 tokens too, must be no more than where nothing stands before.
        """
        some = self.sequences[:12]
        found = {where: Distance() for where in ("first of a row", "behind others", "their first tokens")}
        rows = filled([len(ids_T) for ids_T in some], self.options.batch)
        together = dict(extract(self.model, self.layers, some, self.options.batch))
        for n, ids_T in enumerate(some):
            ((_, alone_TF),) = extract(self.model, self.layers, [ids_T], 1)
            if any(row[0] == n for row in rows):
                found["first of a row"].add(together[n], alone_TF)
            else:
                found["behind others"].add(together[n], alone_TF)
                found["their first tokens"].add(together[n][:64], alone_TF[:64])
        return {where: float(f"{distance.figures()['relative_rms']:.3g}") for where, distance in found.items()}


def main(options: argparse.Namespace) -> None:
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    rates = products(bench.device)
    found = [next(rates)]
    tell(side="model", layers=bench.layers, gflop_per_token=bench.flops / 1e9, versions=versions())
    plain = bench.measure(bench.plain, options.plain_samples)
    found.append(next(rates))
    torch.backends.cuda.enable_cudnn_sdp(False)  # as load_model does
    prepare(bench.model)
    tell(side="prepared", kernels=kernels(bench.model, bench.config.layer_types))
    ours = bench.measure(bench.draftline, options.samples)
    tell(side="draftline", seconds_from_the_last_forward_to_the_finished_file=round(bench.closing, 2))
    found.append(next(rates))
    first, rate = (statistics.median(figures[name] for figures in found) for name in ("first_ten", "tflops"))
    tflops = ours["tokens_per_s"] * bench.flops / 1e12
    tell(
        side="compared",
        draftline_tflops=round(tflops),
        share=round(tflops / rate, 3),
        share_of_first_ten=round(tflops / first, 3),
        times_plain=round(ours["tokens_per_s"] / plain["tokens_per_s"], 2),
        apart_from_alone=bench.apart(),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--plain-samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16384, help="tokens a forward")
    parser.add_argument("--storage", default="bf16")
    parser.add_argument("--dry", action="store_true")
    main(parser.parse_args())
