"""Engine sglang's life beside its server, which tests/fake_server.py plays: it is killed, hangs, and its job is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pyarrow
import pytest
from test_completions import CONFIG, ROWS
from test_server import library, lives, pid, until  # noqa: F401 - library is a fixture
from test_slurm_options import a_plan

from draftline import completions, plan, provenance, server, settings
from draftline.chat import Chat
from draftline.completions import complete
from draftline.engines import sglang
from draftline.errors import DraftlineError
from draftline.fingerprint import fingerprint
from gpu_world import Machine, gpu

TESTS = Path(__file__).resolve().parent.parent
SCRIPTS = TESTS.parent / "scripts"
SGLANG = {**CONFIG, "engine": "sglang"}
ENGINE = {
    "tensor_parallel": 1,
    "data_parallel": 1,
    "memory_fraction": None,
    "flags": [],
    "stall_seconds": 60,
    "requests": 4,
    "tokens": 100_000,
}
PYTHON = """#!{python}
import os, sys
if sys.argv[1] == "-c":
    print("0.5.17 2.11.0")
    sys.exit()
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
assert sys.argv[1:3] == ["-m", "sglang.launch_server"] and given["--host"] == "127.0.0.1", sys.argv
os.execv(sys.executable, [sys.executable, {fake!r}, given["--port"], given["--config"], {folder!r}, *{words!r}])
"""


def run_options(folder: Path, *words: str, **how) -> dict:
    """A job's options for an engine whose interpreter starts the fake server."""
    python = folder / "python"
    python.write_text(
        PYTHON.format(python=sys.executable, fake=str(TESTS / "fake_server.py"), folder=str(folder), words=words)
    )
    python.chmod(0o755)
    return {
        "device": "cpu",
        "log": str(folder / "job.log"),
        "engine": {**ENGINE, "python": str(python), **how},
    }


def asked(folder: Path) -> list[tuple[int, ...]]:
    """The prompts that servers answered, readiness left out."""
    lines = (folder / "answered.jsonl").read_text().splitlines()
    return [tuple(ids) for ids in map(json.loads, lines) if len(ids) > 1]


@pytest.fixture
def chat(tiny_target) -> Chat:
    return Chat.load(tiny_target.manifest_path, tiny_target.tokenizer_path)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(completions, "BACKOFF_SECONDS", 0.0)
    return tmp_path


def test_rows_are_what_the_server_sampled_and_it_is_gone_afterwards(place, chat, tiny_target):
    table = complete(ROWS, chat, tiny_target.manifest, SGLANG, run_options(place))
    for row in table.to_pylist():
        assert row["completion_ids"] == [100 + (sum(row["prompt_ids"]) + n) % 50 for n in range(24)]
        assert (row["finish_reason"], row["attempts"]) == ("length", 1)
    assert sorted(asked(place)) == sorted(tuple(row["prompt_ids"]) for row in table.to_pylist())
    assert not lives(pid(place))
    assert (place / "job.server.log").read_text().startswith("starting with (key)\nGPUs visible: \nserving\n")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_killed_or_hung_mid_shard_is_replaced_and_finished_rows_are_kept(place, chat, tiny_target, how):
    def strike() -> None:
        until(lambda: stored(place) == 3, "three finished rows")
        first = pid(place)
        os.kill(first, how)
        until(lambda: not lives(first), "the first server's end")
        (place / "go").touch()

    striker = threading.Thread(target=strike)
    striker.start()
    stall = 8 if how == signal.SIGSTOP else 60
    table = complete(ROWS, chat, tiny_target.manifest, SGLANG, run_options(place, "holds", stall_seconds=stall))
    striker.join()
    assert set(table["status"].to_pylist()) <= {"truncated", "repetition"}
    assert sorted(table["attempts"].to_pylist()) == [1] * 3 + [2] * 13
    assert len(asked(place)) == len(set(asked(place))) == 16
    assert (place / "job.server.log").read_text().count("serving") == 2
    assert not lives(pid(place))


