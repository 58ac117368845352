"""The process between a job and the server that the job starts: it ends the server when the job is gone, however that went.

    python -P guard.py        started by draftline.server, with one line of JSON on standard input:
    {"command": [...], "log": FILE, "secret": TEXT, "file": FILE, "grace": SECONDS}

Standard input stays open as long as the job wants its server. When it closes, as it does upon SIGKILL of the job too, all that
descends from the server is ended: SIGTERM, and SIGKILL after `grace`. The server's output goes to the end of `log`, with
`secret` blotted out; `file`, which holds the secret, is deleted at the end. The exit status is the server's. Imports nothing
of Draftline's, whose modules would stand in the way of others of the same name.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None)
POLL_SECONDS = 0.1
BLOT = b"(key)"


def guard(command: list[str], log: str, secret: str, file: str, grace: float) -> int:
    """Run `command` until it ends or standard input closes, then end all that descends from it. Gives its exit status."""
    # What descends from the server becomes a child of this process when its own parent ends: nothing gets out of sight.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run(command, log, secret)
    except OSError as error:
        with open(log, "a", encoding="utf-8") as file_:
            print(f"Error: {command[0]}: {error.strerror}", file=file_)
        return 127
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children(grace)
        with contextlib.suppress(OSError):
            os.unlink(file)


def run(command: list[str], log: str, secret: str) -> int:
    # Where this process is killed, the server gets SIGKILL. It would too if just the thread that starts it ended.
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    assert server.stdout
    # No daemon: the interpreter waits for the last words of all who hold the pipe, who have been ended by then.
    threading.Thread(target=copy, args=(server.stdout, log, secret.encode())).start()
    while server.poll() is None:
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            return 0
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def copy(source: IO[bytes], log: str, secret: bytes) -> None:
    """Append what comes out of `source` to a file, as it comes, without the secret."""
    with open(log, "ab", buffering=0) as target:
        kept = b""
        while piece := os.read(source.fileno(), 1 << 16):
            kept = (kept + piece).replace(secret, BLOT)
            # An unfinished line may end within the secret.
            end = len(kept) if kept.endswith((b"\n", b"\r")) else max(0, len(kept) - len(secret))
            with contextlib.suppress(OSError):  # A full disk must not stop a server that has somebody to answer.
                target.write(kept[:end])
            kept = kept[end:]
        with contextlib.suppress(OSError):
            target.write(kept)


def end_children(grace: float) -> None:
    """End all that descends from this process, and what it starts meanwhile: gently, by force after `grace` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        asked: set[psutil.Process] = set()
        deadline = time.monotonic() + grace
        while (living := descendants()) and time.monotonic() < deadline:
            for process in living - asked:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
                    process.send_signal(signal.SIGCONT)  # One that was stopped hears the other one only then.
            asked |= living
            time.sleep(POLL_SECONDS)


def descendants() -> set[psutil.Process]:
    """Those that live; zombies wait for a parent, and for the end of this process."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


if __name__ == "__main__":
    sys.exit(guard(**json.loads(sys.stdin.readline())))
