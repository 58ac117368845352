"""Every completion has one status."""

import random

import pytest

from draftline.statuses import is_loop, status

LOOP = {"period": 64, "repeats": 4, "tokens": 64}


def slow_is_loop(ids, period, repeats, tokens):
    """The definition, token by token."""
    for length in range(1, period + 1):
        tail = max(tokens, repeats * length)
        if len(ids) >= tail and all(ids[-k] == ids[-k - length] for k in range(1, tail - length + 1)):
            return True
    return False


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        ([7] * 64, True),
        ([7] * 63, False),
        (list(range(100)) + [1, 2, 3] * 22, True),
        (list(range(100)) + [1, 2, 3] * 21, False),
        (list(range(64)) * 4, True),
        (list(range(64)) * 3 + list(range(63)), False),
        (list(range(65)) * 5, False),
        ([7] * 200 + [8], False),
        ([], False),
    ],
)
def test_a_loop_is_a_short_pattern_repeated_up_to_the_end(ids, loops):
    assert is_loop(ids, **LOOP) is loops


def test_loop_detection_equals_its_definition():
    rng = random.Random(0)
    seen = set()
    for _ in range(3000):
        limits = {"period": rng.randint(1, 6), "repeats": rng.randint(2, 4), "tokens": rng.randint(1, 14)}
        pattern = [rng.randrange(3) for _ in range(rng.randint(1, 7))]
        ids = [rng.randrange(3) for _ in range(rng.randint(0, 5))] + pattern * rng.randint(0, 5)
        ids += pattern[: rng.randint(0, len(pattern))]
        assert is_loop(ids, **limits) == slow_is_loop(ids, **limits)
        seen.add(is_loop(ids, **limits))
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("ids", "finish_reason", "answer", "sound", "expected"),
    [
        ([1, 2], "stop", "yes", True, "ok"),
        ([1, 2], "length", "yes", True, "truncated"),
        ([1], "stop", " \n", True, "empty"),
        ([], "stop", "", True, "empty"),
        ([1, 2], "stop", "yes", False, "malformed_think"),
        ([1, 2], "length", "", False, "truncated"),
        ([7] * 90, "length", "yes", True, "repetition"),
        ([7] * 90, "stop", "yes", True, "repetition"),
        ([], "error", "", True, "error"),
    ],
)
def test_status(ids, finish_reason, answer, sound, expected):
    assert status(ids, finish_reason, answer, sound, LOOP) == expected