def test_servers_that_die_again_and_again_end_the_job_with_their_last_words(place, chat, tiny_target, monkeypatch):
    monkeypatch.setattr(completions, "ATTEMPTS", 3)
    with pytest.raises(DraftlineError) as caught:
        complete(ROWS, chat, tiny_target.manifest, SGLANG, run_options(place, "mortal"))
    message = str(caught.value)
    assert message.startswith("sglang: the server ended (exit status 7); its log is ")
    assert "\n  RuntimeError: CUDA error: an illegal memory access" in message
    assert message.endswith("\nIt was the job's server number 3 that ended so; finished rows are kept")
    assert (place / "job.server.log").read_text().count("serving") == 3


def test_memory_that_a_dead_server_leaves_held_ends_the_job_with_the_holder(place, chat, tiny_target, monkeypatch):
    monkeypatch.setattr(server.Server, "_held", lambda self: ["GPU 0 has 40.0 GiB in use; held by process 7"])
    with pytest.raises(DraftlineError, match=r"(?s)exit status 7.*No other one can start: GPU 0 has 40.0 GiB"):
        complete(ROWS, chat, tiny_target.manifest, SGLANG, run_options(place, "mortal"))
    assert (place / "job.server.log").read_text().count("serving") == 1


def test_sigkill_of_the_job_mid_shard_then_a_second_call(place, tiny_target):
    run = run_options(place, "daemon", "holds")
    line = command(tiny_target, place, run)
    job = subprocess.Popen(line, cwd=place, stderr=subprocess.DEVNULL)
    until(lambda: stored(place) == 3, "three finished rows")
    family = [pid(place), pid(place, "daemon"), *(p.pid for p in psutil.Process(job.pid).children(recursive=True))]
    job.kill()
    job.wait()
    for number in family:
        until(lambda number=number: not lives(number), "the end of all processes")
    before = asked(place)
    (place / "go").touch()
    again = subprocess.run(line, cwd=place, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "3 of 16 rows are in the store" in again.stderr
    rows = provenance.read_parquet(place / "0000.parquet").to_pylist()
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in ROWS)
    assert len(before) == 3
    assert sorted(asked(place)) == sorted(tuple(row["prompt_ids"]) for row in rows)
    assert provenance.parquet_facts(place / "0000.parquet", "engine_version") == "sglang 0.5.17, torch 2.11.0"


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_job_that_is_asked_to_end_ends_its_server_first(place, tiny_target, how, status):
    line = command(tiny_target, place, run_options(place, "daemon", "holds"))
    job = subprocess.Popen(
        line,
        cwd=place,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # The tests may run in the background.
    )
    until(lambda: stored(place) == 3, "three finished rows")
    job.send_signal(how)
    assert job.wait() == status
    assert not lives(pid(place))
    assert not lives(pid(place, "daemon"))


