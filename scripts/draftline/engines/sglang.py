"""Engine `sglang`: a server that the job starts on its GPUs, with an interpreter that has SGLang (envs/sglang.txt).

The server is draftline.server's, the requests are draftline.engines.client's. One that ends or hangs is replaced at the next
call of `generate`; finished rows are safe by then, and those in flight come back as errors, to be tried again.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from draftline.engines import Request, Result, Sampling
from draftline.engines.answers import Checks
from draftline.engines.client import (
    BusyError,
    Client,
    Endpoint,
    FailedError,
    HttpEngine,
    Limits,
    ServerRefusedError,
    ask,
)
from draftline.engines.protocols import Answer, SGLangGenerate
from draftline.errors import DraftlineError
from draftline.fingerprint import SCRIPTS
from draftline.gpus import Nvml
from draftline.manifest import Manifest
from draftline.progress import say
from draftline.server import HOST, Program, Server
from draftline.staging import staged

DEATHS = 3
"""Servers of one job that may end or hang while they serve; with the last one the job ends."""
ASK_SECONDS = 600.0
"""Time for the first answer, which may wait for compilers; the stall watchdog is there for a server that hangs."""


class ServerGone(DraftlineError):  # noqa: N818 - what happened, not what is wrong with the caller
    """The server ended while it owed answers."""


class SGLangEngine:
    """Engine on an SGLang server. `run` is the job's: ``engine`` (the config's section), ``device``, ``log``, maybe ``stage_to``."""

    def __init__(self, manifest: Manifest, run: Mapping[str, Any]) -> None:
        self.manifest, self.engine, self.stage_to = manifest, run["engine"], run.get("stage_to")
        self.api = SGLangGenerate(tuple(manifest.eos_token_ids))
        on_gpus = run["device"] == "cuda"
        program = Program(
            "sglang",
            self._command,
            lambda key: json.dumps({"api-key": key}),
            gpu_numbers() if on_gpus else {"CUDA_VISIBLE_DEVICES": ""},
            caches(),
        )
        self.server = Server(program, server_log(run["log"]), self.engine["stall_seconds"], on_gpus)
        self.checks = Checks(manifest.eos_token_ids, manifest.vocab_size)
        self.in_flight = self.engine["requests"]
        self.deaths = 0
        self._open = contextlib.ExitStack()
        self._client: HttpEngine | None = None

    def __enter__(self) -> Self:
        say(f"sglang: {version(self.engine)}, {interpreter(self.engine)}")
        self.server.log.unlink(missing_ok=True)
        self.manifest = staged(self.manifest, self.stage_to)
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()
        for held in self.server.end():
            say(f"sglang: {held}")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[Request, Result]]:
        """Each request with its result, as they finish. Raises DraftlineError when the server ends again and again."""
        if self._client and self.server.failure:
            self._bury()
        if self._client is None:
            self._start()
        assert self._client
        self._client.in_flight = self.in_flight
        waiting = {request.id: request for request in requests}
        try:
            with self.server.owing() as answered:
                for request, result in self._client.generate(requests, sampling):
                    answered()
                    del waiting[request.id]
                    yield request, result
        except ServerGone as gone:
            self._bury()
            for request in waiting.values():
                yield request, Result([], "error", str(gone).partition("\n")[0])

    def _start(self) -> None:
        """A server that answers, and a client for it."""
        started = time.monotonic()
        say(f"sglang: starting a server; its log is {self.server.log}")
        self.server.start(self._ask)
        say(f"sglang: the server answers after {time.monotonic() - started:.0f} s")
        endpoint = Endpoint(self.server.url, self.api, self.server.key)
        limits = Limits(tokens=self.engine["tokens"])
        self._client = self._open.enter_context(HttpEngine([endpoint], self.checks, limits, watch=self._look))

    def _bury(self) -> None:
        """Clear away what is left of a server that failed; DraftlineError when there may be no other."""
        failure = self.server.failure
        self._client = None
        self._open.close()
        held = self.server.end()
        self.deaths += 1
        if held:
            raise DraftlineError(f"{failure}\nNo other one can start: {'; '.join(held)}")
        if self.deaths == DEATHS:
            raise DraftlineError(
                f"{failure}\nIt was the job's server number {DEATHS} that ended so; finished rows are kept"
            )
        say(str(failure))

    def _look(self) -> None:
        if self.server.failure:
            raise ServerGone(self.server.failure)

    def _ask(self) -> str | None:
        """Have the server sample a token for a prompt of one. Gives, in words, why it did not."""
        try:
            finish = asyncio.run(self._first_answer()).finish
        except (BusyError, FailedError, ServerRefusedError) as error:
            return str(error)
        return None if finish in ("stop", "length") else f"finish reason {finish}"

    async def _first_answer(self) -> Answer:
        question = Request("ready", self.manifest.eos_token_ids[:1], [], 1, 0)
        async with Client(self.server.url, self.server.key, ASK_SECONDS) as client:
            return await ask(client, self.api, question, Sampling())

    def _command(self, port: int, key_file: Path) -> list[str]:
        engine, manifest = self.engine, self.manifest
        options = {
            "--config": key_file,
            "--model-path": os.path.abspath(manifest.model),
            "--host": HOST,
            "--port": port,
            "--dtype": manifest.dtype,
            "--context-length": manifest.max_position_embeddings,
            "--random-seed": 0,
            "--tp-size": engine["tensor_parallel"],
            "--dp-size": engine["data_parallel"],
        }
        if engine["memory_fraction"] is not None:
            options["--mem-fraction-static"] = engine["memory_fraction"]
        trust = ["--trust-remote-code"] if manifest.trust_remote_code else []
        words = [interpreter(engine), "-m", "sglang.launch_server", *(w for pair in options.items() for w in pair)]
        return [str(word) for word in [*words, *trust, *engine["flags"]]]


def interpreter(engine: Mapping[str, Any]) -> Path:
    """The Python that has SGLang. Raises DraftlineError where there is none."""
    here = Path(engine["python"])
    path = here if here.exists() else SCRIPTS.parent / here
    if not path.exists():
        raise DraftlineError(
            f"config: engine.python: {path}: no such interpreter; make one that has SGLang by: make env-sglang"
        )
    return path.absolute()


def version(engine: Mapping[str, Any]) -> str:
    """Versions of SGLang and torch that the interpreter has. Raises DraftlineError where SGLang is missing."""
    python = interpreter(engine)
    names = ("sglang", "torch")
    code = f"from importlib.metadata import version\nprint(*map(version, {names}))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        raise DraftlineError(
            f"config: engine.python: {python}: has no SGLang ({words}); run: make env-sglang"
        ) from None
    return ", ".join(f"{name} {found}" for name, found in zip(names, done.stdout.split()))


def server_log(log: str | None) -> Path:
    """The server's log, beside the job's."""
    return Path(log).with_suffix(".server.log") if log else Path("results/logs/sglang.server.log")


def gpu_numbers() -> dict[str, str]:
    """The job's GPUs by number instead of UUID: SGLang 0.5.17 makes numbers of the names in CUDA_VISIBLE_DEVICES.

    A MIG device has none, and stays as it is.
    """
    with Nvml() as nvml:
        devices = nvml.visible()
    if any(device.parent for device in devices):
        return {}
    # CUDA counts like nvidia-smi only if it is told to.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(device.label for device in devices)}


def caches() -> list[Path]:
    """Folders that Triton, inductor, FlashInfer and SGLang's other compilers fill."""
    home, user = Path.home(), psutil.Process().username()
    places = {
        "TRITON_CACHE_DIR": home / ".triton/cache",
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()) / f"torchinductor_{user}",
        "SGLANG_CACHE_DIR": home / ".cache/sglang",
        "SGLANG_DG_CACHE_DIR": home / ".cache/deep_gemm",
        "TVM_FFI_CACHE_DIR": home / ".cache/tvm-ffi",
        "TILELANG_CACHE_DIR": home / ".tilelang/cache",
        "CUDA_CACHE_PATH": home / ".nv/ComputeCache",
    }
    flashinfer = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", home)) / ".cache/flashinfer"
    return [flashinfer, *(Path(os.environ.get(name, place)) for name, place in places.items())]
