"""Engine over HTTP: many requests in flight to any number of endpoints, from one event loop in a thread of its own.

    with HttpEngine(endpoints, checks) as engine:
        for request, result in engine.generate(requests, sampling): ...

The longest requests go first, because one that starts last keeps everybody waiting. An endpoint takes requests while both
their number and their tokens (prompt, sampled earlier, still to come) are within its limits, and the next one goes to
the endpoint that will be through with it first, judged by the tokens a second that it sampled lately. An endpoint that is out
of reach, answers 5xx again and again, or stands still is left out and tried again later; what it had is asked elsewhere.
"""

import asyncio
import contextlib
import functools
import os
import queue
import ssl
import threading
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import certifi
import orjson
from aiohttp.abc import AbstractStreamWriter

from draftline.engines import Request, Result, Sampling
from draftline.engines.answers import ABORTED, Checks, RefusedError
from draftline.engines.protocols import Answer, Api
from draftline.errors import DraftlineError
from draftline.progress import say

TRIES = 3
"""Times that a request is sent before the engine gives it back as an error."""
FAILURES = 3
"""Failures in a row, without an answer between them, after which an endpoint is left out."""
LONGEST_PAUSE = 60.0
"""Seconds; the wait before an endpoint is tried again begins at one and doubles up to this."""
SILENT_SECONDS = 30.0
"""An endpoint with requests that has answered nothing for so long is asked for its health, now and then again."""
HEALTH_SECONDS = 60.0
"""Time that it has to tell it."""
LEAST_RATE = 8.0
"""Tokens a second below which a single answer is taken for lost: a 32k-token answer at 30 tokens/s takes 18 minutes."""
RECENT_SECONDS = 60.0
"""Seconds of work after which older ones count less in an endpoint's tokens a second."""
CONNECT_SECONDS = 10.0
WRITE_SECONDS = 60.0
"""Time to connect to a server, and for it to take a request; an answer has no limit."""
LOOK_SECONDS = 0.2
"""Time between two looks at who is up."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Hosts that are never reached through a proxy."""

Found = list[tuple[Request, Result]]


@dataclass(frozen=True)
class Limits:
    """What an endpoint may have in flight, and how long it may be silent.

    `requests` and `tokens` are bounds for each endpoint; a single request over `tokens` goes alone. An endpoint that answers
    nothing for `stall_seconds`, beside the time that its longest answer takes at `LEAST_RATE`, stands still. With no endpoint
    up for `down_seconds`, requests end as errors.
    """

    requests: int = 256
    tokens: int = 2_000_000
    stall_seconds: float = 600.0
    down_seconds: float = 120.0


@dataclass(frozen=True)
class Endpoint:
    """A server's address (without the protocol's path), the protocol that it speaks, and the key for it.

    An endpoint without `api` is met before it gets requests (`HttpEngine`). `max_length` is the longest prompt and answer
    together that it takes, where it says so.
    """

    url: str
    api: Api | None = None
    key: str | None = field(default=None, repr=False)
    max_length: int | None = None


class BusyError(Exception):
    """Status 429: the server has enough to do. `seconds` to wait."""

    def __init__(self, seconds: float) -> None:
        super().__init__("busy")
        self.seconds = seconds


class FailedError(Exception):
    """A failure that may pass, with the status where there is one; `gone` when the server is not there, or not for now."""

    def __init__(self, text: str, gone: bool = False, status: int | None = None) -> None:
        super().__init__(text)
        self.gone, self.status = gone, status


