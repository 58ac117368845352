"""The picture of the loss masks can be accepted with the statistics that its job makes, from which training follows."""

import matplotlib.image
import numpy as np
import pyarrow as pa

from draftline import provenance
from draftline.mask_stats import MASK_SCHEMA, draw
from draftline.staleness import Node, Staleness

MASKS = pa.Table.from_pylist(
    [{"id": "a", "source": "chat", "status": "ok", "shard": 0, "length": 9, "mask_sum": 5, "finished": True}],
    schema=MASK_SCHEMA,
)


def stamp(inputs, settings="old", **more):
    return {
        "rule": "r",
        "id": provenance.identity("mask.parquet", settings, inputs),
        "settings": settings,
        "inputs": inputs,
        **more,
    }


def test_an_accepted_picture_carries_the_new_record_and_shows_the_same(tmp_path):
    path = tmp_path / "mask.png"
    draw(MASKS, path, stamp({}))
    before = matplotlib.image.imread(path)
    accepted = stamp({}, accepted={"id": "2" * 16, "why": "another colour of the bars: größer"})
    provenance.restamp(path, accepted)
    assert provenance.read(path) == accepted
    assert np.array_equal(matplotlib.image.imread(path), before)
    provenance.restamp(path, stamp({}))
    assert provenance.read(path) == stamp({})


def test_a_job_with_a_picture_is_up_to_date_once_all_that_it_made_is_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    provenance.write_parquet("mask.parquet", MASKS, stamp({}))
    draw(MASKS, "mask.png", stamp({}))
    node = Node("mask_stats", "mask.parquet", "new", (), kept=("mask.parquet", "mask.png"))
    assert Staleness(lambda path: node).pending("mask.parquet")
    due = Staleness(lambda path: node).due("mask.parquet")
    for path in node.kept:
        provenance.restamp(path, {**provenance.read(path), "accepted": {"id": due}})
    assert not Staleness(lambda path: node).pending("mask.parquet")
