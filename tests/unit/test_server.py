"""A server that a job starts is ready when it answers, is ended wholly, and never lives on; tests/fake_server.py plays it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftline import activity, server
from draftline.activity import Activity
from draftline.errors import DraftlineError
from draftline.server import Program, Server
from gpu_world import GIB, Machine, build_library, gpu

TESTS = Path(__file__).resolve().parent.parent
FAKE = TESTS / "fake_server.py"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
QUESTION = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
JOB = """
import sys
from pathlib import Path
sys.path[:0] = [{scripts!r}, {tests!r}]
from draftline import server
from test_server import asks, program
server.GRACE, server.MEMORY_SECONDS = {grace}, {memory_seconds}
made = server.Server(program(Path({folder!r}), *{words!r}), Path({folder!r}) / "server.log", {stall}, gpus={gpus})
{then}
"""
SERVE = """
made.start(lambda: asks(made))
print("ready", flush=True)
sys.stdin.readline()
print("end", *made.end(), flush=True)
"""


def program(folder: Path, *words: str) -> Program:
    def command(port: int, file: Path) -> list[str]:
        return [sys.executable, str(FAKE), str(port), str(file), str(folder), *words]

    return Program("fake", command, lambda key: json.dumps({"api-key": key}), caches=[folder / "cache"])


def asks(made: Server) -> str | None:
    """Why the server does not answer a question; None if it does."""
    try:
        headers = {"Authorization": f"Bearer {made.key}"}
        question = urllib.request.Request(f"{made.url}/generate", json.dumps(QUESTION).encode(), headers)
        with DIRECT.open(question, timeout=60) as reply:
            content = reply.read().decode()
        return None if len(json.loads(content)["output_ids"]) == 2 else content
    except urllib.error.HTTPError as refusal:
        return refusal.read().decode()
    except OSError as error:
        return str(error)


def until(condition: Callable[[], Any], what: str) -> Any:
    """What `condition` gives once that is true. A test that waits for what never comes fails after two minutes."""
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)
    return found


def pid(folder: Path, name: str = "server") -> int:
    return int(until(lambda: (folder / f"{name}.pid").exists() and (folder / f"{name}.pid").read_text(), name))


def lives(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Servers of the fake program, which end with the test."""
    made: list[Server] = []

    def one(*words: str, stall: float = 60, gpus: bool = False) -> Server:
        made.append(Server(program(tmp_path, *words), tmp_path / "logs" / "x.server.log", stall, gpus))
        return made[-1]

    yield one
    for each in made:
        each.end()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A process that starts a server and keeps it until a line comes on its standard input."""
    jobs: list[subprocess.Popen[str]] = []

    def one(*words: str, environment: dict[str, str] | None = None, **how: Any) -> subprocess.Popen[str]:
        values = {"grace": 5.0, "memory_seconds": 60.0, "stall": 60, "gpus": False, "then": SERVE} | how
        places = {"scripts": str(TESTS.parent / "scripts"), "tests": str(Path(__file__).parent)}
        script = f"import sys; sys.path.insert(0, {str(TESTS)!r})" + JOB.format(
            folder=str(tmp_path), words=words, **places, **values
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        jobs.append(subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment, **pipes))
        return jobs[-1]

    yield one
    for job in jobs:
        job.kill()
        job.communicate()


# Start ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def starting(made: Server) -> Iterator[Future[None]]:
    """The start of a server, in a thread. The test sets how long it may be silent once it has come so far."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(made.start, lambda: asks(made))


def test_ready_is_a_server_that_answered_not_one_with_an_open_port(make, tmp_path):
    made = make("refuses")
    made.start(lambda: asks(made))
    assert made.log.read_text().count('" 503 ') == 3
    assert made.failure is None
    assert made.end() == []
    assert not lives(pid(tmp_path))


def test_a_server_that_refuses_the_question_again_and_again_is_not_waited_for_for_ever(make, tmp_path):
    made = make("refuses for ever")
    with starting(made) as start:
        until(lambda: made.log.exists() and '" 503 ' in made.log.read_text(), "a refusal")
        made.stall_seconds = 5
        with pytest.raises(DraftlineError, match=r'does not answer: {"error": "warming up"}; its log is '):
            start.result()
    assert not lives(pid(tmp_path))


