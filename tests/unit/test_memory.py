"""Memory that is left within a control group's limit, in a real group where one can be made."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from draftline import memory

SCRIPTS = Path(memory.__file__).parent.parent
ASK = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from draftline import memory; print(memory.available())"
LIMIT = 512 * 2**20


def test_without_a_limit_it_is_what_the_machine_has():
    free = psutil.virtual_memory()
    assert 0 < memory.available() <= free.total


@pytest.fixture
def group():
    """A memory control group of its own with a limit, below that of this process."""
    found = {
        line.split(":", 2)[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
    }
    if "memory" in found:
        folder, limit = Path("/sys/fs/cgroup/memory") / found["memory"].lstrip("/"), "memory.limit_in_bytes"
    else:
        folder, limit = Path("/sys/fs/cgroup") / found.get("", "/").lstrip("/"), "memory.max"
    folder /= f"draftline-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (folder / limit).write_text(str(LIMIT))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield folder
    finally:
        folder.rmdir()


def test_a_limit_of_the_control_group_counts(group):
    into = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0'); "
    done = subprocess.run([sys.executable, "-c", into + ASK], capture_output=True, text=True, check=True)
    assert LIMIT // 2 < int(done.stdout) < LIMIT
