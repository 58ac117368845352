"""Small HTTP servers in the test's own process, that answer as a test says and note what they were asked."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

STOP = 2
"""The stop id of these tests; ids lie below `VOCABULARY`."""
VOCABULARY = 1000

Answer = Callable[[dict[str, Any]], Any]


class StatusError(Exception):
    """Raised by an answer function: the server says this instead."""

    def __init__(self, code: int, words: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(code)
        self.code, self.words, self.headers = code, words, headers or {}


class DropError(Exception):
    """Raised by an answer function: the connection ends without a word."""


def native(body: dict[str, Any], ids: list[int] | None = None, **reason: Any) -> dict[str, Any]:
    """A reply of SGLang's /generate: as many ids as asked for, or `ids` and how they ended."""
    count = body["sampling_params"]["max_new_tokens"]
    ids = list(range(10, 10 + count)) if ids is None else ids
    return {"output_ids": ids, "meta_info": {"finish_reason": reason or {"type": "length", "length": count}}}


class World:
    """A server on a free port. `answer` makes the reply of a POST; `pages` are replies to GET, by path."""

    def __init__(self, answer: Answer = native, pages: dict[str, Any] | None = None, port: int = 0) -> None:
        self.answer, self.pages = answer, {"/health": {}} if pages is None else pages
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.most = self.flying = self.most_tokens = self.tokens = 0
        self._lock = threading.Lock()
        world = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                world.keys.add(self.headers.get("Authorization"))
                page = world.pages.get(self.path)
                self._say(404 if page is None else 200, page)

            def do_POST(self) -> None:
                world.keys.add(self.headers.get("Authorization"))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    self._say(200, world.take({**body, "path": self.path}))
                except StatusError as status:
                    self._say(status.code, {"error": status.words}, status.headers)
                except DropError:
                    self.close_connection = True

            def _say(self, code: int, value: Any, headers: dict[str, str] | None = None) -> None:
                data = json.dumps(value).encode()
                self.send_response(code)
                for name, text in (headers or {}).items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass  # The client went away, as some tests mean it to.

        self._server = Listener(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, body: dict[str, Any]) -> Any:
        """Note a POST and answer it."""
        tokens = len(body.get("input_ids", [])) + body.get("sampling_params", {}).get("max_new_tokens", 0)
        with self._lock:
            self.bodies.append(body)
            self.flying += 1
            self.tokens += tokens
            self.most, self.most_tokens = max(self.most, self.flying), max(self.most_tokens, self.tokens)
        try:
            return self.answer(body)
        finally:
            with self._lock:
                self.flying -= 1
                self.tokens -= tokens

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Wire:
    """A server below HTTP, on a free port: `talk` has each connection for itself, in a thread, until it returns."""

    def __init__(self, talk: Callable[[socket.socket], None]) -> None:
        self._talk = talk
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._talk(connection)


def hear(connection: socket.socket) -> dict[str, Any]:
    """The body of the next POST on a connection; OSError when it ends instead."""
    heard = b""
    while b"\r\n\r\n" not in heard:
        heard += _some(connection)
    head, _, body = heard.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += _some(connection)
    return json.loads(body)


def _some(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    if not piece:
        raise ConnectionResetError
    return piece


def reply(content: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """An HTTP reply as it goes over the wire."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + content
