"""Decontamination, compared with the rule written down as plainly as it reads."""

import random
import re

import pytest

from draftline.overlap import PROBE, RUN, Overlap

PROBLEM = "Write a function that takes a list of numbers and returns the two that lie closest to each other, in ascending order."
WORDS = PROBLEM.split()


def shares_thirteen_words(prompt: str, problem: str) -> bool:
    ours, theirs = (re.findall("[a-z0-9]+", text.lower()) for text in (prompt, problem))
    runs = [theirs[n : n + 13] for n in range(len(theirs) - 12)]
    return ours == theirs or any(ours[n : n + 13] in runs for n in range(len(ours) - 12))


def test_probes_at_every_seventh_word_see_each_run_of_thirteen():
    assert (RUN, PROBE) == (13, 7)
    assert all(any(at % PROBE == 0 for at in range(start, start + RUN - PROBE + 1)) for start in range(100))


@pytest.mark.parametrize("before", range(15))
@pytest.mark.parametrize(("shared", "overlaps"), [(12, False), (13, True)])
def test_thirteen_words_in_a_row_overlap_wherever_they_stand_and_twelve_do_not(before, shared, overlaps):
    prompt = " ".join(["other"] * before + WORDS[3 : 3 + shared] + ["words"] * 5)
    assert shares_thirteen_words(prompt, PROBLEM) is overlaps
    assert Overlap([PROBLEM]).with_any([prompt]) is overlaps


def test_agrees_with_the_plain_rule_on_random_texts():
    draw = random.Random(0)
    found = 0
    for _ in range(3000):
        problem, prompt = (
            " ".join(draw.choices("ab", k=draw.randrange(8, 16)) + draw.choices("abc", k=draw.randrange(8)))
            for _ in "12"
        )
        if draw.random() < 0.5:
            start = draw.randrange(len(problem) // 2)
            prompt = " ".join([prompt, problem[start * 2 : start * 2 + draw.randrange(20, 30)]])
        expected = shares_thirteen_words(prompt, problem)
        found += expected
        assert Overlap([problem]).with_any([prompt]) is expected, (problem, prompt)
    assert 100 < found < 2900


def test_case_and_punctuation_do_not_count():
    prompt = "PLEASE: " + "--".join(WORDS[2:16]).upper() + "!!"
    assert Overlap([PROBLEM]).with_any([prompt])


def test_short_problem_overlaps_only_an_equal_turn():
    overlap = Overlap(["What is 6 times 7?"])
    assert overlap.with_any(["what is 6 times 7"])
    assert overlap.with_any(["Hello!", "What is: 6 times 7?", "Thanks."])
    assert not overlap.with_any(["What is 6 times 7 times 8?"])


def test_every_user_turn_is_compared_and_all_of_them_in_a_row():
    assert Overlap([PROBLEM]).with_any(["Hello!", PROBLEM])
    assert Overlap(["First question\n\nSecond question"]).with_any(["First question", "Second question"])
    assert not Overlap(["First question\n\nSecond question"]).with_any(["First question"])


def test_text_without_spaces_is_compared_by_character():
    problem = "写一个函数返回列表中第二大的元素"
    assert Overlap([problem]).with_any(["请" + problem[:13] + "吧"])
    assert not Overlap([problem]).with_any(["请" + problem[:12] + "吧"])


def test_problem_without_words_overlaps_nothing():
    assert not Overlap(["?!", ""]).with_any(["...", ""])
    assert not Overlap([]).with_any([PROBLEM])
