"""What became of a completion. Every row has exactly one status; nothing is dropped for it here."""

from collections.abc import Mapping, Sequence


def is_loop(ids: Sequence[int], period: int, repeats: int, tokens: int) -> bool:
    """Whether `ids` end in a loop: a pattern of at most `period` tokens, at least `repeats` times, over at least `tokens`.

    The stop token must not be in `ids`.
    """
    for length, token in enumerate(reversed(ids[-1 - period : -1]), 1):
        if token != ids[-1]:  # So it is for nearly all lengths of nearly all texts.
            continue
        tail = max(tokens, repeats * length)
        if tail <= len(ids) and ids[-tail:-length] == ids[len(ids) - tail + length :]:
            return True
    return False


def status(ids: Sequence[int], finish_reason: str, answer: str, think_is_sound: bool, loop: Mapping[str, int]) -> str:
    """The status of a completion: ``ok`` (a stop token and an answer), ``truncated`` (cut by the limit), ``empty`` (no answer),
    ``malformed_think`` (a think block that is not closed once), ``repetition`` (a loop) or ``error`` (no row at all).

    `ids` are the sampled ids without a stop token, `answer` the text after any think block, `think_is_sound` whether that
    block is closed exactly once (or absent), `loop` the config's ``completions.loop``. A loop is told first: it is a
    loop whether it was cut or came to an end. A cut row's think block may be open, so only a stopped row can be malformed.
    """
    if finish_reason == "error":
        return "error"
    if is_loop(ids, **loop):
        return "repetition"
    if finish_reason == "length":
        return "truncated"
    if not think_is_sound:
        return "malformed_think"
    return "ok" if answer.strip() else "empty"
