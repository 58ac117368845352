"""`transformers serve`, a real OpenAI-compatible server that knows text only, on the tiny target."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def text_only(model: Path, folder: Path) -> None:
    """The text model of a tiny target's `model` folder by itself: the server would ask the wrapper for its image processor."""
    folder.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    text = {**config["text_config"], "architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(text))
    tensors = load_file(model / "model.safetensors")
    prefix = "model.language_model."
    own = {name.replace(prefix, "model.", 1): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    save_file({**own, "lm_head.weight": tensors["lm_head.weight"]}, folder / "model.safetensors", {"format": "pt"})
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, folder / name)


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """The address of a server for the model folder `model`, in a process group of its own that ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        Path(sys.executable).with_name("transformers"),
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        f"{port}",
    ]
    with open(log, "w") as output:
        server = subprocess.Popen(
            [*command, "--device", "cpu", "--dtype", "float32"],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while not _up(url):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _up(url: str) -> bool:
    try:
        with DIRECT.open(f"{url}/health", timeout=10) as reply:
            return reply.status == 200
    except OSError:
        return False
