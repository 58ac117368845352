"""What belongs into a maintenance window, and which processes are a service's."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftline import processes
from draftline import service as module
from draftline.errors import DraftlineError
from draftline.maintenance import Planned, split
from draftline.service import Service, end, recall, remember

TARGET = Planned("target", ("settings",), ("manifest",))
CANARY = Planned("canary", ("manifest",), ("canary",))
COMPLETIONS = Planned("completions", ("manifest", "canary"), ("completions",))
TOKENS = Planned("tokens", ("completions",), ("tokens",))
STATES = [Planned("hidden_states", ("manifest", "tokens", "canary"), (f"part{n}",)) for n in range(2)]
GATE = Planned("hidden_states_gate", ("manifest", "part0"), ("gate",))
TRAIN = [
    Planned("train_segment", ("part0", "part1", "gate"), ("state1", "metrics1")),
    Planned("train_segment", ("part0", "part1", "gate", "state1"), ("state2", "metrics2")),
]
KEEP = Planned("keep_checkpoint", ("state1",), ("weights1",))
RULES = ["canary", "hidden_states", "hidden_states_gate"]


@pytest.mark.parametrize(
    ("jobs", "rules", "before", "wanted"),
    [
        pytest.param([TARGET, TOKENS], RULES, [], [], id="nothing of the window"),
        pytest.param(
            [TARGET, CANARY, COMPLETIONS, TOKENS, *STATES], RULES, ["manifest"], ["canary"],
            id="the canary has a window of its own, since the completions wait for it",
        ),
        pytest.param(
            [TOKENS, *STATES, GATE], RULES, ["tokens"], ["gate", "part1"], id="the gate brings the part that it reads"
        ),
        pytest.param([*STATES, GATE, TRAIN[0]], RULES, [], ["gate", "part0", "part1"], id="what training reads"),
        pytest.param(
            TRAIN, ["train_segment"], [], ["metrics1", "metrics2", "state2"], id="a state that only the window reads"
        ),
        pytest.param(
            [*TRAIN, KEEP], ["train_segment"], [], ["metrics1", "metrics2", "state1", "state2"],
            id="a state that is read after the window too",
        ),
    ],
)  # fmt: skip
def test_a_window_holds_its_rules_jobs_and_needs_the_rest_before(
    jobs: list[Planned], rules: list[str], before: list[str], wanted: list[str]
) -> None:
    assert split(jobs, rules) == (before, wanted)
    assert split(jobs[::-1], rules) == (before, wanted)


def service(**values: Any) -> Service:
    commands = {"stop": "true", "start": "true", "health": "true", "processes": None}
    seconds = {"stop_seconds": 5, "memory_seconds": 1, "health_seconds": 5}
    return Service(**{**commands, **seconds, **values})


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "LOG", tmp_path / "log")
    return tmp_path / "log"


@pytest.fixture
def parent(tmp_path: Path) -> Any:
    """A process with a child that ignores SIGTERM; both are up."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        yield process
        for member in family:
            if member.is_running():
                member.kill()


def test_a_familys_children_are_known_and_words_that_are_no_pids_are_passed_over(parent: Any) -> None:
    found = service(processes=f"echo PID 0 1 $$ {os.getpid()} {parent.pid}").family()
    children = psutil.Process(parent.pid).children()
    assert [process.pid for process in found] == [parent.pid, *(child.pid for child in children)]


def test_a_child_that_outlives_its_parent_and_ignores_sigterm_is_ended(
    parent: Any, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 1.0)
    known = remember(service(processes=f"echo {parent.pid}").family())
    parent.kill()
    parent.wait()
    (child,) = recall(known)
    end([child], "what is left")
    assert recall(known) == []
    assert f"process {child.pid} " in log.read_text()


def test_a_reused_pid_is_another_process(parent: Any) -> None:
    ((pid, created), *_) = remember([psutil.Process(parent.pid)])
    assert next(process.pid for process in recall([(pid, created)])) == pid
    assert recall([(pid, created - 60)]) == []


def test_a_command_that_takes_too_long_is_ended_with_its_children(log: Path) -> None:
    while not (log.exists() and log.read_text()):  # One that did not even begin within its time shows nothing.
        with pytest.raises(DraftlineError, match=r"maintenance\.stop: did not return within 0\.5 s"):
            service(stop="echo $$; sleep 600 | cat").run("stop", 0.5)
    group = int(log.read_text())
    for _ in range(1200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("its children live on")


def test_a_service_that_start_leaves_in_the_background_survives_its_callers_signals(log: Path) -> None:
    service(start="sleep 600 & echo $!").run("start", 120)
    child = psutil.Process(int(log.read_text()))
    try:
        assert os.getsid(child.pid) != os.getsid(0)
    finally:
        child.send_signal(signal.SIGKILL)


def test_the_commands_are_run_where_the_log_cannot_be_written(log: Path, tmp_path: Path) -> None:
    log.mkdir()
    service(start=f"echo started; touch '{tmp_path / 'started'}'").run("start", 120)
    assert (tmp_path / "started").exists()
