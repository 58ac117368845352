"""Tapped layers by the rule of released drafters, and the order of part visits."""

import pytest

from draftline.errors import DraftlineError
from draftline.layers import default_layer_ids, layer_ids
from draftline.visits import segment_visits


@pytest.mark.parametrize(
    ("num_layers", "count", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (32, 5, [1, 8, 15, 22, 29]),
        (40, 5, [1, 10, 19, 28, 37]),
        (8, 3, [1, 3, 5]),
        (30, 1, [15]),
    ],
)
def test_default_layers_are_those_of_released_drafters(num_layers, count, ids):
    assert default_layer_ids(count, num_layers) == ids


@pytest.mark.parametrize("ids", [[-1, 2], [0, 7], [3, 1], [1, 1]])
def test_layers_that_cannot_be_tapped_are_refused_with_key_and_value(ids):
    with pytest.raises(DraftlineError, match=r"hidden_states\.layers: \["):
        layer_ids(ids, 8, key="hidden_states.layers")


def test_more_layers_than_can_be_tapped_are_refused_as_they_were_asked_for():
    assert layer_ids(5, 8, key="k") == [1, 2, 3, 4, 5]
    with pytest.raises(DraftlineError, match=r"config: k: 6: of a target of 8 layers 5 can be tapped"):
        layer_ids(6, 8, key="k")


def test_the_second_to_last_layer_is_the_highest():
    assert layer_ids([0, 6], 8, key="k") == [0, 6]


@pytest.mark.parametrize("segments", [1, 2, 5, 24])
def test_segments_cut_the_visits_without_loss(segments):
    visits = [v for n in range(1, segments + 1) for v in segment_visits(4, 2, 3, segments, n)]
    assert visits == [(e, f"{s:04d}", f"{p:04d}") for e in range(3) for s in range(4) for p in range(2)]
