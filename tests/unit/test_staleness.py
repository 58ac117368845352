"""An artifact is up to date when it carries the id that settings and graph ask for; nothing else counts."""

import os

import pytest

from draftline import provenance
from draftline.staleness import Node, Staleness

GRAPH = {"a.json": [], "b.json": ["a.json"], "c.json": ["b.json"], "d.json": ["a.json"]}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Tree()


class Tree:
    def __init__(self):
        self.settings = dict.fromkeys(GRAPH, "one")
        self.temporary = set()

    def state(self):
        return Staleness(
            lambda path: Node("rule", path, self.settings[path], tuple(GRAPH[path]), path in self.temporary)
        )

    def make(self, path):
        inputs = {name: provenance.read(name)["id"] for name in GRAPH[path]}
        settings = self.settings[path]
        record = {
            "rule": "rule",
            "id": provenance.identity(path, settings, inputs),
            "settings": settings,
            "inputs": inputs,
        }
        provenance.write_json(path, {}, record)

    def make_all(self):
        for path in GRAPH:
            self.make(path)

    def pending(self):
        state = self.state()
        return [path for path in GRAPH if state.pending(path)]

    def foreign(self):
        state = self.state()
        return [path for path in GRAPH if state.foreign(path)]


def test_nothing_is_pending_after_everything_was_made(tree):
    tree.make_all()
    assert tree.pending() == tree.foreign() == []


def test_times_do_not_count(tree):
    tree.make_all()
    for n, path in enumerate(reversed(GRAPH)):
        os.utime(path, (n, n))
    assert tree.pending() == []


def test_changed_settings_make_it_and_what_follows_foreign(tree):
    tree.make_all()
    tree.settings["b.json"] = "two"
    assert tree.foreign() == tree.pending() == ["b.json", "c.json"]


def test_a_change_and_its_undoing_are_nothing(tree):
    tree.make_all()
    tree.settings["a.json"] = "two"
    assert tree.pending() == list(GRAPH)
    tree.settings["a.json"] = "one"
    assert tree.pending() == []


def test_undoing_half_a_rerun_leaves_just_that_half(tree):
    tree.make_all()
    tree.settings["a.json"] = "two"
    tree.make("a.json")
    tree.make("d.json")
    tree.settings["a.json"] = "one"
    assert tree.foreign() == ["a.json", "d.json"]


def test_a_missing_artifact_makes_what_follows_pending_but_not_foreign(tree):
    tree.make_all()
    os.unlink("b.json")
    assert tree.pending() == ["b.json", "c.json"]
    assert tree.foreign() == []


def test_a_missing_temporary_artifact_is_no_reason(tree):
    tree.make_all()
    tree.temporary.add("b.json")
    os.unlink("b.json")
    assert tree.pending() == []


def test_a_job_whose_temporary_output_is_gone_is_judged_by_what_it_keeps(tree):
    def state(settings):
        job = Node("rule", "a.json", settings, (), temporary=True, kept=("b.json",))
        return Staleness(
            lambda path: job if path == "a.json" else Node("rule", "a.json", settings, (), kept=("b.json",))
        )

    record = {"rule": "rule", "id": provenance.identity("a.json", "one", {}), "settings": "one", "inputs": {}}
    provenance.write_json("b.json", {}, record)
    assert not any((state("one").outdated("a.json"), state("one").pending("a.json")))
    assert all((state("two").outdated("a.json"), state("two").pending("a.json"), state("two").pending("b.json")))


def test_a_torn_artifact_is_left_to_its_reader(tree):
    tree.make_all()
    with open("b.json", "r+b") as file:
        file.truncate(5)
    assert tree.pending() == []


def test_an_accepted_artifact_and_what_follows_are_up_to_date_and_say_so(tree):
    tree.make_all()
    tree.settings["b.json"] = "two"
    due = tree.state().due("b.json")
    record = provenance.read("b.json")
    provenance.restamp("b.json", {**record, "accepted": {"id": due, "why": "harmless"}})
    assert tree.pending() == []
    assert provenance.read("b.json")["accepted"]["why"] == "harmless"
    tree.settings["b.json"] = "three"
    assert tree.pending() == ["b.json", "c.json"]
