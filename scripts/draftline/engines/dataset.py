"""Engine `dataset`: the answers that the prompt files hold, for data that the target has already regenerated.

Nothing is sampled, so it takes rows instead of token ids: prompt and answer are rendered as one conversation, and the
answer's tokens are found in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from draftline.chat import Chat
from draftline.errors import DraftlineError


@dataclass(frozen=True)
class Recorded:
    """Token ids of a conversation whose last turn is the answer, and the spans of all its assistant turns."""

    ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def prompt_ids(self) -> list[int]:
        return self.ids[: self.spans[-1][0]]

    @property
    def completion_ids(self) -> list[int]:
        """The last assistant turn, its think block and stop token included."""
        return self.ids[slice(*self.spans[-1])]


def recorded_answer(row: Mapping[str, Any], chat: Chat, thinking: bool) -> Recorded:
    """The answer in a row of prompts.parquet. Raises DraftlineError when there is none, or the template does not fit it."""
    if row["response"] is None:
        raise DraftlineError(
            f"prompt {row['id']} ({row['source']}): holds no answer; end its conversation with an assistant turn"
        )
    messages = [*orjson.loads(row["messages"]), orjson.loads(row["response"])]
    ids, spans = chat.conversation(messages, row["tools"] and orjson.loads(row["tools"]), thinking)
    return Recorded(ids, spans)
