"""Files out of Python packages: what lies in the cache is checked, and several may take it at once."""

import hashlib
import multiprocessing
import os
import zipfile

import pytest

from draftline import packages

CONTENT = os.urandom(8_000_000)


@pytest.fixture
def spec(tmp_path):
    wheel = tmp_path / "sets-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sets/data.jsonl", CONTENT)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / digest[:16]).mkdir()
    wheel.rename(tmp_path / digest[:16] / wheel.name)
    return {"package": "sets==1", "sha256": digest, "file": "sets/*.jsonl"}


def fetch(spec, cache, barrier, outcomes):
    barrier.wait()
    try:
        outcomes.put(hashlib.sha256(packages.fetch(spec, cache).read_bytes()).hexdigest())
    except OSError as error:
        outcomes.put(str(error))


def test_evaluation_sets_of_one_file_are_fetched_at_once(tmp_path, spec):
    context = multiprocessing.get_context("fork")
    barrier, outcomes = context.Barrier(3), context.Queue()
    jobs = [context.Process(target=fetch, args=(spec, tmp_path, barrier, outcomes)) for _ in range(3)]
    for job in jobs:
        job.start()
    found = [outcomes.get(timeout=60) for _ in jobs]
    for job in jobs:
        job.join()
    assert found == [hashlib.sha256(CONTENT).hexdigest()] * 3
    assert sorted(path.name for path in (tmp_path / spec["sha256"][:16]).iterdir()) == [
        "data.jsonl",
        "sets-1-py3-none-any.whl",
    ]
