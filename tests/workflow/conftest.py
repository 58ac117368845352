"""Finished and fresh runs of the whole workflow on the tiny target."""

import pytest
from tiny_run import Run, make_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Run:
    """A finished tiny run; tests copy it before they change anything."""
    run = make_run(tmp_path_factory.mktemp("finished") / "a path with a space")
    run.snakemake()
    return run


@pytest.fixture
def run(finished, tmp_path) -> Run:
    """A copy of the finished run, to be changed at will."""
    return finished.copy(tmp_path / "run")


@pytest.fixture
def fresh(tmp_path) -> Run:
    """The workflow with nothing made yet."""
    return make_run(tmp_path / "fresh")
