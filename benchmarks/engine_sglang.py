"""Engine sglang beside SGLang's own bench_serving on one server, as a Snakemake target, and killed in the middle.

    .venv/bin/python benchmarks/engine_sglang.py --work DIR [stage ...]

Stages, all of them if none is named:
  prepare  a config and PROMPTS prompts of the demo set's kind in DIR, target and prompts made there (no GPU, no SGLang)
  speed    one server; `bench_serving`, the engine, `bench_serving` with streams, which is its default, and the engine again; same prompts,
           limit and concurrency, empty cache: output tokens/s
  target   results/completions/0000.parquet by Snakemake: output tokens/s of the job, by its own log
  kill     the same anew: SIGKILL of the job when half of the rows are finished, then a second call. Counts rows that were
           generated twice, rows that are missing, and rows that are not what the server's own log of its answers says
Each prints a line of JSON. The workflow's own interpreter runs this; --python is the one that has SGLang.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from draftline import gpus, provenance  # noqa: E402
from draftline.chat import Chat  # noqa: E402
from draftline.engines import Request, Sampling  # noqa: E402
from draftline.engines.sglang import SGLangEngine  # noqa: E402
from draftline.manifest import Manifest  # noqa: E402
from draftline.processes import is_alive  # noqa: E402

PROMPTS = Path("results/prompts/0000.parquet")
COMPLETIONS = Path("results/completions/0000.parquet")
SERVER_LOG = Path("results/logs/completions/0000.server.log")
LOG_ANSWERS = ["--log-requests", "--log-requests-level", "3", "--log-requests-format", "json"]
"""Have the server log each answer with all of its ids."""
WISHES = ("", "Be brief.", "Give an example.", "Explain each step.", "Say what could go wrong.", "Answer as a list.",
          "Begin with the result.", "Mention an alternative.")  # fmt: skip
"""What is put behind a prompt of the demo set to make another one of its kind."""


def tell(stage: str, **figures: Any) -> None:
    print(json.dumps({"stage": stage, **figures}), flush=True)


def snakemake(*arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "--resources", "gpu=64"]
    return subprocess.Popen([*command, "--workflow-profile", str(ROOT / "profiles/default"), *arguments])


def finish(*arguments: str) -> None:
    if snakemake(*arguments).wait():
        sys.exit(f"snakemake {' '.join(arguments)}: failed; see above")


def prepare(options: argparse.Namespace) -> None:
    """The config, the prompts, and what is made of them without a GPU."""
    lines = [
        orjson.loads(line)
        for path in sorted((ROOT / "resources/prompts").glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
    made = [varied(line, wish) for wish in WISHES for line in lines][: options.prompts]
    Path("prompts.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in made))
    config = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    config["target"]["dtype"] = "bfloat16"
    if options.target:
        del config["target"]["pypi"]
        config["target"]["path" if options.target.is_dir() else "gguf"] = str(options.target.resolve())
    config["prompts"] |= {"sources": {"demo": {"paths": str(Path("prompts.jsonl").resolve())}}, "decontaminate": []}
    config["completions"] |= {"engine": "sglang", "max_new_tokens": options.max_new_tokens}
    config["completions"]["extend"]["max_new_tokens"] = options.max_new_tokens
    config |= {
        "shards": 1,
        "engine": {"python": options.python, "flags": options.flags, "requests": options.concurrency},
    }
    config["run"]["device"] = "cuda"
    Path("config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    finish(str(PROMPTS), "results/target/manifest.json")
    finish(str(COMPLETIONS), "--dry-run", "--quiet")
    tell("prepare", prompts=len(rows()))


def varied(line: dict[str, Any], wish: str) -> dict[str, Any]:
    """A conversation whose last question has a wish behind it."""
    key = "messages" if "messages" in line else "conversations"
    *before, last = line[key]
    text = "content" if "content" in last else "value"
    return {key: [*before, {**last, text: f"{last[text]} {wish}".strip()}]}


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = provenance.read_parquet(PROMPTS).to_pylist()
    return found


def speed(options: argparse.Namespace) -> None:
    """Both sides in turn on one server."""
    chat = Chat.load("results/target/manifest.json", "results/target/tokenizer.json")
    config = json.loads(max(Path("results/settings/run").glob("*.json"), key=os.path.getmtime).read_text())["config"]
    gpus.lease(1, 1, "benchmark", str(Path.cwd()))
    run = {"device": "cuda", "engine": config["engine"], "log": "speed.log"}
    requests = [
        Request(row["id"], chat.prompt_ids(orjson.loads(row["messages"])), [], options.max_new_tokens, 0)
        for row in rows()
    ]
    with open("bench.jsonl", "wb") as file:
        for request in requests:
            turns = [{"content": chat.decode(request.prompt_ids)}, {"content": "unused, but it has to be there"}]
            file.write(orjson.dumps({"conversations": turns}) + b"\n")
    started = time.monotonic()
    with SGLangEngine(Manifest.load("results/target/manifest.json"), run) as engine:
        tell("speed", ready_s=round(time.monotonic() - started, 1))
        for streams in (False, True):
            tell("speed", side="bench_serving", streams=streams, **bench(engine, options, streams))
            flush(engine)
            tell("speed", side="draftline", **ask(engine, requests))


def bench(engine: SGLangEngine, options: argparse.Namespace, streams: bool) -> dict[str, Any]:
    """Figures of bench_serving on the engine's server."""
    Path("bench.out").unlink(missing_ok=True)
    command = [
        *(engine.engine["python"], "-m", "sglang.bench_serving", "--backend", "sglang"),
        *(
            "--host",
            "127.0.0.1",
            "--port",
            engine.server.port,
            "--dataset-name",
            "custom",
            "--dataset-path",
            "bench.jsonl",
        ),
        *("--model", engine.manifest.model, "--num-prompts", options.prompts, "--max-concurrency", options.concurrency),
        *("--sharegpt-output-len", options.max_new_tokens, "--disable-ignore-eos", "--temperature", 0),
        *("--flush-cache", "--disable-tqdm", "--output-file", "bench.out"),
        *([] if streams else ["--disable-stream"]),
    ]
    with open("bench.log", "ab") as log:
        environment = {**os.environ, "OPENAI_API_KEY": engine.server.key}
        subprocess.run([str(word) for word in command], env=environment, stdout=log, stderr=log, check=True)
    found = json.loads(Path("bench.out").read_text().splitlines()[-1])
    return {
        "requests": found["completed"],
        "seconds": round(found["duration"], 2),
        "tokens": found["total_output_tokens"],
        "tokens_per_s": round(found["output_throughput"]),
    }


