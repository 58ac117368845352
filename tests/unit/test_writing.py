"""Two processes never make one artifact at a time, and a dead one's lock is free."""

import os
import signal
import subprocess
import sys

import pytest

from draftline.errors import DraftlineError
from draftline.fingerprint import SCRIPTS
from draftline.writing import LOCKS, claim

HOLD = (
    f"import sys, time; sys.path.insert(0, {str(SCRIPTS)!r}); from draftline.writing import claim\n"
    "held = claim('results/a.json'); print('up', flush=True); time.sleep(120)"
)


@pytest.fixture
def holder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_a_second_writer_is_refused_with_the_first_ones_process_and_host(holder):
    with pytest.raises(
        DraftlineError, match=rf"results/a.json: process {holder.pid} on {os.uname().nodename} is making"
    ):
        claim("results/a.json")


def test_another_output_is_free(holder):
    claim("results/b.json").close()


def test_a_killed_writer_holds_nothing(holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    claim("results/a.json").close()


def test_a_closed_claim_leaves_no_file(holder):
    with claim("results/b.json"):
        assert len(list(LOCKS.iterdir())) == 2
    assert len(list(LOCKS.iterdir())) == 1


def test_claims_that_follow_each_other_closely_never_overlap(tmp_path, monkeypatch):
    """The file is removed at each end; who had it open already must not take the removed one for the lock."""
    monkeypatch.chdir(tmp_path)
    code = HOLD.partition("held")[0] + (
        "import os\n"
        "from draftline.errors import DraftlineError\n"
        "print('up', flush=True); sys.stdin.read()\n"
        "end = time.monotonic() + 2\n"
        "while time.monotonic() < end:\n"
        "    try:\n"
        "        with claim('results/a.json'):\n"
        "            os.close(os.open('inside', os.O_CREAT | os.O_EXCL)); os.unlink('inside')\n"
        "    except DraftlineError: pass\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    writers = [subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) for _ in range(3)]
    assert [writer.stdout.readline() for writer in writers] == ["up\n"] * 3
    for writer in writers:
        writer.stdin.close()
    assert [(writer.stderr.read(), writer.wait()) for writer in writers] == [("", 0)] * 3
