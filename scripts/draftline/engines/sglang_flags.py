"""What the config's `engine` says of an SGLang server, without starting one: GPUs, and flags that are refused."""

from collections.abc import Mapping
from typing import Any

OURS = "Draftline sets it itself"
ONE_NODE = "a server runs on the GPUs of one job"
SPOKEN = "the stall watchdog reads the log"
RESERVED = {
    "--model-path": OURS,
    "--model": OURS,
    "--host": OURS,
    "--port": OURS,
    "--api-key": OURS,
    "--admin-api-key": OURS,
    "--config": OURS,
    "--dtype": "it is target.dtype",
    "--context-length": OURS,
    "--random-seed": OURS,
    "--trust-remote-code": "it is target.trust_remote_code",
    "--tp-size": "set engine.tensor_parallel",
    "--tensor-parallel-size": "set engine.tensor_parallel",
    "--dp-size": "set engine.data_parallel",
    "--data-parallel-size": "set engine.data_parallel",
    "--mem-fraction-static": "set engine.memory_fraction",
    "--pp-size": "set engine.tensor_parallel",
    "--pipeline-parallel-size": "set engine.tensor_parallel",
    "--base-gpu-id": ONE_NODE,
    "--gpu-id-step": ONE_NODE,
    "--nnodes": ONE_NODE,
    "--node-rank": ONE_NODE,
    "--dist-init-addr": ONE_NODE,
    "--nccl-init-addr": ONE_NODE,
    "--tokenizer-worker-num": "with several workers SGLang 0.5.17 asks for no key",
    "--log-level": SPOKEN,
    "--decode-log-interval": SPOKEN,
}
"""Flags that the config may not give, and why."""


def gpus(engine: Mapping[str, Any]) -> int:
    """GPUs that a server takes. With attention spread by data, the replicas lie within the tensor-parallel group."""
    within = "--enable-dp-attention" in engine["flags"]
    return int(engine["tensor_parallel"]) * (1 if within else int(engine["data_parallel"]))


def refused(engine: Mapping[str, Any]) -> str | None:
    """Why a flag of the config cannot be, or None. Beginnings of names count: SGLang completes them."""
    for flag in map(str, engine["flags"]):
        name = flag.partition("=")[0]
        for reserved, reason in RESERVED.items():
            if len(name) > 2 and name.startswith("--") and reserved.startswith(name):
                return f"engine.flags: {name}: not to be given here ({reason}); take it out"
    return None
