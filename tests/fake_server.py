"""An inference server's lifecycle without a model: what it does besides answering is said by words on its command line.

    fake_server.py PORT KEY_FILE FOLDER [word ...]

Answers POST /generate in the least form of SGLang's protocol. Notes its pid, and a daemon's, in FOLDER.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, KEY, FOLDER, WORDS = (
    int(sys.argv[1]),
    json.loads(Path(sys.argv[2]).read_text())["api-key"],
    Path(sys.argv[3]),
    sys.argv[4:],
)

LOCK = threading.Lock()


def note(name: str) -> None:
    path = FOLDER / f"{name}.pid"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked = 0

    def do_GET(self) -> None:
        self.reply(200, {})

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with LOCK:
            Handler.asked += 1
            number = Handler.asked
        if self.headers["Authorization"] != f"Bearer {KEY}":
            return self.reply(401, {"error": "Unauthorized"})
        if "refuses for ever" in WORDS or ("refuses" in WORDS and number <= 3):
            return self.reply(503, {"error": "warming up"})
        if "mortal" in WORDS and number > 1:
            print("RuntimeError: CUDA error: an illegal memory access", flush=True)
            os._exit(7)
        while "holds" in WORDS and number > 4 and not (FOLDER / "go").exists():
            time.sleep(0.02)
        wanted = question["sampling_params"]["max_new_tokens"]
        ids = [100 + (sum(question["input_ids"]) + n) % 50 for n in range(wanted)]
        finish = {"type": "length", "length": wanted}
        with open(FOLDER / "answered.jsonl", "a") as file:
            file.write(f"{question['input_ids']}\n")
        return self.reply(200, {"output_ids": ids, "meta_info": {"finish_reason": finish}})

    def reply(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    allow_reuse_address = False
    request_queue_size = 128
    daemon_threads = True


def leave() -> None:
    """Become a daemon: another session, and no parent that is known."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            if "deaf" in WORDS:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note("daemon")
            while True:
                time.sleep(1)
        os._exit(0)


print(f"starting with {KEY}", flush=True)
print("GPUs visible:", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if "daemon" in WORDS:
    leave()
    while not (FOLDER / "daemon.pid").exists():
        time.sleep(0.02)
note("server")


def obey(*_: object) -> None:
    print("asked to end", flush=True)
    os._exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in WORDS else obey)
if "crashes" in WORDS:
    print("torch.OutOfMemoryError: CUDA out of memory\nfarewell", flush=True)
    sys.exit(3)
if "hangs" in WORDS:
    print("context made", flush=True)
    threading.Event().wait()
if "reads" in WORDS:
    while not (FOLDER / "go").exists():
        with open("/dev/zero", "rb", buffering=0) as weights:
            weights.read(1 << 23)
        time.sleep(0.05)
server = Server(("127.0.0.1", PORT), Handler)
print("serving", flush=True)
server.serve_forever()