class ServerRefusedError(DraftlineError):
    """What no other try will change, in the server's words."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """HTTP client of one server, made and used in one event loop. `seconds` for each reply; None is for as long as it takes.

    Connections stay open between requests, so there are as many as requests were ever in flight at once.
    """

    def __init__(self, url: str, key: str | None, seconds: float | None = None) -> None:
        """Raises DraftlineError when the environment names a proxy of a kind that is not known."""
        self.url, self._key, self._seconds = url, key, seconds
        self._kept = self._open()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._kept.close()

    async def get(self, path: str, seconds: float | None = None) -> tuple[int, bytes]:
        """Status and content of a page; in `seconds`, if that is given. Raises FailedError when there is no reply."""
        reply, content = await self._reply("GET", path, None, seconds or self._seconds)
        return reply.status, content

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON reply to a posted body.

        Raises BusyError, FailedError, ServerRefusedError.
        """
        reply, content = await self._reply("POST", path, orjson.dumps(body), self._seconds)
        if reply.status == 200:
            try:
                return orjson.loads(content)
            except ValueError:
                seen = self._words(content)[:40]
                raise FailedError(f"{self.url}{path}: a reply that is no JSON ({seen!r})", status=200) from None
        if reply.status == 429:
            raise BusyError(_seconds(reply.headers.get("Retry-After")))
        words = f"{self.url}{path}: {reply.status} {self._words(content)}"
        if reply.status >= 500 or reply.status == 408:
            raise FailedError(words, gone=reply.status in (502, 503, 504), status=reply.status)
        raise ServerRefusedError(words, reply.status)

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # An idle connection goes before the server ends it (uvicorn: after 5 s), so that hardly one is used while it does.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0, ssl=_certificates()),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            proxy=_proxy(self.url),
        )

    async def _reply(
        self, method: str, path: str, body: bytes | None, seconds: float | None
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        try:
            try:
                return await self._exchange(self._kept, method, path, body, seconds)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # The server may have ended a kept connection at the moment in which it was taken, and then it read nothing of the
                # request. Over a new connection that cannot be.
                async with self._open() as new:
                    return await self._exchange(new, method, path, body, seconds)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise FailedError(f"{self.url}: {error}", gone=True) from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise FailedError(f"{self.url}: {type(error).__name__} {error}".rstrip()) from None

    async def _exchange(
        self, session: aiohttp.ClientSession, method: str, path: str, body: bytes | None, seconds: float | None
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        async with session.request(
            method,
            f"{self.url}{path}",
            data=None if body is None else _Body(body, content_type="application/json"),
            timeout=aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS),
            allow_redirects=False,
        ) as reply:
            return reply, await reply.read()

    def _words(self, content: bytes) -> str:
        """The beginning of what a server said, in one line, without the key."""
        line = " ".join(content.decode(errors="replace").split())
        return (line.replace(self._key, "***") if self._key else line)[:300]


class _Body(aiohttp.BytesPayload):
    """What is posted; a server that does not take it within `WRITE_SECONDS` has failed."""

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        async with asyncio.timeout(WRITE_SECONDS):
            await super().write_with_length(writer, content_length)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Whom to trust: those whom the variables name that OpenSSL heeds, else certifi's, for not every system has its own."""
    named = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")
    return ssl.create_default_context(cafile=None if named else certifi.where())


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for a server. aiohttp would look it up for each request."""
    parts = urlsplit(url)
    if parts.hostname in LOOPBACK or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme, proxies.get("all"))
    if proxy is not None and "://" not in proxy:
        proxy = f"http://{proxy}"
    if proxy is not None and not proxy.startswith(("http://", "https://")):
        kind = proxy.partition(":")[0]
        raise DraftlineError(
            f"{url}: the environment names a proxy of kind {kind} for it, and only http is known;"
            f" set {parts.scheme}_proxy to one, or no_proxy to {parts.hostname}"
        )
    return proxy


async def ask(client: Client, api: Api, request: Request, sampling: Sampling) -> Answer:
    """A server's answer to a request, not yet checked. Raises as `Client.post` does."""
    reply = await client.post(api.path, api.body(request, sampling))
    try:
        return api.answer(request, reply)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise FailedError(
            f"{client.url}{api.path}: not a reply of this protocol ({type(error).__name__}: {error})", status=200
        ) from None


def _seconds(retry_after: str | None) -> float:
    try:
        return min(max(float(retry_after or 1), 0.1), LONGEST_PAUSE)
    except ValueError:  # A date.
        return 1.0


class Server:
    """An endpoint as it does: what it has in flight, how fast it is, whether it is up."""

    def __init__(self, endpoint: Endpoint, engine: "HttpEngine") -> None:
        self.endpoint, self.engine = endpoint, engine
        self.client = Client(endpoint.url, endpoint.key)
        self.flying: dict[asyncio.Task[None], Request] = {}
        self.tokens = 0
        self.up = endpoint.api is not None
        self.failures = 0
        self.pause = 1.0
        self.not_before = 0.0
        self.busy_since: float | None = None
        self.moved = self.looked = time.monotonic()
        self._sampled = self._worked = 0.0
        self._clock = self.moved

    def has_room(self, cost: int) -> bool:
        """Whether a request of `cost` tokens may go there now."""
        if not self.up or time.monotonic() < self.not_before:
            return False
        if not self.flying:
            return True
        limits = self.engine.limits
        return len(self.flying) < limits.requests and self.tokens + cost <= limits.tokens

    def rate(self) -> float:
        """Tokens a second sampled lately, while there was something in flight; 0 while unknown."""
        self._tick()
        return self._sampled / max(self._worked, 1e-3)

    def _tick(self) -> None:
        """Count the time since the last tick, if it was spent at work. Older work counts half, and half again."""
        now = time.monotonic()
        if self.flying:
            self._worked += now - self._clock
        self._clock = now
        if self._worked > RECENT_SECONDS:
            self._sampled, self._worked = self._sampled / 2, self._worked / 2

    def took(self, task: "asyncio.Task[None]", request: Request) -> None:
        """A request went there."""
        self._tick()
        if not self.flying:
            self.moved = time.monotonic()
        self.flying[task] = request
        self.tokens += cost_of(request)

    def left(self, task: "asyncio.Task[None]") -> None:
        """A request is there no longer."""
        self._tick()
        self.tokens -= cost_of(self.flying.pop(task))

    def answered(self, sampled: int) -> None:
        """An answer of `sampled` tokens came."""
        self.moved = time.monotonic()
        self._sampled += sampled
        self.failures, self.pause, self.busy_since = 0, 1.0, None

    def stalled(self) -> bool:
        """Whether nothing came for longer than the longest answer in flight may take."""
        patience = self.engine.limits.stall_seconds
        if not self.flying or self.silent_for() <= patience:
            return False
        longest = max(request.max_new_tokens for request in self.flying.values())
        return self.silent_for() > patience + longest / LEAST_RATE

    def silent_for(self) -> float:
        """Seconds since the last sign of work."""
        return time.monotonic() - self.moved

    def failed(self, reason: str, gone: bool) -> None:
        """A request failed, or the look at its health. What else was in flight when it went says nothing new."""
        if not self.up:
            return
        self.failures += 1
        if gone or self.failures >= FAILURES:
            self.up = False
            say(f"engine: {self.endpoint.url} is left out: {reason}")
            self.postpone()

    def postpone(self) -> None:
        """Wait before it is tried again, longer each time."""
        self.not_before = time.monotonic() + self.pause
        self.pause = min(self.pause * 2, LONGEST_PAUSE)

    def busy(self, seconds: float) -> bool:
        """The server has enough to do for now. False when that has been all it said for too long."""
        now = time.monotonic()
        self.not_before = now + seconds
        if self.busy_since is None:
            self.busy_since = now
            say(f"engine: {self.endpoint.url} is busy (429); it is asked again in {seconds:g} s")
        return now - self.busy_since < self.engine.limits.stall_seconds

    def returned(self) -> None:
        """It is healthy again. One more failure is enough to leave it out."""
        self.up, self.failures, self.not_before = True, FAILURES - 1, 0.0
        say(f"engine: {self.endpoint.url} is back")

    async def meet(self) -> None:
        """Have the engine find out what it is, and whether it serves the target. Raises FailedError and DraftlineError."""
        if self.engine.meet is not None:
            self.endpoint = await self.engine.meet(self.endpoint)
            self.check_length(self.engine.longest)

    async def healthy(self) -> None:
        """Return if the server says that it serves; raise FailedError otherwise. One without such a path is taken at its word."""
        assert self.endpoint.api is not None
        path = self.endpoint.api.health
        try:
            status, _ = await self.client.get(path, HEALTH_SECONDS)
        except FailedError as failed:
            raise FailedError(f"{path}: {failed}", gone=True) from None
        if status >= 500:
            raise FailedError(f"{path} says {status}", gone=True)

    def check_length(self, longest: int) -> None:
        """Raise DraftlineError when the server takes less than `longest` tokens."""
        limit = self.endpoint.max_length
        if limit is not None and longest > limit:
            raise DraftlineError(
                f"{self.endpoint.url}: serves {limit} tokens at most, but prompt and answer may have {longest};"
                " start it with a longer context or lower max_new_tokens"
            )


def cost_of(request: Request) -> int:
    """Tokens that a request may come to hold on its server."""
    return len(request.prompt_ids) + len(request.sampled_ids) + request.max_new_tokens


class HttpEngine:
    """Engine over HTTP endpoints (the module says how). `checks` judges their answers.

    `watch` is called now and then (at most every `LOOK_SECONDS`) while requests are in flight, in the event loop's thread; the
    DraftlineError that it may raise ends `generate`. `meet` completes an endpoint that has no `api`, and completes it anew
    when it comes back; it raises FailedError when the endpoint is out of reach.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        checks: Checks,
        limits: Limits = Limits(),
        watch: Callable[[], None] | None = None,
        meet: Callable[[Endpoint], Awaitable[Endpoint]] | None = None,
    ) -> None:
        self.endpoints, self.checks, self.limits, self.watch, self.meet = list(endpoints), checks, limits, watch, meet
        self.longest = 0

    @property
    def in_flight(self) -> int:
        """Requests in flight at each endpoint; may be set between two calls of `generate`."""
        return self.limits.requests

    @in_flight.setter
    def in_flight(self, requests: int) -> None:
        self.limits = replace(self.limits, requests=requests)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-engine", daemon=True)
        self._thread.start()
        self.servers: list[Server] = []
        try:
            self._wait(self._open())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()
        if self.checks.counts:
            say(f"engine: {self.checks.answered} answers: {self.checks.summary()}")

    def _stop(self) -> None:
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        for endpoint in self.endpoints:
            self.servers.append(Server(endpoint, self))
        await self._meet_all()

    async def _meet_all(self) -> None:
        """Meet the endpoints whose protocol is not known yet. Raises DraftlineError when none of all is up."""
        unmet = [server for server in self.servers if not server.up]
        found = await asyncio.gather(*(server.meet() for server in unmet), return_exceptions=True)
        for server, error in zip(unmet, found):
            if error is None:
                server.up = True
            elif isinstance(error, FailedError):
                say(f"engine: {server.endpoint.url} is left out: {error}")
                server.postpone()
            else:
                raise error
        if not any(server.up for server in self.servers):
            raise DraftlineError("; ".join(map(str, found)) + "; start a server there, or correct engine.endpoints")

    async def _close(self) -> None:
        for server in self.servers:
            await server.client.close()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[Request, Result]]:
        """Each request with its result, as they come. Raises DraftlineError for what no other try will change."""
        self.checks.asked += len(requests)
        self.longest = max(map(cost_of, requests), default=0)
        for server in self.servers:
            server.check_length(self.longest)
        results: queue.SimpleQueue[Found | None] = queue.SimpleQueue()
        flight = Flight(self, sampling, results.put)
        running = asyncio.run_coroutine_threadsafe(flight.run(requests), self._loop)
        running.add_done_callback(lambda _: results.put(None))
        try:
            while (found := results.get()) is not None:
                yield from found
            running.result()
        finally:
            running.cancel()
            self._wait(flight.land())


class Flight:
    """The requests of one call of `generate`."""

    def __init__(self, engine: HttpEngine, sampling: Sampling, give: Callable[[Found], None]) -> None:
        self.engine, self.servers, self.checks, self.limits = engine, engine.servers, engine.checks, engine.limits
        self.sampling, self.give = sampling, give
        self.found: Found = []
        self.waiting: deque[Request] = deque()
        self.tries: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()
        self.looks: dict[Server, asyncio.Task[None]] = {}
        self.changed = asyncio.Event()
        self.failure: BaseException | None = None
        self.reason = "no endpoint is up"
        self.last_up = self.looked = time.monotonic()

    async def run(self, requests: Sequence[Request]) -> None:
        """Ask all of `requests`, the longest first."""
        self.waiting.extend(sorted(requests, key=lambda request: (-cost_of(request), request.id)))
        while self.waiting or self.tasks:
            self._dispatch()
            self.changed.clear()
            # Not wait_for, which in Python 3.11 loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._nap()):
                    await self.changed.wait()
            self._hand_over()
            if self.failure is not None:
                raise self.failure
            self._look_around()
        self._hand_over()

    def _hand_over(self) -> None:
        """Give what came since the last time, all at once: the two threads take turns, and each turn costs time."""
        if self.found:
            self.give(self.found)
            self.found = []

    async def land(self) -> None:
        """End what is still in flight."""
        tasks = [*self.tasks, *self.looks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _nap(self) -> float:
        """Seconds until something may be due that no answer announces."""
        now = time.monotonic()
        return min([1.0, *(max(server.not_before - now, 0.01) for server in self.servers if server.not_before > now)])

    def _dispatch(self) -> None:
        while self.waiting:
            cost = cost_of(self.waiting[0])
            free = [server for server in self.servers if server.has_room(cost)]
            if not free:
                return
            server = self._first_through(free, cost) if len(free) > 1 else free[0]
            self._send(server, self.waiting.popleft())

    def _first_through(self, free: list[Server], cost: int) -> Server:
        """The one that would be through with one more request first; one not yet measured counts as the fastest."""
        fastest = max(server.rate() for server in self.servers) or 1.0
        return min(free, key=lambda server: ((server.tokens + cost) / (server.rate() or fastest), len(server.flying)))

    def _send(self, server: Server, request: Request) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(server, request))
        server.took(task, request)
        self.tasks.add(task)
        task.add_done_callback(lambda task: self._ended(server, task))

    def _ended(self, server: Server, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        request = server.flying[task]
        server.left(task)
        if task.cancelled():
            self._again(request, self.reason)
        elif task.exception() is not None:
            self.failure = self.failure or task.exception()
        self.changed.set()

    async def _ask(self, server: Server, request: Request) -> None:
        endpoint, began = server.endpoint, time.monotonic()
        api = endpoint.api
        assert api is not None
        try:
            answer = await ask(server.client, api, request, self.sampling)
        except BusyError as busy:
            if server.busy(busy.seconds):
                self.waiting.appendleft(request)
            else:
                self._again(request, f"{endpoint.url}: busy (429) for {self.limits.stall_seconds:g} s")
            return
        except FailedError as failed:
            server.failed(str(failed), failed.gone)
            self._again(request, str(failed))
            return
        server.answered(len(answer.ids))
        try:
            result = self.checks.result(request, answer, endpoint.url)
            self.found.append((request, replace(result, seconds=time.monotonic() - began)))
        except RefusedError as refused:
            if refused.kind == ABORTED:
                self._again(request, f"{endpoint.url}: {refused}")
            else:
                self.found.append((request, Result([], "error", f"{endpoint.url}: {refused}")))

    def _again(self, request: Request, reason: str) -> None:
        """A try of a request came to nothing."""
        self.reason = reason
        self.tries[request.id] += 1
        if self.tries[request.id] < TRIES:
            self.waiting.appendleft(request)
        else:
            self.found.append((request, Result([], "error", reason)))

    # Who is up -------------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Health of silent and of left-out endpoints; the end of all requests when none is up for long."""
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS:
            return
        self.looked = now
        if self.engine.watch is not None:
            self.engine.watch()
        for server in self.servers:
            if server.stalled():
                self._drop(server, f"no answer for {server.silent_for():.0f} s")
            elif server not in self.looks and self._is_due(server, now):
                look = asyncio.get_running_loop().create_task(self._look(server))
                self.looks[server] = look
                look.add_done_callback(functools.partial(self._looked, server))
        if any(server.up for server in self.servers):
            self.last_up = now
        elif now - self.last_up > self.limits.down_seconds:
            while self.waiting:
                self.found.append((self.waiting.popleft(), Result([], "error", self.reason)))

    @staticmethod
    def _is_due(server: Server, now: float) -> bool:
        if not server.up:
            return now >= server.not_before
        return bool(server.flying) and min(server.silent_for(), now - server.looked) > SILENT_SECONDS

    async def _look(self, server: Server) -> None:
        server.looked = time.monotonic()
        try:
            if server.up:
                await server.healthy()
            else:
                await (server.meet() if self.engine.meet else server.healthy())
                server.returned()
        except FailedError as failed:
            if server.up:
                self._drop(server, str(failed))
            else:
                server.postpone()

    def _looked(self, server: Server, look: "asyncio.Task[None]") -> None:
        del self.looks[server]
        if not look.cancelled() and look.exception() is not None:
            self.failure = self.failure or look.exception()
        self.changed.set()

    def _drop(self, server: Server, reason: str) -> None:
        """Leave an endpoint out, and ask what it had elsewhere."""
        self.reason = f"{server.endpoint.url}: {reason}"
        server.failed(reason, gone=True)
        for task in list(server.flying):
            task.cancel()
