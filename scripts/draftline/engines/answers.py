"""What servers answer is checked, not trusted: each answer becomes a result, or is refused with the reason's kind."""

from collections import Counter
from collections.abc import Collection, Sequence

from draftline.engines import Request, Result
from draftline.engines.protocols import Answer
from draftline.errors import DraftlineError

WINDOW = 200
"""So many answers are looked at before the rest is trusted to be of their kind."""
BAD_SHARE = 0.2
"""More refused answers than this share of the window end the job."""
FEW = 5
"""A share of fewer refused answers says nothing."""
ECHO = 8
"""A prompt of so many ids is not sampled again by chance."""

AFTER_STOP = "went on behind the stop token (cut there)"
TOO_MANY = "more ids than asked for (cut)"
STOP_LEFT_OUT = "left the stop token out (the server names it, so it was put back)"
OUTSIDE = "ids outside the vocabulary"
OTHER_PROMPT = "another prompt than was sent"
NO_STOP = "finish reason stop without a stop token"
CUT_SHORT = "cut by length before the limit"
NOTHING = "no ids"
ABORTED = "finish reason abort"
UNKNOWN = "unknown finish reason"


def stop_end(ids: Sequence[int], stop_ids: Collection[int]) -> int | None:
    """How many of `ids` there are up to the first stop id, that one included; None without one."""
    # Not a loop over the ids, which would take longer than all else that is done to an answer.
    return min((ids.index(stop) + 1 for stop in stop_ids if stop in ids), default=None)


class RefusedError(Exception):
    """An answer that is no result: `kind` is one of this module's, the text says what was seen."""

    def __init__(self, kind: str, seen: str = "") -> None:
        super().__init__(f"{kind}: {seen}" if seen else kind)
        self.kind = kind


class Checks:
    """Checks of all answers of an engine, and the counts of what they found."""

    def __init__(self, stop_ids: Sequence[int], vocabulary: int) -> None:
        """`stop_ids` end an answer; ids lie below `vocabulary`."""
        self.stop_ids, self.vocabulary = frozenset(stop_ids), vocabulary
        self.asked = self.answered = self.bad = 0
        self.counts: Counter[str] = Counter()

    def result(self, request: Request, answer: Answer, where: str) -> Result:
        """The result of an answer from the endpoint `where`.

        Raises RefusedError for an answer that cannot be used, and DraftlineError when the endpoint, or every fifth of its
        first answers, cannot.
        """
        self.answered += 1
        try:
            return self._result(request, answer, where)
        except RefusedError as refused:
            self.counts[refused.kind] += 1
            if refused.kind != ABORTED and self.answered <= WINDOW:
                self.bad += 1
                self._judge(where)
            raise

    def _result(self, request: Request, answer: Answer, where: str) -> Result:
        ids, limit = answer.ids, request.max_new_tokens
        prompt = list(request.prompt_ids)
        if len(prompt) >= ECHO and ids[: len(prompt)] == prompt:
            raise DraftlineError(
                f"{where}: returns the prompt's ids in front of the sampled ones; have the server return the completion only"
            )
        if answer.finish == "abort":
            raise RefusedError(ABORTED)
        if answer.finish not in ("stop", "length"):
            raise RefusedError(UNKNOWN, repr(answer.finish))
        if answer.prompt_ids is not None and answer.prompt_ids != [*prompt, *request.sampled_ids]:
            raise RefusedError(
                OTHER_PROMPT, f"{len(answer.prompt_ids)} ids, not {len(prompt) + len(request.sampled_ids)}"
            )
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise RefusedError(OUTSIDE, f"{max(ids)}, but the vocabulary ends at {self.vocabulary - 1}")
        end = stop_end(ids, self.stop_ids)
        if end is not None and end <= limit:
            self._mend(AFTER_STOP, end < len(ids))
            return Result(ids[:end], "stop", retokenized=answer.retokenized)
        if len(ids) > limit:
            self._mend(TOO_MANY, not answer.retokenized)
            return Result(ids[:limit], "length", retokenized=answer.retokenized)
        return self._unstopped(answer, limit)

    def _unstopped(self, answer: Answer, limit: int) -> Result:
        """The result of an answer within the limit that holds no stop token."""
        ids = answer.ids
        if answer.finish == "stop":
            if answer.matched is None or answer.matched not in self.stop_ids:
                raise RefusedError(NO_STOP, "" if answer.matched is None else f"the server names {answer.matched}")
            self._mend(STOP_LEFT_OUT, True)
            if len(ids) == limit:
                return Result(ids, "length")
            return Result([*ids, answer.matched], "stop")
        if not ids:
            raise RefusedError(NOTHING)
        if len(ids) < limit and not answer.retokenized:
            raise RefusedError(CUT_SHORT, f"{len(ids)} of {limit} ids")
        return Result(ids, "length", retokenized=answer.retokenized)

    def _mend(self, kind: str, found: bool) -> None:
        if found:
            self.counts[kind] += 1

    def _judge(self, where: str) -> None:
        share = self.bad / max(1, min(WINDOW, self.asked))
        if self.bad >= FEW and share > BAD_SHARE:
            raise DraftlineError(
                f"{where}: {self.bad} of the first {self.answered} answers cannot be used ({self.summary()}); is it the"
                " target that is served there, by a server that works?"
            )

    def summary(self) -> str:
        """All counts, in words."""
        return "; ".join(f"{count} x {kind}" for kind, count in self.counts.most_common())
