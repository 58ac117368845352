"""At most one process makes an artifact at a time, on whichever node it runs.

A job holds a lock file below results/.resume/locks while it works. The kernel frees the lock when the process ends, however
it ends, so nothing is ever left to clear.
"""

import contextlib
import fcntl
import hashlib
import os
import socket
from pathlib import Path
from typing import TextIO

from draftline.errors import DraftlineError

LOCKS = Path("results/.resume/locks")


def claim(output: str) -> contextlib.ExitStack:
    """Take the lock of the job whose first output is `output`, freed when the result is closed.

    Raises DraftlineError that names the process which holds it.
    """
    path = LOCKS / hashlib.sha256(output.encode()).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - it is open as long as the lock is held
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DraftlineError(
                f"{output}: {_holder(file)} is making it; wait for it or end it, then run again"
            ) from None
        except OSError:
            pass  # A file system without locks: there draftline.slurm and Snakemake's own lock stand alone.
        if _is_at(file, path):
            break
        file.close()  # Its holder ended, and removed it, after we had opened it.
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    held = contextlib.ExitStack()
    held.enter_context(file)
    held.callback(path.unlink, missing_ok=True)
    return held


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(file: TextIO) -> str:
    file.seek(0)
    return file.read() or "another process"
