"""The row store keeps each finished row, whatever becomes of its writers."""

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from draftline.rows import Row, RowStore

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SETTINGS = {"target": "t", "sampling": {}}


def row_id(number):
    return f"{number * 2654435761 % 2**32:08x}"


def prompt(number):
    return [number, number + 1, number * 7]


def completion(number):
    return [(number * 31 + k) % 50000 for k in range(1 + number % 400)]


@pytest.fixture
def root(tmp_path):
    return tmp_path / "rows"


def fill(root, numbers, settings=SETTINGS):
    with RowStore(settings, root) as store:
        for number in numbers:
            store.add(row_id(number), prompt(number), Row(completion(number), "length"))


def read(root, numbers, settings=SETTINGS):
    return RowStore(settings, root).find({row_id(number): prompt(number) for number in numbers})


def test_a_row_is_found_by_its_prompt(root):
    fill(root, range(50))
    found = read(root, range(60))
    assert found == {row_id(n): Row(completion(n), "length") for n in range(50)}


def test_another_prompt_under_the_same_id_is_another_row(root):
    fill(root, [1])
    assert RowStore(SETTINGS, root).find({row_id(1): [*prompt(1), 5]}) == {}


def test_two_rows_with_the_same_prompt_share_an_answer(root):
    fill(root, [1])
    twin = row_id(1)[:2] + "ffffff"
    assert set(RowStore(SETTINGS, root).find({row_id(1): prompt(1), twin: prompt(1)})) == {row_id(1), twin}


def test_other_settings_are_another_store(root):
    fill(root, range(5))
    assert read(root, range(5), {**SETTINGS, "seed": 1}) == {}


def test_rows_of_several_jobs_are_read_together(root):
    writers = [RowStore(SETTINGS, root) for _ in range(3)]
    for number in range(90):
        writers[number % 3].add(row_id(number), prompt(number), Row(completion(number), "length"))
    assert len(read(root, range(90))) == 90


def test_a_continued_row_takes_the_place_of_the_shorter_one_in_any_order_of_files(root):
    short, long, ended = Row([1, 2], "length"), Row([1, 2, 3, 4], "length"), Row([1, 2, 3], "stop", 2)
    for rows in ([short, long], [long, short]):
        for number, row in enumerate(rows):
            with RowStore({"order": str(rows)}, root) as store:
                store.add(row_id(number // 2), prompt(0), row)
        assert RowStore({"order": str(rows)}, root).find({row_id(0): prompt(0)})[row_id(0)] == long
    with RowStore(SETTINGS, root) as store:
        for row in (ended, long):
            store.add(row_id(0), prompt(0), row)
    assert read(root, [0])[row_id(0)] == ended


def test_a_row_longer_than_the_limit_is_cut_back_and_a_shorter_one_is_not_complete(root):
    ended = Row([5, 6, 7], "stop")
    assert ended.within(2) == Row([5, 6], "length")
    assert ended.within(3) == ended
    assert ended.complete(10)
    assert not Row([5, 6, 7], "length").complete(4)
    assert Row([5, 6, 7], "length").complete(3)


@pytest.mark.parametrize("seed", range(3))
def test_a_file_cut_at_any_byte_loses_only_its_torn_row(root, seed):
    fill(root, range(20, 26))
    same_bucket = "00"
    with RowStore(SETTINGS, root) as store:
        for number in range(20):
            store.add(same_bucket + row_id(number), prompt(number), Row(completion(number), "length"))
    (path,) = (store.folder / same_bucket).iterdir()
    whole = path.read_bytes()
    wanted = {same_bucket + row_id(n): prompt(n) for n in range(20)}
    starts = [n for n, byte in enumerate(whole) if byte == ord("\n")]
    for cut in random.Random(seed).sample(range(len(whole)), 60):
        path.write_bytes(whole[:cut])
        found = RowStore(SETTINGS, root).find(wanted)
        complete = sum(end <= cut for end in [*starts[1:], len(whole)])
        assert len(found) == complete
        assert all(found[same_bucket + row_id(n)].completion_ids == completion(n) for n in range(complete))


def test_a_torn_row_in_the_middle_costs_no_other(root):
    with RowStore(SETTINGS, root) as store:
        for number in range(3):
            store.add("00" + row_id(number), prompt(number), Row(completion(number + 30), "length"))
            if number == 0:
                (path,) = (store.folder / "00").iterdir()
                with open(path, "ab") as file:
                    file.write(b'\n["0123456789abcdef", [1, 2')
                with open(path, "ab") as file:
                    file.write(b"\n\x00\x00\xff\x00")
    found = RowStore(SETTINGS, root).find({"00" + row_id(n): prompt(n) for n in range(3)})
    assert len(found) == 3


WRITER = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {scripts!r})
    from draftline.rows import Row, RowStore

    store = RowStore({settings!r}, Path({root!r}))
    for number in range(10**9):
        ids = [(number * 31 + k) % 50000 for k in range(1 + number % 400)]
        store.add(f"{{number % 3:02x}}{{number:06x}}", [number, number + 1, number * 7], Row(ids, "length"))
        print(number, flush=True)
"""


def test_jobs_killed_with_sigkill_lose_no_row_that_they_had_finished(root):
    code = textwrap.dedent(WRITER).format(scripts=str(SCRIPTS), settings=SETTINGS, root=str(root))
    for delay in (1, 40, 300):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(delay):
            writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        finished = delay + len(writer.stdout.read().split())
        assert writer.wait() == -signal.SIGKILL
        numbers = range(finished)
        found = RowStore(SETTINGS, root).find({f"{n % 3:02x}{n:06x}": prompt(n) for n in numbers})
        assert all(found[f"{n % 3:02x}{n:06x}"] == Row(completion(n), "length") for n in numbers)


def test_a_row_is_written_whole_when_the_system_takes_it_in_pieces(root, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, bytes(line[:7])))
    fill(root, range(5))
    assert len(read(root, range(5))) == 5
