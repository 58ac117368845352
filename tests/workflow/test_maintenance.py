"""A maintenance window around the tiny chain's hidden states, with an HTTP service under a supervisor."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import supervisor
from tiny_run import Run

import unlock
from hold import Hold

PART = "results/hidden_states/0000/0000.safetensors"
TOKENS = "results/tokens/0000.parquet"
STATE = "results/.resume/maintenance/stopped.json"
LIMIT = 300


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT} s: {what}"
        time.sleep(0.05)


class World:
    """A finished run without its first part of hidden states, and a service on the same machine."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            (folder / "port").write_text(str(free.getsockname()[1]))
        (folder / "worker").write_text("slow")
        (folder / "wanted").write_text("up")
        self.config = {
            **{verb: self.verb(verb) for verb in ("stop", "start", "health")},
            "processes": self.verb("pids"),
            "memory_seconds": 20,
            "health_seconds": 60,
        }
        self.write()
        (run.folder / PART).unlink()

    def verb(self, verb: str) -> str:
        return f"'{sys.executable}' '{supervisor.__file__}' {verb} '{self.folder}'"

    def write(self) -> None:
        text = self.run.config.read_text().partition("maintenance:")[0]
        self.run.config.write_text(f"{text}maintenance: {json.dumps(self.config)}\n")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "scripts/maintenance.py", *arguments, "--", "--configfile", "tiny.yaml", "--cores", "2"]

    def window(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*(arguments or [PART])), cwd=self.run.folder, capture_output=True, text=True, check=False
        )

    def open_window(self, hold: Hold) -> subprocess.Popen[str]:
        """A window in another process, with its job in the midst of its work, where it waits for a signal."""
        hold.at("hidden_states", "draftline.states_writer", "StatesWriter.put", 3)
        process = subprocess.Popen(
            self.command(PART),
            cwd=self.run.folder,
            env=hold.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # The tests may run under nohup.
        )
        hold.held("hidden_states")
        assert not supervisor.healthy(self.folder)
        return process

    def events(self) -> list[tuple[str, float]]:
        lines = (self.folder / "events").read_text().splitlines()
        return [(word, float(when)) for word, when in (line.split() for line in lines)]

    def is_as_before(self) -> bool:
        """The service is up, and nothing of a window is left."""
        return (
            supervisor.healthy(self.folder)
            and not (self.run.folder / STATE).exists()
            and not unlock.processes(self.run.folder.resolve())
        )

    def period(self, job: str) -> tuple[float, float]:
        """When a job began and ended."""
        record = json.loads((self.run.folder / f"results/logs/{job}.run.json").read_text())
        return record["started"], record["started"] + record["seconds"]


@pytest.fixture
def world(run: Run, tmp_path: Path) -> Iterator[World]:
    world = World(run, tmp_path / "service")
    with subprocess.Popen([sys.executable, supervisor.__file__, "run", str(world.folder)]) as process:
        try:
            until(lambda: supervisor.healthy(world.folder), "the service")
            yield world
        finally:
            supervised = psutil.Process(process.pid)
            supervised.suspend()  # It would start the service again.
            for child in supervised.children(recursive=True):
                child.kill()
            process.kill()


def test_the_service_is_down_while_the_jobs_run_and_no_longer(world: World) -> None:
    (world.run.folder / TOKENS).unlink()
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        done = world.window()
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert world.is_as_before()
    words, times = zip(*world.events())
    assert words == ("up", "down", "up")
    assert world.period("tokens/0000")[1] < times[1], "what the window needs was made before it"
    began, ended = world.period("hidden_states/0000-0000")
    assert times[1] < began < ended < times[2]
    assert "the service is healthy again; it was down for " in done.stdout
    assert world.run.pending(PART) == {}


def test_a_maintenance_section_makes_nothing_stale(world: World) -> None:
    assert "maintenance:" in world.run.config.read_text()
    assert world.run.pending("results/report.html", TOKENS) == {}


