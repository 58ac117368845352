"""Decontamination: does a prompt repeat the text of an evaluation problem?

Two texts overlap when their words are equal, or when they share `RUN` words in a row. Words are runs of letters and digits;
case and punctuation do not count. Scripts without spaces between words (Chinese, Japanese) count each character.
"""

import re
from collections.abc import Iterable, Iterator

RUN = 13
PROBE = (RUN + 1) // 2
UNSPACED = "぀-ヿ㐀-䶿一-鿿"
WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")


def words(text: str) -> list[str]:
    """The words of a text, case folded."""
    return WORD.findall(text.casefold())


class Overlap:
    """The problems of evaluation sets, ready to be compared with many prompts.

    A shared run of `RUN` words holds, at a multiple of `PROBE` in the prompt, a shared run of `PROBE` words. So a prompt is
    looked up at every `PROBE`-th word only, and compared in full around what is found there.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self._whole: set[str] = set()
        self._runs: set[str] = set()
        self._probes: set[str] = set()
        for problem in problems:
            found = words(problem)
            self._whole.add(" ".join(found))
            self._runs.update(_runs(found, RUN))
            self._probes.update(_runs(found, PROBE))
        self._whole.discard("")

    def with_any(self, turns: Iterable[str]) -> bool:
        """Whether what a user says in `turns`, one of them or all in a row, overlaps a problem."""
        found = [words(turn) for turn in turns]
        everything = [word for turn in found for word in turn]
        return any(" ".join(turn) in self._whole for turn in (*found, everything)) or self._shares_run(everything)

    def _shares_run(self, found: list[str]) -> bool:
        for at in range(0, len(found) - PROBE + 1, PROBE):
            if " ".join(found[at : at + PROBE]) in self._probes:
                around = found[max(at - RUN + PROBE, 0) : at + RUN]
                if not self._runs.isdisjoint(_runs(around, RUN)):
                    return True
        return False


def _runs(found: list[str], length: int) -> Iterator[str]:
    return (" ".join(found[start : start + length]) for start in range(len(found) - length + 1))