def test_the_key_is_in_neither_the_log_nor_a_command_line(make, tmp_path):
    made = make()
    made.start(lambda: asks(made))
    assert made.key.isalnum(), "a key that begins with a dash would be taken for a flag"
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not any(made.key in line for line in lines)
    assert "starting with (key)" in made.log.read_text()
    ours = [line for line in lines if f"{FAKE} " in line and f" {tmp_path}" in line]  # Other tests have servers too.
    (file,) = [word for line in ours for word in line.split() if word.endswith(".yaml")]
    assert os.stat(file).st_mode & 0o77 == 0
    made.end()
    assert not os.path.exists(file)


def test_a_port_that_is_taken_meanwhile_is_left_for_another_and_its_owner_is_not_shown_the_key(make, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as owner:
        ports = iter([owner.getsockname()[1], server.free_port()])
        monkeypatch.setattr(server, "free_port", lambda: next(ports))
        made = make()
        made.start(lambda: asks(made))
        assert made.port != owner.getsockname()[1]
        owner.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                visitor, _ = owner.accept()
                assert visitor.recv(1000) == b""


def test_ports_that_are_always_taken_end_the_start(make, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as owner:
        monkeypatch.setattr(server, "PORTS", 2)
        monkeypatch.setattr(server, "free_port", lambda: owner.getsockname()[1])
        made = make()
        with pytest.raises(DraftlineError, match=r"(?s)2 ports were taken.*Address already in use"):
            made.start(lambda: asks(made))


def test_no_other_port_is_tried_while_the_memory_is_held(make, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as owner:
        monkeypatch.setattr(server, "free_port", lambda: owner.getsockname()[1])
        monkeypatch.setattr(Server, "_held", lambda self: ["GPU 0 has 40.0 GiB in use"])
        made = make()
        with pytest.raises(DraftlineError, match="fake: no other server can start: GPU 0 has 40"):
            made.start(lambda: asks(made))


def test_a_server_that_ends_while_it_starts_is_an_error_with_its_last_words_and_is_not_tried_again(make):
    made = make("crashes")
    with pytest.raises(DraftlineError) as caught:
        made.start(lambda: asks(made))
    assert str(caught.value).splitlines() == [
        f"fake: the server ended (exit status 3); its log is {made.log}",
        "  torch.OutOfMemoryError: CUDA out of memory",
    ]
    assert made.log.read_text().count("starting") == 1


def test_a_program_that_is_not_there_is_named(tmp_path):
    made = Server(Program("fake", lambda port, file: ["/no/python"], str), tmp_path / "server.log", 60, gpus=False)
    with pytest.raises(DraftlineError, match="/no/python: No such file or directory"):
        made.start(lambda: None)


def test_a_server_that_hangs_while_it_starts_is_ended_with_its_last_lines(make, tmp_path):
    made = make("hangs")
    with starting(made) as start:
        until(lambda: made.log.exists() and "context made" in made.log.read_text(), "the server's last line")
        made.stall_seconds = 1
        with pytest.raises(
            DraftlineError,
            match=r"(?s)no sign of life for 1 s .*\n  starting with .*\n  GPUs visible: .*\n  context made",
        ):
            start.result()
    assert not lives(pid(tmp_path))


def test_a_server_that_says_nothing_but_reads_is_waited_for(make, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.1)
    made = make("reads")
    with starting(made) as start:
        process = psutil.Process(pid(tmp_path))
        made.stall_seconds = 3
        begun = time.time()
        until(lambda: time.time() - begun > 5, "five seconds")
        assert process.is_running()
        made.stall_seconds = 60
        (tmp_path / "go").touch()
        start.result()
    assert made.failure is None


# Signs of life --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch) -> Callable[[float], None]:
    """Moves the time that draftline.activity sees."""
    now = [time.monotonic(), time.time()]
    monkeypatch.setattr(activity.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(activity.time, "time", lambda: now[1])

    def move(seconds: float) -> None:
        now[0] += seconds
        now[1] += seconds

    return move


class Reader(subprocess.Popen):
    """A process that reads when it is told to, and nothing else."""

    def read(self, size: int) -> None:
        self.stdin.write(f"{size}\n")
        self.stdin.flush()
        assert self.stdout.readline() == f"{size}\n"


READ = """
import sys
with open("/dev/zero", "rb", buffering=0) as file:
    for line in sys.stdin:
        print(len(file.read(int(line))), flush=True)
"""


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader([sys.executable, "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


def test_each_sign_of_life_counts_and_silence_is_told(tmp_path, clock, reader):
    log, cache, memory, members = tmp_path / "log", tmp_path / "cache", {"GPU 0": 700 << 20}, []
    cache.mkdir()
    os.utime(cache, (0, 0))
    log.touch()
    watched = Activity(log, [cache], lambda: members, lambda: dict(memory))
    clock(100)
    assert not watched.quiet(101)
    assert watched.quiet(100)
    log.write_text("a line")
    assert not watched.quiet(100)
    clock(100)
    assert watched.quiet(100)
    memory["GPU 0"] += 1 << 20
    assert not watched.quiet(100)
    clock(100)
    (cache / "kernel").mkdir()
    (cache / "kernel" / "x.cubin").write_bytes(b"x")
    os.utime(cache / "kernel" / "x.cubin", (activity.time.time() - 10,) * 2)
    for place in (cache, cache / "kernel"):
        os.utime(place, (0, 0))
    assert not watched.quiet(100)
    clock(89)
    assert not watched.quiet(100)
    clock(1)
    assert watched.quiet(100)
    members.append(psutil.Process(reader.pid))
    reader.read(200 << 20)
    assert not watched.quiet(100)
    clock(100)
    reader.read(1 << 20)
    assert watched.quiet(100), "a trickle is no reading of weights"
    watched.touch()
    assert not watched.quiet(100)


# End ------------------------------------------------------------------------------------------------------------------


def test_the_end_takes_a_daemon_and_one_that_ignores_sigterm_and_no_bystander(make, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "GRACE", 1.0)
    bystanders = [
        subprocess.Popen(["sleep", "600"]),
        subprocess.Popen([sys.executable, "-c", "input()", str(FAKE)], stdin=subprocess.PIPE, start_new_session=True),
    ]
    try:
        made = make("daemon", "deaf")
        made.start(lambda: asks(made))
        numbers = [pid(tmp_path, "server"), pid(tmp_path, "daemon")]
        assert os.getsid(numbers[1]) not in (os.getsid(numbers[0]), os.getsid(0))
        assert made.end() == []
        assert not any(map(lives, numbers))
        assert all(bystander.poll() is None for bystander in bystanders)
    finally:
        for bystander in bystanders:
            bystander.kill()
            bystander.wait()


def test_sigkill_of_the_job_ends_the_server_and_its_daemon(start_job, tmp_path):
    job = start_job("daemon", "deaf", grace=1.0)
    assert job.stdout.readline() == "ready\n"
    family = psutil.Process(job.pid).children(recursive=True)
    numbers = [pid(tmp_path, "server"), pid(tmp_path, "daemon"), *(process.pid for process in family)]
    job.kill()
    for number in numbers:
        until(lambda number=number: not lives(number), "the end of all processes")


def test_sigterm_to_the_job_ends_the_server_before_the_job(start_job, tmp_path):
    wait = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\ntry:" + SERVE.replace(
        "\n", "\n    "
    )
    job = start_job("daemon", then=wait + "\nfinally:\n    made.end()")
    assert job.stdout.readline() == "ready\n"
    job.terminate()
    assert job.wait() == 143
    assert not lives(pid(tmp_path, "server"))
    assert not lives(pid(tmp_path, "daemon"))


def test_sigkill_of_the_guard_ends_the_server_and_the_job_ends_the_daemon(make, tmp_path):
    made = make("daemon")
    made.start(lambda: asks(made))
    numbers = [pid(tmp_path, "server"), pid(tmp_path, "daemon")]
    file = psutil.Process(numbers[0]).cmdline()[3]
    psutil.Process(numbers[0]).parent().kill()
    assert "guard was killed by signal 9" in until(lambda: made.failure, "the failure")
    until(lambda: not lives(numbers[0]), "the server's end")
    made.end()
    assert not lives(numbers[1])
    assert not Path(file).exists()


# Serving --------------------------------------------------------------------------------------------------------------


def test_a_server_killed_while_it_serves_is_noticed_and_its_daemon_ended(make, tmp_path):
    made = make("daemon")
    made.start(lambda: asks(made))
    psutil.Process(pid(tmp_path)).kill()
    failure = until(lambda: made.failure, "the failure")
    assert failure.startswith("fake: the server ended (killed by signal 9); its log is ")
    until(lambda: not lives(pid(tmp_path, "daemon")), "the daemon's end")


def test_a_server_that_is_stopped_while_it_owes_answers_is_ended_and_another_one_starts(make, tmp_path):
    made = make()
    made.start(lambda: asks(made))
    first = pid(tmp_path)
    os.kill(first, signal.SIGSTOP)
    made.stall_seconds = 1  # Not earlier: to start takes as long as the machine is busy.
    with made.owing():
        failure = until(lambda: made.failure, "the failure")
    assert "no sign of life for 1 s" in failure
    assert "asked to end" in made.log.read_text(), "a stopped process hears SIGTERM when it goes on"
    assert not lives(first)
    assert made.end() == []
    made.stall_seconds = 60
    made.start(lambda: asks(made))
    assert made.failure is None
    assert pid(tmp_path) != first


def test_silence_is_no_stall_while_nothing_is_asked(make, monkeypatch):
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.05)
    made = make()
    made.start(lambda: asks(made))
    made.stall_seconds = 0.2
    begun = time.time()
    until(lambda: time.time() - begun > 1, "a second")
    assert made.failure is None


# The GPUs' memory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, library: Path) -> Machine:
    machine = Machine(tmp_path, library)
    machine.show(gpu(0, 1 << 20))
    machine.environment["CUDA_VISIBLE_DEVICES"] = "0"
    return machine


def test_the_end_waits_until_the_memory_is_back(machine, start_job, tmp_path):
    telling = "memory = made._memory\nmade._memory = lambda: print('looking', flush=True) or memory()\nprint('end'"
    job = start_job(gpus=True, environment=machine.environment, then=SERVE.replace('print("end"', telling))
    assert job.stdout.readline() == "ready\n"
    machine.show(gpu(0, 40 * GIB))
    job.stdin.write("\n")
    job.stdin.flush()
    for _ in range(3):  # It looks again as often as it was not content.
        assert job.stdout.readline() == "looking\n"
    assert not lives(pid(tmp_path))
    machine.show(gpu(0, 2 << 20))
    assert job.stdout.read().replace("looking\n", "") == "end\n"


def test_who_holds_memory_that_does_not_come_back_is_named(machine, start_job):
    job = start_job(gpus=True, environment=machine.environment, memory_seconds=0.5)
    assert job.stdout.readline() == "ready\n"
    machine.show(gpu(0, 41 * GIB), f"compute {os.getpid()} {40 * GIB}")
    job.stdin.write("\n")
    job.stdin.flush()
    line = job.stdout.readline()
    assert line.startswith(f"end GPU 0 has 41.0 GiB in use, 0.0 GiB before the server; held by process {os.getpid()} (")
    assert line.endswith("40.0 GiB\n")


def test_a_stall_names_the_memory_of_each_gpu(machine, start_job):
    machine.show(gpu(0, 716 << 20), gpu(1, 717 << 20), gpu(2))
    machine.environment["CUDA_VISIBLE_DEVICES"] = "0,1"
    job = start_job("hangs", gpus=True, environment=machine.environment, stall=1)
    assert "GPU 0: 716 MiB in use, GPU 1: 717 MiB in use; its log is" in job.stdout.read()
