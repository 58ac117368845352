"""How a request becomes the body of an HTTP request, and the reply an answer: one small class a protocol.

Every sampling parameter is sent, because servers fill in the model's own recommendations for those that are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftline.engines import Request, Sampling

Body = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a server says it sampled, not yet checked.

    `finish` is its own word, ``stop``, ``length`` or ``abort`` as a rule; `matched` the id that stopped it, where the protocol
    tells; `prompt_ids` what the server says it went on from, where it does. `retokenized` ids were made from text.
    """

    ids: list[int]
    finish: str
    matched: int | None = None
    prompt_ids: list[int] | None = None
    retokenized: bool = False


class Api(Protocol):
    """A protocol. `path` is where requests go, `health` answers 200 while the server serves."""

    path: str
    health: str

    def body(self, request: Request, sampling: Sampling) -> Body:
        """What is posted for a request."""
        ...

    def answer(self, request: Request, reply: Mapping[str, Any]) -> Answer:
        """A reply with status 200. Raises KeyError, TypeError, IndexError or ValueError when it is not of this protocol."""
        ...


@dataclass(frozen=True)
class SGLangGenerate:
    """SGLang's own ``/generate``: ids in and out, and the id that stopped.

    `stop_ids` are the target's, of which a server may know only some. A draw depends on seed and position, so a continued row
    is the row that was never cut. SGLang heeds seeds only with ``--enable-deterministic-inference``.
    """

    stop_ids: tuple[int, ...] = ()
    path = "/generate"
    health = "/health"

    def body(self, request: Request, sampling: Sampling) -> Body:
        parameters = {
            "max_new_tokens": request.max_new_tokens,
            **_drawn(sampling),
            "sampling_seed": request.seed,
            "stop_token_ids": list(self.stop_ids),
            "skip_special_tokens": False,
        }
        return {"input_ids": context(request), "sampling_params": parameters}

    def answer(self, request: Request, reply: Mapping[str, Any]) -> Answer:
        reason = reply["meta_info"]["finish_reason"]
        return Answer(_ids(reply["output_ids"]), reason["type"], _id_or_none(reason.get("matched")))


@dataclass(frozen=True)
class OpenAITokens:
    """``/v1/completions`` with ids as prompt and ``return_token_ids``: vLLM's extension, which SGLang has too.

    `stop_ids` are the target's, of which a server may know only some.
    """

    model: str
    stop_ids: tuple[int, ...] = ()
    path = "/v1/completions"
    health = "/health"

    def body(self, request: Request, sampling: Sampling) -> Body:
        return {
            "model": self.model,
            "prompt": context(request),
            "max_tokens": request.max_new_tokens,
            **_drawn(sampling),
            "seed": _seed(request),
            "stop_token_ids": list(self.stop_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

    def answer(self, request: Request, reply: Mapping[str, Any]) -> Answer:
        (choice,) = reply["choices"]
        stop = choice.get("matched_stop", choice.get("stop_reason"))  # SGLang's name, vLLM's.
        prompt_ids = choice.get("prompt_token_ids")
        return Answer(
            _ids(choice["token_ids"]),
            choice["finish_reason"],
            _id_or_none(stop),
            None if prompt_ids is None else _ids(prompt_ids),
        )


class Text(Protocol):
    """The target's tokenizer: special tokens are text like any other, and none are added (`draftline.chat.Chat`)."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class OpenAIText:
    """``/v1/completions`` with text in and out, for servers that know no ids: what comes back is tokenized again.

    `extended` servers know the parameters beside OpenAI's own and get all of them; others get one only if it changes
    anything. No reply says which id stopped it. No stop string is sent, so it was the end of a turn: `stop_id`.
    """

    model: str
    text: Text
    stop_id: int
    extended: bool
    path = "/v1/completions"
    health = "/v1/models"

    def body(self, request: Request, sampling: Sampling) -> Body:
        drawn = _drawn(sampling)
        if not self.extended:
            neutral = _drawn(Sampling())
            own = ("temperature", "top_p")
            drawn = {name: value for name, value in drawn.items() if name in own or value != neutral[name]}
        return {
            "model": self.model,
            "prompt": self.text.decode(context(request)),
            "max_tokens": request.max_new_tokens,
            **drawn,
            "seed": _seed(request),
        }

    def answer(self, request: Request, reply: Mapping[str, Any]) -> Answer:
        (choice,) = reply["choices"]
        text, finish = choice["text"], choice["finish_reason"]
        if finish == "length":
            text = text.rstrip("\ufffd")  # The last character was cut in two, and its first half is no text.
        ids = self.text.encode(text)
        if finish == "stop":
            ids = [*ids, self.stop_id]
        return Answer(ids, finish, prompt_ids=self._seen(request, reply["usage"]["prompt_tokens"]), retokenized=True)

    def _seen(self, request: Request, count: int) -> list[int]:
        """The prompt's ids as the server must have made them from its text; -1 for each of another number of them."""
        ids = self.text.encode(self.text.decode(context(request)))
        return ids if len(ids) == count else [-1] * count


def context(request: Request) -> list[int]:
    """All ids that a request goes on from."""
    return [*request.prompt_ids, *request.sampled_ids]


def _drawn(sampling: Sampling) -> Body:
    """Parameters by the names that vLLM and SGLang share. Both take -1 for no limit of top_k, SGLang refuses 0."""
    if sampling.greedy:
        sampling = Sampling()
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def _seed(request: Request) -> int:
    """A generator's seed, for servers that start one per request: another one behind sampled ids than at their beginning."""
    return (request.seed + len(request.sampled_ids) * 0x9E3779B97F4A7C15) % 2**31


def _ids(values: object) -> list[int]:
    if not isinstance(values, list) or set(map(type, values)) - {int}:
        raise TypeError("not a list of token ids")
    return values


def _id_or_none(value: object) -> int | None:
    return value if type(value) is int else None
