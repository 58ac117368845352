"""Engines: token ids in, token ids out, many requests in flight.

An engine is a context manager (a model in memory, a server, a set of clients) whose `generate` takes all requests at once
and yields each with its result as it finishes, in any order. It keeps as many in flight as it sees fit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, Self

from draftline.errors import DraftlineError

if TYPE_CHECKING:
    from draftline.chat import Chat
    from draftline.manifest import Manifest


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy, and then nothing else matters; top_k 0 is no limit."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Request:
    """A prompt to go on from. `sampled_ids` were sampled earlier: the engine continues behind prompt + sampled.

    `max_new_tokens` (at least 1) counts what is sampled now, and `seed` makes a row's draws its own, whatever runs beside it.
    """

    id: str
    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Result:
    """Newly sampled ids, the stop token included. `finish_reason`: ``stop``, ``length``, or ``error`` with its text.

    `retokenized` ids are not those that were sampled: they were made from the text that a server returned. `seconds` is the time
    from sending to result, where an engine tells it. An error is one that may pass (a server that is gone or busy); one that
    cannot pass is raised as DraftlineError.
    """

    ids: list[int]
    finish_reason: str
    error: str | None = None
    retokenized: bool = False
    seconds: float | None = None


class Engine(Protocol):
    """What completions need of an engine. `in_flight`: requests at once; it may be set between two calls of `generate`."""

    in_flight: int

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[Request, Result]]:
        """Each request with its result, as they finish. Requests that are not yielded count as failed and come again."""
        ...


def open_engine(kind: str, manifest: "Manifest", run: Mapping[str, Any], chat: "Chat") -> Engine:
    """The engine named by ``completions.engine``, not yet entered.

    `run` holds ``device``, maybe ``batch``, and ``engine``, the config's section of that name.
    """
    if kind == "transformers":
        from draftline.engines.transformers_engine import TransformersEngine

        return TransformersEngine(manifest, run, run.get("batch", 64))
    if kind == "sglang":
        from draftline.engines.sglang import SGLangEngine

        return SGLangEngine(manifest, run)
    if kind == "openai":
        from draftline.engines.openai_engine import OpenAIEngine

        return OpenAIEngine(manifest, chat, run["engine"])
    raise DraftlineError(
        f"config: completions.engine: {kind}: no such engine; known: transformers, sglang, openai, dataset"
    )


def engine_version(kind: str, run: Mapping[str, Any]) -> str:
    """What an artifact says about the software that answers; known without starting it. `run` as for `open_engine`."""
    if kind == "sglang":
        from draftline.engines import sglang

        return sglang.version(run["engine"])
    if kind == "openai":
        from draftline.engines.openai_engine import versions

        return versions(run["engine"])
    packages = {"transformers": ("transformers", "torch"), "dataset": ("tokenizers",)}[kind]
    return ", ".join(f"{package} {version(package)}" for package in packages)
