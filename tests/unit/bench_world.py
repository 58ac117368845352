"""An evaluation set on disk, as the commands before evaluation leave it, made with a small target."""

import hashlib

import pyarrow
import small_models
import torch
from states_fixtures import save_target

from draftline import provenance
from draftline.completions import COMPLETIONS_SCHEMA
from draftline.states_writer import Sample, write_states

RECORD = {"rule": "any", "id": "0" * 16, "settings": "1" * 16, "inputs": {}}
LIMIT = 24
EVALUATE = {
    "budgets": [4, 16, 300],
    "bootstrap": 200,
    "seed": 3,
    "max_new_tokens": LIMIT,
    "thinking": False,
    "allow_kernel_mismatch": False,
}
SHAPE = {
    "layers": 2,
    "block_size": 6,
    "heads": None,
    "kv_heads": None,
    "head_dim": None,
    "intermediate_size": None,
    "rope_theta": None,
    "max_position_embeddings": None,
    "sliding_window": None,
    "layer_types": None,
    "seed": 0,
}


class World:
    """Files in a folder, and what they were made from."""

    def __init__(self, folder, name="llama"):
        self.folder, self.model = folder, small_models.build(name)
        self.manifest = save_target(name, folder / "model")
        self.manifest.write(self.path("manifest.json"), RECORD)
        self.drafter = small_models.random_drafter()
        config = {"config": self.drafter.config.to_json()}
        provenance.write_safetensors(self.path("weights.safetensors"), self.drafter.state_dict(), RECORD, config)
        self.heads = small_models.heads_of(self.model)
        tensors = {
            "embed_tokens.weight": self.heads.embed_VH,
            "norm.weight": self.heads.norm_H,
            "lm_head.weight": self.heads.lm_head_VH,
        }
        facts = {
            "tie_word_embeddings": False,
            "norm_plus_one": self.heads.norm_plus_one,
            "rms_norm_eps": self.heads.eps,
        }
        provenance.write_safetensors(self.path("heads.safetensors"), tensors, RECORD, facts)
        self.rows = sorted((self._row(prompt) for prompt in small_models.prompts(6)), key=lambda row: row["id"])
        self.write_completions(self.rows)
        self.write_states(self.rows)
        self.write_tokens(self.rows)

    def path(self, name):
        return str(self.folder / name)

    def _row(self, prompt):
        completion = small_models.greedy(self.model, prompt, LIMIT)
        stopped = completion[-1] == small_models.STOP
        return {
            "id": hashlib.md5(str(prompt).encode()).hexdigest(),
            "source": "bench",
            "prompt_ids": prompt,
            "completion_ids": completion,
            "text": "",
            "reasoning": None,
            "finish_reason": "stop" if stopped else "length",
            "status": "ok" if stopped else "truncated",
            "thinking": False,
            "attempts": 1,
            "seed": 0,
            "assistant_spans": [len(prompt), len(prompt) + len(completion)],
        }

    def write_completions(self, rows, temperature=0.0):
        facts = {"sampling": {"temperature": temperature}, "engine": "transformers", "engine_version": "5"}
        table = pyarrow.Table.from_pylist(rows, schema=COMPLETIONS_SCHEMA)
        provenance.write_parquet(self.path("completions.parquet"), table, RECORD, facts)

    def write_states(self, rows, layers=small_models.TAPPED, weights_sha256=None, storage="fp32", kernels=None):
        samples = []
        for row in rows:
            ids = torch.tensor(row["prompt_ids"] + row["completion_ids"], dtype=torch.int32)
            samples.append(Sample(row["id"], ids, torch.arange(len(ids)) >= len(row["prompt_ids"])))
        facts = {
            "target": {"name": "small", "weights_sha256": weights_sha256 or self.manifest.weights_sha256},
            "kernels": kernels or {"full_attention": "sdpa"},
            "dtype": "float32",
            "versions": {"torch": torch.__version__},
        }
        path = self.path("states.safetensors")
        with write_states(path, RECORD, samples, layers, small_models.HIDDEN, storage, facts) as writer:
            for n, sample in enumerate(samples):
                writer.put(n, self.features(sample.input_ids, layers))

    def write_tokens(self, rows):
        table = pyarrow.table(
            {
                "input_ids": pyarrow.array(
                    [row["prompt_ids"] + row["completion_ids"] for row in rows], pyarrow.list_(pyarrow.int32())
                ),
                "spans": pyarrow.array([row["assistant_spans"] for row in rows], pyarrow.list_(pyarrow.int32())),
            }
        )
        provenance.write_parquet(self.path("tokens.parquet"), table, RECORD)

    @torch.no_grad()
    def features(self, ids, layers=small_models.TAPPED):
        states = self.model(ids[None].long(), output_hidden_states=True).hidden_states
        return torch.cat([states[layer + 1][0] for layer in layers], dim=-1)

    def arguments(self, *names):
        """Paths for `evaluate_drafter` and `evaluate_baseline`."""
        files = {
            "weights": "weights.safetensors",
            "manifest": "manifest.json",
            "heads": "heads.safetensors",
            "completions": "completions.parquet",
            "states": "states.safetensors",
        }
        return {name: self.path(files[name]) for name in names or files}
