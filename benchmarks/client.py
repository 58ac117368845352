"""What a request costs the client of the engines over HTTP: against a server on loopback that does nothing else.

    .venv/bin/python benchmarks/client.py [--requests N] [--delay SECONDS] [--concurrency N]

The server, a process of its own, answers each request after the delay with as many ids as were asked for, in SGLang's protocol.
Prompts and answers have 100 tokens. Prints a line of JSON: requests a second, and CPU time of this process for each of them in ms,
of all its threads and without start and imports.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from draftline.engines import Request, Sampling
from draftline.engines.answers import Checks
from draftline.engines.client import Endpoint, HttpEngine, Limits
from draftline.engines.protocols import SGLangGenerate

TOKENS = 100
STOP, VOCABULARY = 2, 50_000


def serve(delay: float, parent: Connection) -> None:
    """Answer on a free port, which `parent` is told, until the process is ended."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                count = orjson.loads(await reader.readexactly(length))["sampling_params"]["max_new_tokens"]
                await asyncio.sleep(delay)
                reason = {"type": "length", "length": count}
                ids = list(range(1000, 1000 + count))
                reply = orjson.dumps({"output_ids": ids, "meta_info": {"finish_reason": reason}})
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(reply), reply))

    async def listen() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=4096)
        parent.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(listen())


@contextlib.contextmanager
def serving(delay: float) -> Iterator[str]:
    """The address of such a server, which ends with the block."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(delay, there), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds that an answer takes")
    parser.add_argument("--concurrency", type=int, default=256, help="requests in flight")
    options = parser.parse_args()
    requests = [Request(f"{n}", list(range(TOKENS)), [], TOKENS, seed=n) for n in range(options.requests)]
    checks = Checks([STOP], VOCABULARY)
    with serving(options.delay) as url:
        started, cpu = time.perf_counter(), time.process_time()
        with HttpEngine([Endpoint(url, SGLangGenerate(), "key")], checks, Limits(options.concurrency)) as engine:
            answers = [result for _, result in engine.generate(requests, Sampling())]
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    if any(result.finish_reason != "length" for result in answers):
        sys.exit(f"some requests failed: {next(result.error for result in answers if result.error)}")
    figures = {"requests_per_s": round(len(answers) / seconds), "cpu_ms": round(cpu / len(answers) * 1e3, 3)}
    print(json.dumps({**vars(options), **figures}))


if __name__ == "__main__":
    main()