def ask(engine: SGLangEngine, requests: list[Request]) -> dict[str, Any]:
    """The same figures of the engine."""
    started = time.monotonic()
    results = [result for _, result in engine.generate(requests, Sampling())]
    seconds, tokens = time.monotonic() - started, sum(len(result.ids) for result in results)
    done = sum(result.finish_reason != "error" for result in results)
    return {"requests": done, "seconds": round(seconds, 2), "tokens": tokens, "tokens_per_s": round(tokens / seconds)}


def flush(engine: SGLangEngine) -> None:
    """Empty the server's cache of prompts, which would make the second side's faster."""
    headers = {"Authorization": f"Bearer {engine.server.key}"}
    order = urllib.request.Request(f"{engine.server.url}/flush_cache?timeout=60", headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    direct.open(order, timeout=90).close()


def target(options: argparse.Namespace) -> None:
    """The Snakemake target from the start, undisturbed."""
    serve_with(options.flags)
    forget()
    finish(str(COMPLETIONS))
    log = Path("results/logs/completions/0000.log").read_text()
    facts = {name: provenance.parquet_facts(COMPLETIONS, name) for name in ("counts", "engine_version")}
    tell("target", tokens_per_s=int(re.findall(r"tokens/s (\d+)", log)[-1]), **facts)


def kill(options: argparse.Namespace) -> None:
    """SIGKILL of the job when half of its rows are finished, and a second call."""
    serve_with([*options.flags, *LOG_ANSWERS])
    forget()
    run = snakemake(str(COMPLETIONS))
    wanted = len(rows()) // 2
    while sum(stored().values()) < wanted:
        if run.poll() is not None:
            sys.exit("the job ended before it could be killed; see above")
        time.sleep(0.05)
    (job,) = [p for p in psutil.Process(run.pid).children(recursive=True) if is_job(p)]
    family = job.children(recursive=True)
    job.kill()
    started = time.monotonic()
    while alive := [process for process in family if is_alive(process)]:
        if time.monotonic() - started > 60:
            sys.exit(f"still alive a minute after the job: {alive}")
        time.sleep(0.05)
    server_end = time.monotonic() - started
    run.wait()
    left, answers = stored(), logged()
    finish(str(COMPLETIONS))
    answers |= logged()
    counts, made = stored(), provenance.read_parquet(COMPLETIONS)
    pairs = zip(made["prompt_ids"].to_pylist(), made["completion_ids"].to_pylist())
    tell(
        "kill",
        finished_when_killed=sum(left.values()),
        processes_of_the_server=len(family),
        server_ended_after_s=round(server_end, 1),
        rows=len(made),
        generated_twice=sum(count - 1 for count in counts.values()),
        missing=len({row["id"] for row in rows()} - set(made["id"].to_pylist())),
        errors=made["status"].to_pylist().count("error"),
        answers_in_the_servers_logs=len(answers),
        not_as_the_server_logged=sum((tuple(prompt), tuple(answer)) not in answers for prompt, answer in pairs),
    )


def serve_with(flags: list[str]) -> None:
    """Change the server's flags in the config, which makes nothing stale."""
    config = yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8"))
    config["engine"]["flags"] = flags
    Path("config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def is_job(process: psutil.Process) -> bool:
    command = process.cmdline()
    return len(command) > 1 and command[1] == str(ROOT / "scripts/completions.py")


def stored() -> Counter[str]:
    """How often each row is in the store, by its key."""
    keys: Counter[str] = Counter()
    for path in Path("results/.resume/rows").glob("*/*/*.jsonl"):
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):  # The line that the kill tore.
                keys[orjson.loads(line)[0]] += 1
    return keys


def logged() -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt and answer, as ids, of each request that the last server's log calls finished."""
    found = set()
    for line in SERVER_LOG.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):  # Other lines, and the one that the kill tore.
            entry = orjson.loads(line[line.index(b"{") :])
            if entry.get("event") == "request.finished" and entry["obj"]["input_ids"]:  # SGLang warms up with text.
                found.add((tuple(entry["obj"]["input_ids"]), tuple(entry["out"]["output_ids"])))
    return found


def forget() -> None:
    """Completions and their rows, but for the canary's."""
    finish("results/gates/canary.json")
    shutil.rmtree("results/.resume/rows", ignore_errors=True)
    COMPLETIONS.unlink(missing_ok=True)


STAGES = {"prepare": prepare, "speed": speed, "target": target, "kill": kill}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="stage", help=", ".join(STAGES))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="SmolLM2's folder or GGUF file, where no package can be fetched")
    parser.add_argument("--python", default=str(ROOT / ".venv-sglang/bin/python"))
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for the server, as the last option")
    parser.add_argument("--prompts", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    given = parser.parse_args()
    if unknown := set(given.stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(unknown)}")
    given.work.mkdir(parents=True, exist_ok=True)
    os.chdir(given.work)
    for name in given.stages or STAGES:
        STAGES[name](given)
