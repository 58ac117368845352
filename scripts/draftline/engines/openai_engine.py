"""Engine `openai`: endpoints that run already, vLLM, SGLang or any other server with ``/v1/completions``.

Each is met before it gets requests: which model it serves, how long a context, and by which protocol it gives token ids. One
that gives none is refused, or, with ``engine.allow_retokenize``, used through text.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import orjson

from draftline.chat import Chat
from draftline.engines import Request, Sampling
from draftline.engines.answers import Checks, RefusedError
from draftline.engines.client import (
    BusyError,
    Client,
    Endpoint,
    FailedError,
    HttpEngine,
    Limits,
    ServerRefusedError,
    ask,
)
from draftline.engines.protocols import Api, Body, OpenAIText, OpenAITokens, SGLangGenerate
from draftline.errors import DraftlineError
from draftline.manifest import Manifest
from draftline.progress import say

PROBE = ({"role": "user", "content": "Name three colours of the rainbow."},)
PROBE_TOKENS = 8
SENSELESS: Body = {"top_k": -7, "min_p": 7.0, "seed": "x"}
"""Values that a server refuses if it knows the parameter; temperature and top_p every server knows."""
SGLANG_INFO = ("/server_info", "/get_server_info")
MEETING_SECONDS = 120.0
"""Time for each question when an endpoint is met; a server may load the model upon the first."""
VERSION_SECONDS = 10.0


class OpenAIEngine(HttpEngine):
    """The endpoints of the config's section ``engine``, given as `settings`."""

    def __init__(self, manifest: Manifest, chat: Chat, settings: Mapping[str, Any]) -> None:
        self.manifest, self.chat = manifest, chat
        self.allow_retokenize: bool = settings["allow_retokenize"]
        self.models = {_root(entry["url"]): entry.get("model") for entry in settings["endpoints"]}
        self.sampling: Sampling | None = None
        super().__init__(
            [Endpoint(_root(entry["url"]), key=_key(entry)) for entry in settings["endpoints"]],
            Checks(manifest.eos_token_ids, manifest.vocab_size),
            Limits(requests=settings["requests"], tokens=settings["tokens"]),
            meet=self._meet,
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Any:
        """As `HttpEngine`'s. Raises DraftlineError when an endpoint does not know a parameter that `sampling` needs."""
        if sampling != self.sampling:
            self.sampling = sampling
            self._wait(self._check_all())
        return super().generate(requests, sampling)

    async def _check_all(self) -> None:
        for server in self.servers:
            if server.up:
                await self._check_parameters(server.client, server.endpoint)

    # What an endpoint is ----------------------------------------------------------------------------------------------

    async def _meet(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint with protocol and longest context. Raises FailedError when it is out of reach."""
        async with Client(endpoint.url, endpoint.key, MEETING_SECONDS) as client:
            try:
                card = await self._model_card(client, endpoint)
                endpoint = replace(endpoint, max_length=card.get("max_model_len"))
                endpoint = replace(endpoint, api=await self._protocol(client, endpoint, card["id"]))
                await self._check_parameters(client, endpoint)
            except BusyError as busy:
                raise FailedError(f"{endpoint.url}: {busy}", gone=True) from None
        assert endpoint.api is not None
        say(f"engine: {endpoint.url} serves {card['id']} ({type(endpoint.api).__name__})")
        return endpoint

    async def _model_card(self, client: Client, endpoint: Endpoint) -> Mapping[str, Any]:
        """The entry of ``/v1/models`` for the model that the config names, else for the only one."""
        wanted = self.models[endpoint.url]
        try:
            status, content = await client.get("/v1/models")
        except FailedError as failed:
            raise FailedError(str(failed), gone=True) from None
        if status in (401, 403):
            raise DraftlineError(
                f"{endpoint.url}: refuses the key ({status}); name the variable that holds it:"
                " engine.endpoints: [{url: ..., api_key_env: NAME}]"
            )
        if status >= 500:
            raise FailedError(f"{endpoint.url}/v1/models: {status}", gone=True)
        try:
            cards = {str(card["id"]): card for card in orjson.loads(content)["data"]}
        except (ValueError, KeyError, TypeError):
            cards = {}
        if wanted is None and len(cards) == 1:
            (card,) = cards.values()
            return dict(card)
        if wanted is None and not cards:
            said = content.decode(errors="replace")[:80]
            raise DraftlineError(
                f"{endpoint.url}/v1/models: gives no list of models ({status}, {said!r}); correct the url in engine.endpoints,"
                " or name the model there"
            )
        if wanted is None:
            raise DraftlineError(
                f"{endpoint.url}: serves {', '.join(cards)}; name one: engine.endpoints: [{{url: ..., model: NAME}}]"
            )
        # A list without the model may be of what lies on its disk; the server says so itself if it does not have it.
        return dict(cards.get(wanted, {"id": wanted}))

    async def _protocol(self, client: Client, endpoint: Endpoint, model: str) -> Api:
        """The first protocol that gives the ids that a greedy request sampled; text where that is allowed."""
        reasons = []
        stop_ids = tuple(self.manifest.eos_token_ids)
        exact: tuple[Api, ...] = (OpenAITokens(model, stop_ids), SGLangGenerate(stop_ids))
        for api in exact:
            try:
                await self._probe(client, api)
                return api
            except _NotSpokenError as error:
                reasons.append(str(error))
        if not self.allow_retokenize:
            raise DraftlineError(
                f"{endpoint.url}: gives no token ids ({reasons[0]}); serve the target with SGLang or with a vLLM that knows"
                " return_token_ids, or allow its text to be tokenized again: engine.allow_retokenize: true"
            )
        for extended in (True, False):
            api = OpenAIText(model, self.chat, self._turn_end(), extended)
            try:
                await self._probe(client, api)
                return api
            except _NotSpokenError as error:
                reasons.append(str(error))
        raise DraftlineError(f"{endpoint.url}: has no /v1/completions that works: {reasons[-1]}")

    def _turn_end(self) -> int:
        """The id that ends a turn: the tokenizer's eos token, where it is among the target's stop ids."""
        ids = self.chat.encode(self.manifest.special_tokens.get("eos_token", ""))
        stops = self.manifest.eos_token_ids
        return ids[0] if len(ids) == 1 and ids[0] in stops else stops[0]

    async def _probe(self, client: Client, api: Api) -> None:
        """Ask greedily for a few tokens. Raises _NotSpokenError when the endpoint does not know the protocol."""
        request = Request("probe", self.chat.prompt_ids(PROBE), [], PROBE_TOKENS, seed=0)
        try:
            answer = await ask(client, api, request, Sampling())
        except (ServerRefusedError, FailedError) as error:
            if error.status in (None, 401, 403, 502, 503, 504):
                raise
            raise _NotSpokenError(str(error)) from None
        try:
            Checks(self.manifest.eos_token_ids, self.manifest.vocab_size).result(request, answer, client.url)
        except RefusedError as refused:
            raise DraftlineError(
                f"{client.url}: answers a first request with {refused}; is it the target that is served there?"
            ) from None

    async def _check_parameters(self, client: Client, endpoint: Endpoint) -> None:
        """Refuse an endpoint that ignores what the sampling needs. A parameter that may have any value is not known there."""
        if self.sampling is None or self.sampling.greedy:
            return
        if await _draws_anew(client):
            say(f"engine: {endpoint.url} runs without --enable-deterministic-inference: it does not heed seeds")
        if isinstance(endpoint.api, SGLangGenerate):
            return  # It refuses what it does not know.
        assert endpoint.api is not None
        needed = {"top_k": self.sampling.top_k > 0, "min_p": self.sampling.min_p > 0, "seed": True}
        request = Request("probe", self.chat.prompt_ids(PROBE), [], 1, seed=0)
        for name in (name for name, is_needed in needed.items() if is_needed):
            body = {**endpoint.api.body(request, self.sampling), name: SENSELESS[name]}
            try:
                await client.post(endpoint.api.path, body)
            except (ServerRefusedError, FailedError, BusyError):
                continue
            if name != "seed":
                raise DraftlineError(
                    f"{endpoint.url}: does not know the sampling parameter {name} (any value passes), so its answers would"
                    f" not be sampled as completions.sampling says; leave {name} out, or use another server"
                )
            say(f"engine: {endpoint.url} does not know seeds")


class _NotSpokenError(Exception):
    """An endpoint does not speak a protocol."""


async def _draws_anew(client: Client) -> bool:
    """Whether a server is an SGLang that takes seeds and does not use them."""
    for path in SGLANG_INFO:
        with contextlib.suppress(FailedError, ValueError, AttributeError):
            status, content = await client.get(path)
            if status == 200:
                return orjson.loads(content).get("enable_deterministic_inference") is False
    return False


def versions(settings: Mapping[str, Any]) -> str:
    """What the endpoints say of their software, ``vllm 0.11.0, sglang 0.5.17``; those that do not are counted as ``unknown``."""

    async def found() -> list[str]:
        return await asyncio.gather(*map(_version, settings["endpoints"]))

    return ", ".join(sorted(set(asyncio.run(found())))) or "unknown"


async def _version(entry: Mapping[str, Any]) -> str:
    async with Client(_root(entry["url"]), os.environ.get(entry.get("api_key_env", "")), VERSION_SECONDS) as client:
        for name, path in (("vllm", "/version"), *(("sglang", path) for path in SGLANG_INFO)):
            with contextlib.suppress(FailedError, ValueError, KeyError, TypeError):
                status, content = await client.get(path)
                if status == 200:
                    return f"{name} {orjson.loads(content)['version']}"
    return "unknown"


def _root(url: str) -> str:
    """An endpoint's address without the ``/v1`` that clients are often given."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/v1"), "", ""))


def _key(entry: Mapping[str, Any]) -> str | None:
    """The key from the environment variable that an entry of ``engine.endpoints`` names."""
    name = entry.get("api_key_env")
    if name is None:
        return None
    key = os.environ.get(name)
    if key is None:
        raise DraftlineError(
            f"config: engine.endpoints: api_key_env: {name}: not in the environment; export it before the run"
        )
    if not (key.isascii() and key.isprintable()):
        raise DraftlineError(
            f"config: engine.endpoints: api_key_env: {name}: holds a line break or another character that no key has;"
            " export it without"
        )
    return key
