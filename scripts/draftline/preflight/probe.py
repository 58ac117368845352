"""One measurement of the preflight, in a process of its own, so that a crash or a hang is this process's alone.

    python -P probe.py {device|all_reduce|disk} '{"argument": value, ...}'

Writes JSON lines to standard output: ``{"stage": what begins now}``, at the end ``{"figures": {...}}``. Imports nothing of
Draftline's: what is measured is the machine with the libraries as they are installed.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1
BLOCK = 1 << 24
"""Bytes written at once."""

answers: TextIO = sys.stdout


def stage(name: str) -> None:
    """Say what begins now: when nothing follows, this is where it hangs or crashed."""
    print(json.dumps({"stage": name}), file=answers, flush=True)


def device(device: str, size: int, seconds: float, modules: list[str]) -> dict[str, Any]:
    """Import `modules`, then multiply square matrices of `size` rows for about `seconds` s on `device`.

    bf16 on a GPU, fp32 on a CPU. TFLOP/s are those of the products after the first few; memory in MB, on a GPU as free as it
    is before the first allocation.
    """
    started = time.monotonic()
    for name in modules:
        stage(f"import {name}")
        importlib.import_module(name)
    stage("import torch")
    import torch

    cuda = device.startswith("cuda")
    figures: dict[str, Any] = {"import_s": time.monotonic() - started, "cuda": torch.version.cuda}
    if cuda and torch.version.cuda is None:
        raise ImportError(f"torch {torch.__version__} is built without CUDA; install one that has it")
    if cuda:
        stage("start of CUDA")
        free, total = torch.cuda.mem_get_info(device)
        figures |= {"memory_free_mb": free / 1e6, "memory_total_mb": total / 1e6}
    stage("matrix products")
    # Random numbers: products of zeros draw less power and run faster.
    dtype = torch.bfloat16 if cuda else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    synchronize: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(3):
        torch.matmul(left, right, out=product)
    synchronize()
    count, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        for _ in range(10):
            torch.matmul(left, right, out=product)
        synchronize()
        count += 10
    figures["tflops"] = 2 * size**3 * count / (time.monotonic() - began) / 1e12
    if not torch.isfinite(product).all():
        raise ArithmeticError("a product of finite matrices is not finite")
    return figures


def all_reduce(device: str, rank: int, world: int, store: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """Sum fp32 numbers over `world` processes that meet at the file `store`, by NCCL on GPUs and gloo on the CPU.

    `gb_s`: 10^9 bytes a second that a device sends (NCCL's bus bandwidth), over `rounds` sums of `megabytes` MB.
    """
    stage("import torch")
    import torch
    import torch.distributed as dist

    cuda = device.startswith("cuda")
    stage("start of NCCL" if cuda else "start of gloo")
    if cuda:
        torch.cuda.set_device(device)
    # The parent's time limit is the one that counts: a longer one here keeps the library from ending its threads first.
    patience = timedelta(hours=1)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=patience
    )
    stage("all-reduce")
    numbers = torch.full((megabytes * 250_000,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    if not (numbers == world * (world + 1) / 2).all():
        raise ArithmeticError("the sum over the devices is wrong")
    numbers.zero_()
    synchronize: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    synchronize()
    began = time.monotonic()
    for _ in range(rounds):
        dist.all_reduce(numbers)
    synchronize()
    seconds = time.monotonic() - began
    dist.destroy_process_group()
    return {"gb_s": 2 * (world - 1) / world * 4 * numbers.numel() * rounds / seconds / 1e9}


def disk(folder: str, megabytes: int) -> dict[str, Any]:
    """Write `megabytes` MB into `folder`, have them on the disk, and read them back from there. Rates in MB/s."""
    stage(f"writing to {folder}")
    block = os.urandom(BLOCK)
    blocks = max(1, megabytes * 1_000_000 // BLOCK)
    file, path = tempfile.mkstemp(dir=folder, prefix=".preflight-")
    os.unlink(path)  # Open, it lives on without a name: whatever ends this process leaves nothing behind.
    try:
        began = time.monotonic()
        for _ in range(blocks):
            _write(file, block)
        os.fsync(file)
        written = time.monotonic() - began
        stage(f"reading from {folder}")
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file, 0, os.SEEK_SET)
        began = time.monotonic()
        same = all(_read(file, len(block)) == block for _ in range(blocks))
        read = time.monotonic() - began
    finally:
        os.close(file)
    if not same:
        raise OSError(f"{folder}: what was read is not what was written")
    return {"write_mb_s": blocks * BLOCK / written / 1e6, "read_mb_s": blocks * BLOCK / read / 1e6}


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _read(file: int, length: int) -> bytes:
    pieces = []
    while length and (piece := os.read(file, length)):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


PROBES: dict[str, Callable[..., dict[str, Any]]] = {"device": device, "all_reduce": all_reduce, "disk": disk}

if __name__ == "__main__":
    with contextlib.suppress(OSError, AttributeError):  # Linux only: end when the parent is killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries may print; what they print is for the log, not for the parent to read.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    result = PROBES[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps({"figures": result}), file=answers, flush=True)
