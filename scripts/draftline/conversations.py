"""A row of a prompt file, normalized: ShareGPT and OpenAI style become one list of messages, cut before the last answer."""

from dataclasses import dataclass
from typing import Any

import orjson

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
CALL_ROLE = "function_call"
"""ShareGPT's turn whose value is a call as JSON; ``observation`` answers it."""
TURN_KEYS = ("reasoning_content", "name", "tool_call_id")
"""What a turn may have beside role, content and tool calls. Templates use it, so it is kept."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
KEYS = frozenset(("conversations", "messages", "system", "tools", "prompt", "id", "task_id", *MEDIA))
"""The keys of a row that are read."""


class MalformedError(ValueError):
    """A row that is not what a prompt file may hold, and why."""


NO_PROMPT = {
    "no_user": "no user turn",
    "empty": "a turn without content",
    "non_text": "images, sound or video",
}


class NoPromptError(Exception):
    """A sound row that cannot be a prompt, for a reason of `NO_PROMPT`."""

    def __init__(self, reason: str) -> None:
        super().__init__(NO_PROMPT[reason])
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages up to the last user or tool turn, and the assistant turn that followed it (None when none did)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    response: Message | None
    name: str | None

    def user_texts(self) -> list[str]:
        """What the user says, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]


def normalized(record: dict[str, Any]) -> Conversation:
    """The conversation of a row. Raises `MalformedError` or `NoPromptError`.

    Reasoning of assistant turns stays where it stands: in ``reasoning_content``, or in ``<think>`` in the content.
    """
    if any(record.get(key) for key in MEDIA):
        raise NoPromptError("non_text")
    messages = _with_system([_message(turn) for turn in _turns(record)], record.get("system"))
    asked = [number for number, message in enumerate(messages) if message["role"] in ("user", "tool")]
    end = asked[-1] + 1 if asked else 0
    prompt, following = messages[:end], messages[end:]
    if not any(message["role"] == "user" for message in prompt):
        raise NoPromptError("no_user")
    if any(_says_nothing(message) for message in prompt):
        raise NoPromptError("empty")
    response = next((message for message in following if message["role"] == "assistant"), None)
    return Conversation(prompt, _tools(record.get("tools")), response, _name(record))


def _turns(record: dict[str, Any]) -> list[Any]:
    for key in ("conversations", "messages"):
        turns = record.get(key)
        if isinstance(turns, list):
            return turns
        if turns is not None:
            raise MalformedError(f"{key} must be a list, not {_kind(turns)}")
    raise MalformedError("has neither conversations (ShareGPT) nor messages (OpenAI)")


def _with_system(messages: list[Message], system: Any) -> list[Message]:
    """`messages` with the row's own system text in front. An empty one says nothing and goes."""
    messages = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    if system is not None and not isinstance(system, str):
        raise MalformedError(f"system must be a string, not {_kind(system)}")
    if not system or not system.strip():
        return messages
    if any(message["role"] == "system" and message["content"] != system for message in messages):
        raise MalformedError("system differs from the conversation's own system message")
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": system}, *rest]


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise MalformedError(f"a turn must be an object, not {_kind(turn)}")
    spoken_by = turn.get("from", turn.get("role"))
    value = turn.get("value", turn.get("content"))
    if spoken_by == CALL_ROLE:
        return {"role": "assistant", "content": "", "tool_calls": _calls(value)}
    role = ROLES.get(spoken_by) if isinstance(spoken_by, str) else None
    if role is None:
        raise MalformedError(f"unknown role {spoken_by!r}; known: {', '.join([*ROLES, CALL_ROLE])}")
    message: Message = {"role": role, "content": _text(value)}
    for key in TURN_KEYS:
        text = turn.get(key)
        if text is not None and not isinstance(text, str):
            raise MalformedError(f"{key} must be a string, not {_kind(text)}")
        if text:
            message[key] = text
    calls = turn.get("tool_calls") or turn.get("function_call")
    if calls:
        message["tool_calls"] = _calls(calls)
    return message


def _text(content: Any) -> str:
    """Text of a turn's content: a string, nothing, or OpenAI's list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise MalformedError(f"content must be a string or a list of parts, not {_kind(content)}")
    if any(part.get("type") != "text" for part in content):
        raise NoPromptError("non_text")
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise MalformedError("a text part has no text")
    return "".join(texts)


def _calls(value: Any) -> list[dict[str, Any]]:
    """Tool calls as ``{"type": "function", "function": {"name", "arguments": {...}}[, "id"]}``."""
    value = _parsed(value, "tool_calls")
    return [_call(call) for call in (value if isinstance(value, list) else [value])]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MalformedError("a tool call must be an object with a name")
    # Templates walk through the arguments, so that the JSON string of OpenAI's API becomes the object that it holds.
    arguments = _parsed(function.get("arguments") or {}, "a tool call's arguments")
    if not isinstance(arguments, dict):
        raise MalformedError(f"a tool call's arguments must be an object, not {_kind(arguments)}")
    normal = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return normal | {"id": call["id"]} if isinstance(call.get("id"), str) else normal


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool descriptions as ``{"type": "function", "function": {...}}``, from a list or its JSON; None for an empty one."""
    tools = _parsed(value or [], "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise MalformedError("tools must be a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools] or None


def _parsed(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise MalformedError(f"{what}: not JSON ({error})") from None


def _says_nothing(message: Message) -> bool:
    # A tool may well return nothing; a user or an assistant who only calls no tool may not.
    return message["role"] != "tool" and not message["content"].strip() and "tool_calls" not in message


def _name(record: dict[str, Any]) -> str | None:
    value = record.get("id", record.get("task_id"))
    return str(value) if isinstance(value, str | int) else None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
