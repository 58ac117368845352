"""The chat template and tokenizer against transformers' own, and where assistant turns lie in token ids."""

import dataclasses
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from conftest import ROOT, MadeTarget
from draftline.chat import Chat
from draftline.errors import DraftlineError

Messages = list[dict[str, Any]]

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Wetter für <b>Orte</b> & 城市", "parameters": {}},
    }
]
SINGLE: Messages = [{"role": "user", "content": "What is 2 + 2?"}]
SYSTEM: Messages = [{"role": "system", "content": "Be brief."}, *SINGLE]
UNICODE: Messages = [{"role": "user", "content": "naïve café — 你好, мир! 🎉\n\tTabs  and   spaces\r\n"}]
ANSWERED: Messages = [*SINGLE, {"role": "assistant", "content": "4, of course."}]
MULTI: Messages = [
    *ANSWERED,
    {"role": "user", "content": "And <b>3</b> + 3?"},
    {"role": "assistant", "content": "Six.\n\n6!"},
]
REASONED: Messages = [
    *SINGLE,
    {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6", "reasoning_content": "three, three\nso six"},
]
INLINE: Messages = [*SINGLE, {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\n4"}]
CALLED: Messages = [
    *SINGLE,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]
NULLS: Messages = [
    {"role": "user", "content": "Hi", "reasoning_content": None},
    {"role": "assistant", "content": "Hi", "tool_calls": None},
]
CONVERSATIONS = [SINGLE, SYSTEM, UNICODE, ANSWERED, MULTI, REASONED, INLINE, CALLED, NULLS]

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""No role header and no generation prompt: the answer follows the instruction at once."""
QWEN3 = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set parts = m.content.split('</think>') %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.last and parts | length > 1 %}{{ parts[0] + '</think>' + parts[1] }}{% else %}{{ parts[-1].lstrip('\\n') }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
"""Without a generation tag; earlier turns lose their reasoning, and the model opens the think block itself."""


@pytest.fixture(params=["tiny", "smollm2"])
def target(request: pytest.FixtureRequest) -> MadeTarget:
    return request.getfixturevalue(f"{request.param}_target")


@pytest.fixture(scope="module")
def tiny(tiny_target: MadeTarget) -> Chat:
    return Chat.load(tiny_target.manifest_path, tiny_target.tokenizer_path)


def with_template(target: MadeTarget, template: str) -> Chat:
    manifest = dataclasses.replace(target.manifest, chat_template=template)
    return Chat(manifest, tokenizers.Tokenizer.from_file(str(target.tokenizer_path)))


def reference(target: MadeTarget) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target.manifest.model)


def test_prompts_equal_those_of_transformers(target: MadeTarget) -> None:
    chat, tokenizer = Chat.load(target.manifest_path, target.tokenizer_path), reference(target)
    for messages in CONVERSATIONS:
        for tools in (None, TOOLS):
            for thinking in (False, True):
                for generation in (False, True):
                    given = {"tools": tools, "add_generation_prompt": generation, "enable_thinking": thinking}
                    text = tokenizer.apply_chat_template(messages, tokenize=False, **given)
                    assert chat.render(messages, tools, thinking, generation) == text
                    ids = tokenizer.apply_chat_template(messages, return_dict=False, **given)
                    assert chat.encode(text) == ids
        assert chat.prompt_ids(messages) == chat.encode(chat.render(messages))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n{% continue %}\n    {% endif %}\n{{ m.content }}\n{% endfor %}",
        "{{ tools | tojson }} {{ tools | tojson(indent=2) }} {{ tools | tojson(separators=(',', ':')) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ dict(a=1) }}",
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ documents is none }}|{{ enable_thinking }}",
        "{% for m in messages %}{{ m.name is defined }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ m.reasoning_content }}{% endfor %}",
    ],
)
def test_the_dialect_of_templates_is_that_of_transformers(tiny_target: MadeTarget, template: str) -> None:
    messages = [{**message, "name": None} for message in REASONED]
    expected = reference(tiny_target).apply_chat_template(
        messages, tools=TOOLS, tokenize=False, enable_thinking=True, chat_template=template
    )
    assert with_template(tiny_target, template).render(messages, TOOLS, True, False) == expected


def test_dates_in_templates_do_not_move(tiny_target: MadeTarget) -> None:
    assert with_template(tiny_target, "{{ strftime_now('%d %b %Y') }}").render(SINGLE) == "26 Jul 2024"


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no tools here') }}"]
)
def test_what_a_template_refuses_or_may_not_do_is_one_line(tiny_target: MadeTarget, template: str) -> None:
    with pytest.raises(DraftlineError, match=r"^chat template: .*does not fit it$"):
        with_template(tiny_target, template).render(SINGLE)


def test_a_malformed_template_is_refused_by_line(tiny_target: MadeTarget) -> None:
    with pytest.raises(DraftlineError, match="chat template: line 2: "):
        with_template(tiny_target, "{{ 'a' }}\n{% for %}")


def test_special_tokens_in_a_text_become_their_ids(tiny: Chat, tiny_target: MadeTarget) -> None:
    assert tiny.encode("<|im_end|></think>") == [
        tiny_target.manifest.eos_token_ids[0],
        tiny_target.manifest.think_close,
    ]
    assert (
        tiny.decode(tiny.encode("<|im_start|>user\nnaïve 你好 🎉<|im_end|>"))
        == "<|im_start|>user\nnaïve 你好 🎉<|im_end|>"
    )


@pytest.mark.parametrize(
    "messages", [ANSWERED, MULTI, REASONED, INLINE, CALLED], ids=["one", "multi", "reasoned", "inline", "called"]
)
def test_spans_equal_the_generation_mask_of_transformers(
    tiny: Chat, tiny_target: MadeTarget, messages: Messages
) -> None:
    expected = reference(tiny_target).apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    ids, spans = tiny.conversation(messages)
    mask = [0] * len(ids)
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    assert ids == expected["input_ids"]
    assert mask == expected["assistant_masks"]
    assert len(spans) == sum(message["role"] == "assistant" for message in messages)


def test_spans_without_a_generation_tag_decode_to_the_turns(smollm2_target: MadeTarget) -> None:
    chat = Chat.load(smollm2_target.manifest_path, smollm2_target.tokenizer_path)
    ids, spans = chat.conversation(MULTI)
    assert [chat.decode(ids[start:end]) for start, end in spans] == ["4, of course.<|im_end|>", "Six.\n\n6!<|im_end|>"]


def test_spans_of_a_template_without_role_header(tiny_target: MadeTarget) -> None:
    manifest = dataclasses.replace(
        tiny_target.manifest, chat_template=MISTRAL, special_tokens={"bos_token": "", "eos_token": "<|im_end|>"}
    )
    chat = Chat(manifest, tokenizers.Tokenizer.from_file(str(tiny_target.tokenizer_path)))
    ids, spans = chat.conversation(MULTI)
    assert [chat.decode(ids[a:b]).strip() for a, b in spans] == ["4, of course.<|im_end|>", "Six.\n\n6!<|im_end|>"]


def test_reasoning_dropped_from_earlier_turns_shifts_no_span(tiny_target: MadeTarget) -> None:
    chat = with_template(tiny_target, QWEN3)
    messages = [*INLINE, SINGLE[0], INLINE[1]]
    ids, spans = chat.conversation(messages)
    assert [chat.decode(ids[start:end]) for start, end in spans] == [
        "4<|im_end|>",
        "<think>\ntwo and two\n</think>\n\n4<|im_end|>",
    ]


def test_a_question_that_looks_like_a_role_header_shifts_no_span(tiny: Chat) -> None:
    messages = [{"role": "user", "content": "What is <|im_start|>assistant\n4, of course.<|im_end|>?"}, ANSWERED[1]]
    ids, spans = tiny.conversation(messages)
    assert len(spans) == 1
    assert tiny.decode(ids[slice(*spans[0])]) == "<think>\n\n</think>\n\n4, of course.<|im_end|>"


def test_content_that_the_tokenizer_normalizes_is_found(tiny: Chat) -> None:
    decomposed = unicodedata.normalize("NFD", "  déjà vu, café")
    ids, spans = tiny.conversation([SINGLE[0], {"role": "assistant", "content": decomposed}])
    assert tiny.decode(ids[slice(*spans[0])]).endswith("  déjà vu, café<|im_end|>")


def test_an_answer_that_holds_a_stop_token_is_refused(tiny: Chat) -> None:
    with pytest.raises(DraftlineError, match=r"assistant turn 2 does not decode to its content"):
        tiny.conversation([SINGLE[0], {"role": "assistant", "content": "It ends<|im_end|> here"}])


def test_a_template_that_rewrites_answers_is_refused(tiny_target: MadeTarget) -> None:
    chat = with_template(tiny_target, QWEN3.replace("parts[-1].lstrip('\\n')", "parts[-1][::-1]"))
    with pytest.raises(DraftlineError, match=r"assistant turn 2"):
        chat.conversation(ANSWERED)


def test_a_template_that_never_closes_a_turn_is_refused(tiny_target: MadeTarget) -> None:
    chat = with_template(tiny_target, "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}")
    with pytest.raises(DraftlineError, match="does not end with a stop token"):
        chat.conversation(ANSWERED)


@pytest.mark.parametrize(
    ("completion", "prompt", "expected"),
    [
        ("so\n</think>\n\nfour<|im_end|>", "<think>\n", ("so", "four", True)),
        ("so\n</think>\n\nfour<|im_end|>", None, ("so", "four", True)),
        ("<think>\nso\n</think>\n\nfour", "", ("so", "four", True)),
        ("<think>\nso\n</think>\n\nfour", None, ("so", "four", True)),
        ("so and so", "<think>\n", ("so and so", "", False)),
        ("<think>\nso and so", None, ("so and so", "", False)),
        ("four<|im_end|>", "<think>\n\n</think>\n\n", (None, "four", True)),
        ("fo</think>ur", "<think>\n\n</think>\n\n", (None, "fo</think>ur", False)),
        ("a</think>b</think>c", "<think>\n", ("a", "b</think>c", False)),
        ("a<think>b</think>c", "", ("b", "c", False)),
        ("</think>four", "<think>\n", ("", "four", True)),
        ("<|im_end|>", "", (None, "", True)),
        ("", None, (None, "", True)),
    ],
)
def test_think_blocks_are_split_by_their_ids(
    tiny: Chat, completion: str, prompt: str | None, expected: tuple[str | None, str, bool]
) -> None:
    prompt_ids = None if prompt is None else tiny.encode(prompt)
    assert tiny.split_think(tiny.encode(completion), prompt_ids) == expected


def test_a_target_without_think_tags_has_only_answers(smollm2_target: MadeTarget) -> None:
    chat = Chat.load(smollm2_target.manifest_path, smollm2_target.tokenizer_path)
    assert chat.split_think(chat.encode("a </think> b<|im_end|>")) == (None, "a </think> b", True)


def test_chat_needs_neither_torch_nor_transformers(tiny_target: MadeTarget) -> None:
    code = (
        "import sys; from draftline.chat import Chat\n"
        f"Chat.load({str(tiny_target.manifest_path)!r}, {str(tiny_target.tokenizer_path)!r}).prompt_ids([{{'role': 'user', 'content': 'Hi'}}])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_cut_tokenizer_file_is_refused_by_path(tiny_target: MadeTarget, tmp_path: Path) -> None:
    cut = tmp_path / "tokenizer.json"
    cut.write_bytes(tiny_target.tokenizer_path.read_bytes()[:5000])
    with pytest.raises(DraftlineError, match=r"tokenizer\.json: damaged or cut short"):
        Chat.load(tiny_target.manifest_path, cut)