def test_a_job_whose_gpu_is_held_starts_no_server_and_one_that_leases_it_does(place, tiny_target, library):  # noqa: F811
    machine = Machine(place, library)
    line = command(tiny_target, place, {**run_options(place), "device": "cuda"})
    code = (
        f"import runpy, sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nfrom draftline import gpus\n"
        "gpus.SETTLING = 0.0\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    line = [sys.executable, "-c", code, *line[1:], "--gpus", "1"]
    machine.show(gpu(3, 40 << 30), f"compute {os.getpid()} {40 << 30}")
    refused = subprocess.run(line, cwd=place, env=machine.environment, capture_output=True, text=True)
    assert refused.returncode == 1
    assert f"GPU 0 is held by process {os.getpid()}" in refused.stderr
    assert not (place / "server.pid").exists()
    machine.show(gpu(3))
    done = subprocess.run(line, cwd=place, env=machine.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "GPUs visible: 0" in (place / "results/logs/sglang.server.log").read_text()


def command(target, place: Path, run: dict) -> list[str]:
    """The command line of a job on all of `ROWS`."""
    record = {"rule": "prompts", "id": "p", "settings": "s", "inputs": {}}
    provenance.write_parquet(place / "prompts.parquet", pyarrow.Table.from_pylist(ROWS), record)
    values = {"rule": "completions", "config": {"completions": SGLANG}, "code": fingerprint("completions")}
    words = [
        *(sys.executable, SCRIPTS / "completions.py", "--settings", settings.write(values, place / "settings")),
        *("--run", json.dumps({name: run[name] for name in ("device", "engine")}), "--threads", "1"),
        *("--manifest", target.manifest_path, "--tokenizer", target.tokenizer_path),
        *("--prompts", place / "prompts.parquet", "--output", place / "0000.parquet"),
    ]
    return [str(word) for word in words]


def stored(place: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (place / "results/.resume/rows").glob("*/*/*.jsonl"))


# The command line, and the plan ---------------------------------------------------------------------------------------


def test_the_command_line_says_what_the_config_says(tmp_path, tiny_target):
    how = {"tensor_parallel": 2, "memory_fraction": 0.8, "flags": ["--speculative-num-steps", 3]}
    engine = sglang.SGLangEngine(tiny_target.manifest, run_options(tmp_path, **how))
    assert engine.api.stop_ids == tuple(tiny_target.manifest.eos_token_ids)
    words = engine.server.program.command(4000, Path("/key.yaml"))
    assert words[:5] == [str(tmp_path / "python"), "-m", "sglang.launch_server", "--config", "/key.yaml"]
    given = dict(zip(words[3::2], words[4::2]))
    assert given == {
        "--config": "/key.yaml",
        "--model-path": tiny_target.manifest.model,
        "--host": "127.0.0.1",
        "--port": "4000",
        "--dtype": tiny_target.manifest.dtype,
        "--context-length": str(tiny_target.manifest.max_position_embeddings),
        "--random-seed": "0",
        "--tp-size": "2",
        "--dp-size": "1",
        "--mem-fraction-static": "0.8",
        "--speculative-num-steps": "3",
    }


def test_an_interpreter_that_is_missing_or_has_no_sglang_is_named_with_what_makes_it(tmp_path, place):
    with pytest.raises(DraftlineError, match=r"engine.python: .*/.venv-none/bin/python: no such .* make env-sglang"):
        sglang.interpreter({"python": ".venv-none/bin/python"})
    with pytest.raises(
        DraftlineError, match=r"has no SGLang \(.*No package metadata.*sglang.*\); run: make env-sglang"
    ):
        sglang.version({"python": sys.executable})


def test_gpus_reach_sglang_by_number_in_the_order_of_the_lease(tmp_path, library):  # noqa: F811 - a fixture
    machine = Machine(tmp_path, library)
    machine.show(gpu(0), gpu(1), gpu(2))
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\nfrom draftline.engines.sglang import gpu_numbers\nprint(gpu_numbers())"
    environment = {**machine.environment, "CUDA_VISIBLE_DEVICES": "GPU-2222aaaa-0000,GPU-0000aaaa-0000"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "{'CUDA_DEVICE_ORDER': 'PCI_BUS_ID', 'CUDA_VISIBLE_DEVICES': '2,0'}", done.stderr


@pytest.mark.parametrize(("flags", "gpus"), [([], 6), (["--enable-dp-attention"], 3)])
def test_jobs_ask_for_as_many_gpus_as_their_server_takes(monkeypatch, tmp_path, flags, gpus):
    engine = {**ENGINE, "tensor_parallel": 3, "data_parallel": 2, "flags": flags}
    preflight = {"preflight": {}, "hidden_states": {}}
    made: plan.Plan = a_plan(monkeypatch, tmp_path, preflight)
    made.config |= {"completions": {"engine": "sglang"}, "engine": engine, "target": {"stage_to": None}}
    for rule in ("completions", "bench_completions", "canary"):
        assert made.resource(rule, "gpus") == gpus
        assert made.run_options(rule)["gpus"] == gpus
        assert made.run_options(rule)["engine"] == engine
    assert made.resource("hidden_states", "gpus") == 1
