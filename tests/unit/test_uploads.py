"""Items made ahead are the same ones in the same order; errors come where they belong, and no thread stays behind."""

import itertools
import threading

import pytest

from draftline.drafter.uploads import ahead


def test_items_come_in_order_and_some_are_made_before_they_are_asked_for():
    made, fourth = [], threading.Event()

    def items():
        for n in itertools.count():
            made.append(n)
            if n == 4:
                fourth.set()
            yield n

    taken = ahead(items(), 4)
    assert next(taken) == 0
    assert fourth.wait(60)  # 0 was taken, and four others wait.
    assert made == [0, 1, 2, 3, 4]
    assert list(itertools.islice(taken, 5)) == [1, 2, 3, 4, 5]
    taken.close()


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_all_items_come_however_few(count):
    assert list(ahead(iter(range(count)), 4)) == list(range(count))


def test_an_error_comes_behind_the_items_before_it():
    def items():
        yield from range(3)
        raise OSError("the disk is gone")

    taken = ahead(items(), 4)
    assert [next(taken) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)


def test_no_thread_is_left_when_the_reader_stops_early():
    taken = ahead(itertools.count(), 4)
    next(taken)
    assert any(thread.name.startswith("samples-ahead") for thread in threading.enumerate())
    taken.close()
    assert not any(thread.name.startswith("samples-ahead") for thread in threading.enumerate())