def test_the_service_is_never_stopped_when_nothing_is_pending(world: World) -> None:
    done = world.window(TOKENS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the service stays up" in done.stdout
    assert [word for word, _ in world.events()] == ["up"]


def test_a_dry_run_tells_what_the_window_would_hold_and_stops_nothing(world: World) -> None:
    (world.run.folder / TOKENS).unlink()
    done = subprocess.run(
        [*world.command(PART), "-n"], cwd=world.run.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"would make results/gates/mask/0000.json, {TOKENS} before the window, and in it {PART}" in done.stdout
    assert [word for word, _ in world.events()] == ["up"]


def test_the_service_is_up_again_after_a_job_failed(world: World) -> None:
    os.truncate(world.run.folder / TOKENS, 1000)
    done = world.window()
    assert done.returncode == 1
    assert "maintenance: snakemake: exit status 1" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert world.is_as_before()
    assert [word for word, _ in world.events()] == ["up", "down", "up"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_service_is_up_again_after_a_signal(world: World, hold: Hold, number: signal.Signals) -> None:
    process = world.open_window(hold)
    while process.poll() is None and (world.run.folder / STATE).exists():  # Impatience changes nothing.
        process.send_signal(number)
        time.sleep(0.1)
    output, _ = process.communicate()
    assert process.returncode == 128 + number
    assert f"interrupted by {number.name}" in output
    assert world.is_as_before()
    assert not list((world.run.folder / ".snakemake/locks").glob("*.lock"))


def test_the_next_call_after_a_sigkill_restores_the_service_first(world: World, hold: Hold) -> None:
    process = world.open_window(hold)
    process.kill()
    process.wait()
    assert not supervisor.healthy(world.folder)
    reminder = world.run.snakemake("-n", TOKENS).stderr
    assert "its service is still stopped" in reminder
    assert world.run.working("hidden_states")
    done = world.window()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index(f"process {process.pid} was killed") < done.stdout.index("stopping the service")
    assert [word for word, _ in world.events()] == ["up", "down", "up", "down", "up"]
    assert world.is_as_before()
    assert "its service is still stopped" not in world.run.snakemake("-n", TOKENS).stderr


def test_a_stop_that_outlives_its_killed_window_is_awaited_before_the_start(world: World) -> None:
    begun, go = world.folder / "begun", world.folder / "go"
    world.config["stop"] = f"touch '{begun}'; while ! test -e '{go}'; do sleep 0.1; done; {world.verb('stop')}"
    world.write()
    process = subprocess.Popen(world.command(PART), cwd=world.run.folder, stdout=subprocess.DEVNULL)
    until(begun.exists, "the stop")
    process.kill()
    process.wait()
    restore = subprocess.Popen(world.command("--restore"), cwd=world.run.folder, stdout=subprocess.PIPE, text=True)
    assert restore.stdout is not None
    assert "was killed in its window" in restore.stdout.readline()
    go.touch()
    restore.communicate()
    assert restore.returncode == 0
    assert [word for word, _ in world.events()] == ["up", "down", "up"]
    assert world.is_as_before()


def test_a_leftover_of_the_service_is_ended_before_the_jobs_run(world: World) -> None:
    (world.folder / "worker").write_text("stubborn")
    world.config["memory_seconds"] = 2
    world.write()
    worker = psutil.Process(int((world.folder / "worker.pid").read_text()))
    done = world.window()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ending what is left of the service: process {worker.pid} " in done.stdout
    assert not worker.is_running()


def test_a_second_window_is_refused_by_the_first_ones_process(world: World, hold: Hold) -> None:
    process = world.open_window(hold)
    try:
        second = world.window()
        assert second.returncode == 1
        assert f"a window is open already, by process {process.pid} on " in second.stderr
    finally:
        process.terminate()
        process.communicate()
    assert [word for word, _ in world.events()] == ["up", "down", "up"]


def test_a_start_that_fails_is_told_and_can_be_tried_again(world: World) -> None:
    mended = world.folder / "mended"
    world.config["stop"] += "; exit 4"
    world.config["start"] = f"test -e '{mended}' && {world.verb('start')}"
    world.write()
    done = world.window()
    assert done.returncode == 1
    assert "maintenance.start: exit status 1" in done.stderr
    assert "THE SERVICE IS DOWN" in done.stderr
    assert "before that: maintenance.stop: exit status 4" in done.stderr
    assert (world.run.folder / STATE).exists()
    mended.touch()
    assert world.window("--restore").returncode == 0
    assert world.is_as_before()


def test_a_stop_that_fails_ends_in_a_started_service(world: World) -> None:
    world.config["stop"] += "; exit 4"
    world.write()
    done = world.window()
    assert done.returncode == 1
    assert "maintenance.stop: exit status 4" in done.stderr
    assert world.is_as_before()
    assert not (world.run.folder / PART).exists()


@pytest.mark.parametrize("key", ["health", "processes"])
def test_a_command_that_fails_before_the_window_leaves_the_service_alone(world: World, key: str) -> None:
    world.config[key] = "exit 1"
    world.write()
    done = world.window()
    assert done.returncode == 1
    assert f"maintenance.{key}: " in done.stderr
    assert [word for word, _ in world.events()] == ["up"]


def test_a_config_without_the_section_is_refused(run: Run) -> None:
    (run.folder / PART).unlink()
    command = [sys.executable, "scripts/maintenance.py", "--", "--configfile", "tiny.yaml", "--cores", "2"]
    done = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "config: maintenance: missing" in done.stderr
