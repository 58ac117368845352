"""A small supervisor with an HTTP service: what a maintenance window meets, in a folder of its own.

    supervisor.py run FOLDER      keep the service alive while it is wanted, until this process is ended
    supervisor.py start FOLDER    want it
    supervisor.py stop FOLDER     want it no longer; returns when its port is closed, as its worker may not have ended yet
    supervisor.py health FOLDER   0 when it answers
    supervisor.py pids FOLDER     its processes, the worker left out
    supervisor.py serve FOLDER    the service itself
    supervisor.py worker FOLDER   its worker

FOLDER holds `port`, `wanted` (up or down), `worker` (slow: ends a second after the service; stubborn: stays), and takes
`pid`, `worker.pid` and `events`: a line for each time the service came up or went down, with the time.
"""

import http.server
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def run(folder: Path) -> None:
    child = None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while True:
            wanted = (folder / "wanted").read_text() == "up"
            if wanted and (child is None or child.poll() is not None):
                child = subprocess.Popen([sys.executable, __file__, "serve", str(folder)], start_new_session=True)
                put(folder / "pid", str(child.pid))
            if not wanted and child is not None:
                child.terminate()
                child.wait()
                child = None
            time.sleep(0.05)
    finally:
        if child is not None:
            child.terminate()


def put(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def serve(folder: Path) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    worker = subprocess.Popen([sys.executable, __file__, "worker", str(folder)])
    put(folder / "worker.pid", str(worker.pid))
    http.server.HTTPServer.allow_reuse_address = True
    server = http.server.HTTPServer(("127.0.0.1", int((folder / "port").read_text())), Handler)
    note(folder, "up")
    try:
        server.serve_forever()
    finally:
        server.server_close()
        note(folder, "down")


def note(folder: Path, what: str) -> None:
    with open(folder / "events", "a") as file:
        file.write(f"{what} {time.time()}\n")


def worker(folder: Path) -> None:
    service = os.getppid()
    while os.getppid() == service or (folder / "worker").read_text() == "stubborn":
        time.sleep(0.1)
    time.sleep(1)


def healthy(folder: Path) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{(folder / 'port').read_text()}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def main(verb: str, folder: Path) -> None:
    if verb == "start":
        put(folder / "wanted", "up")
    elif verb == "stop":
        put(folder / "wanted", "down")
        while healthy(folder):
            time.sleep(0.05)
    elif verb == "health":
        sys.exit(not healthy(folder))
    elif verb == "pids":
        print((folder / "pid").read_text())
    else:
        {"run": run, "serve": serve, "worker": worker}[verb](folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
