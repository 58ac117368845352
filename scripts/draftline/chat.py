"""The target's chat template and tokenizer: messages to token ids and back, without transformers.

Equal in what it renders to transformers' ``apply_chat_template`` (a test compares them), but for one thing: a template that
asks for today's date gets `TODAY`, so that equal messages give equal ids on every day.
"""

import datetime
import functools
import json
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from draftline import provenance
from draftline.errors import DraftlineError
from draftline.manifest import Manifest

TODAY = datetime.datetime(2024, 7, 26)
"""The date that Llama's own template falls back to when it cannot ask."""

SENTINEL = "\ue000draftline\ue000"
"""Stands for an assistant turn's content in a trial rendering; private-use characters, so that no text holds it."""

Message = Mapping[str, Any]


class Chat:
    """Template and tokenizer of a target. `thinking` reaches the template as ``enable_thinking``."""

    def __init__(self, manifest: Manifest, tokenizer: tokenizers.Tokenizer) -> None:
        self.eos_token_ids = list(manifest.eos_token_ids)
        self.think_open, self.think_close = manifest.think_open, manifest.think_close
        self._special_tokens = manifest.special_tokens
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = compile_template(manifest.chat_template)

    @classmethod
    def load(cls, manifest_path: str | Path, tokenizer_path: str | Path) -> "Chat":
        """Chat of results/target/{manifest,tokenizer}.json. Raises DraftlineError when one is missing or damaged."""
        manifest = Manifest.load(manifest_path)
        provenance.read(tokenizer_path)
        return cls(manifest, tokenizers.Tokenizer.from_file(str(tokenizer_path)))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text. Raises DraftlineError with the template's own words when it refuses the messages."""
        # Null fields count as absent, as in transformers: many templates would write "None".
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=present,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=thinking,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise DraftlineError(f"chat template: {error}; the conversation does not fit it") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens in the text become their ids; none are added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, thinking: bool = False
    ) -> list[int]:
        """Token ids of the conversation and the opening of the assistant's next turn."""
        return self.encode(self.render(messages, tools, thinking))

    def split_think(self, ids: Sequence[int], prompt_ids: Sequence[int] | None = None) -> tuple[str | None, str, bool]:
        """Reasoning (None without a think block), answer, and whether the block is sound, of a completion's ids.

        Templates may open the block in the prompt. `prompt_ids` tells whether this one does; without it a completion that
        closes a block without opening one is taken as the rest of the prompt's. The block is sound when it is closed once, or
        when there is none. The stop token belongs to neither text.
        """
        ids = list(ids[:-1] if ids and ids[-1] in self.eos_token_ids else ids)
        if self.think_open is None or self.think_close is None:
            return None, self.decode(ids), True
        opens, closes = ids.count(self.think_open), ids.count(self.think_close)
        opened = self._ends_inside_think(prompt_ids) if prompt_ids is not None else closes > opens
        if not opened and not opens:
            return None, self.decode(ids).strip("\n"), not closes
        start = 0 if opened else ids.index(self.think_open) + 1
        end = ids.index(self.think_close, start) if self.think_close in ids[start:] else len(ids)
        sound = opens + opened == closes == 1 and (opened or not self.decode(ids[: start - 1]).strip())
        return self.decode(ids[start:end]).strip("\n"), self.decode(ids[end + 1 :]).strip("\n"), sound

    def _ends_inside_think(self, ids: Sequence[int]) -> bool:
        marks = [token for token in ids if token in (self.think_open, self.think_close)]
        return bool(marks) and marks[-1] == self.think_open

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, thinking: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a whole conversation, and the half-open span of each assistant turn in them.

        A span begins after the role header and holds the think block as rendered, the content and the stop token. It is found
        in the token ids, so nothing that a template does to earlier turns (dropping their reasoning, say) can shift it, and
        it is checked by decoding it. Raises DraftlineError for a conversation that fails this check.
        """
        text = self.render(messages, tools, thinking, add_generation_prompt=False)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            place = self._turn_start(text, messages, number, tools, thinking)
            start = next((n for n, (_, end) in enumerate(encoding.offsets) if end > place), len(encoding.ids))
            stop = next((n for n in range(start, len(encoding.ids)) if encoding.ids[n] in self.eos_token_ids), None)
            if stop is None or (spans and start < spans[-1][1]):
                raise DraftlineError(f"chat template: assistant turn {number + 1} does not end with a stop token")
            self._check_span(encoding.ids[start : stop + 1], message, number)
            spans.append((start, stop + 1))
        return list(encoding.ids), spans

    def _turn_start(
        self, text: str, messages: Sequence[Message], number: int, tools: Sequence[Any] | None, thinking: bool
    ) -> int:
        """Character where an assistant turn begins: after the last role header before its content."""
        trial = [*messages[:number], {**messages[number], "content": SENTINEL}, *messages[number + 1 :]]
        before, found, _ = self.render(trial, tools, thinking, add_generation_prompt=False).partition(SENTINEL)
        header = before.rfind(self._header)
        start = header + len(self._header) if self._header and header >= 0 else len(before)
        if not found or not text.startswith(before[:start]):
            raise DraftlineError(f"chat template: assistant turn {number + 1} cannot be found in what it renders")
        return start

    @functools.cached_property
    def _header(self) -> str:
        """What opens an assistant turn, up to a think block: the common part of all generation prompts."""
        probe = [{"role": "user", "content": "?"}]
        prompts = []
        for thinking in (False, True):
            bare = self.render(probe, thinking=thinking, add_generation_prompt=False)
            prompts.append(self.render(probe, thinking=thinking).removeprefix(bare))
        length = next((n for n, (a, b) in enumerate(zip(*prompts)) if a != b), min(map(len, prompts)))
        header = prompts[0][:length]
        return header if self.think_open is None else header.partition(self.decode([self.think_open]))[0]

    def _check_span(self, ids: Sequence[int], message: Message, number: int) -> None:
        content = message.get("content") or ""
        if self.think_close is not None:
            content = content.rpartition(self.decode([self.think_close]))[2]
        if _plain(content) not in _plain(self.decode(ids)):
            shown = content.strip()[:40]
            raise DraftlineError(
                f"chat template: the mask of assistant turn {number + 1} does not decode to its content ({shown!r}...);"
                " the turn holds special tokens, or the template rewrites it"
            )


def _plain(text: str) -> str:
    """Text as tokenizers may normalize it, at its ends too."""
    return unicodedata.normalize("NFC", text).strip()


def compile_template(text: str) -> jinja2.Template:
    """A chat template in transformers' dialect of Jinja, sandboxed. DraftlineError with the line when it is malformed."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise DraftlineError(
            f"chat template: line {error.lineno}: {error.message}; mend target.chat_template"
        ) from None


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` renders as what it holds."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own protocol

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Any) -> Any:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
