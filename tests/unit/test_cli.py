"""A command checks what it was given, records what it read, and ends with one line when something is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftline import provenance, settings
from draftline.fingerprint import fingerprint

SCRIPTS = Path(provenance.__file__).resolve().parent.parent
OUTPUTS = ["--output", "results/out.json", "--log", "logs/out.log"]
COMMAND = """
import sys
sys.path.insert(0, {scripts!r})
from draftline.cli import Command, Job
from draftline.errors import DraftlineError

command = Command("report", "A command.")
command.input("source")
command.output("output")

def work(job: Job) -> None:
    from draftline import provenance
    print("to the log")
    {body}
    provenance.write_json(job.output, {{"config": job.config}}, job.record)

command.run(work)
"""


@pytest.fixture
def run(tmp_path):
    values = {"rule": "report", "config": {"x": 1}, "code": fingerprint("report")}
    path = settings.write(values, tmp_path / "settings" / "report")
    provenance.write_json(
        tmp_path / "source.json", {}, {"rule": "other", "id": "i" * 16, "settings": "s" * 16, "inputs": {}}
    )

    def run(body="pass", settings_path=path, source="source.json"):
        script = tmp_path / "command.py"
        script.write_text(COMMAND.format(scripts=str(SCRIPTS), body=body))
        return subprocess.run(
            [sys.executable, script, "--settings", settings_path, "--source", source, *OUTPUTS],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    run.path, run.folder, run.values = path, tmp_path, values
    return run


def test_the_output_records_settings_and_inputs(run):
    result = run()
    assert result.returncode == 0, result.stderr
    record = provenance.read(run.folder / "results" / "out.json")
    inputs = {"source.json": "i" * 16}
    assert record == {
        "rule": "report",
        "id": provenance.identity("results/out.json", run.path.stem, inputs),
        "settings": run.path.stem,
        "inputs": inputs,
    }
    assert "to the log" in (run.folder / "logs" / "out.log").read_text()
    assert json.loads((run.folder / "logs" / "out.run.json").read_text())["rule"] == "report"


def test_code_that_changed_since_the_plan_is_refused(run):
    old = settings.write({**run.values, "code": "0" * 16}, run.folder / "settings" / "report")
    result = run(settings_path=old)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "changed after this run was planned" in result.stderr


def test_an_edited_settings_file_is_refused(run):
    run.path.write_text(run.path.read_text().replace('"x": 1', '"x": 2'))
    result = run()
    assert result.returncode == 1
    assert "was edited" in result.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('raise DraftlineError("config: x: 1: wrong; mend it")', "report: config: x: 1: wrong; mend it"),
        ("import errno; raise OSError(errno.ENOSPC, 'full', 'results/out.json')", "results/out.json: the disk is full"),
        ("raise MemoryError", "report: out of memory; give the job more (mem_mb)"),
        ("import torch; torch.empty(10**18)", "report: out of memory; give the job more (mem_mb)"),
        ("import torch; raise torch.OutOfMemoryError('CUDA')", "report: out of memory; give the job a GPU with more"),
        ("1 / 0", "internal error, ZeroDivisionError: division by zero; the trace is in logs/out.log"),
    ],
)
def test_errors_are_one_line_and_leave_no_output(run, body, message):
    result = run(body)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (run.folder / "results" / "out.json").exists()
    assert message in (run.folder / "logs" / "out.log").read_text()


def test_a_torn_input_is_refused_by_path(run):
    (run.folder / "source.json").write_text('{"draftline": {')
    result = run()
    assert result.returncode == 1
    assert "source.json: damaged or cut short" in result.stderr
