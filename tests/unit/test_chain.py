import numpy as np

from draftline.decode.chain import chain_depths


def test_a_chain_is_accepted_up_to_its_first_difference():
    draw = np.random.default_rng(0)
    draft, truth = draw.integers(0, 3, (200, 7)), draw.integers(0, 3, (200, 7))
    expected = []
    for drafted, true in zip(draft, truth):
        depth = 0
        while depth < 7 and drafted[depth] == true[depth]:
            depth += 1
        expected.append(depth)
    assert chain_depths(draft, truth).tolist() == expected
    assert 0 in expected
    assert max(expected) >= 3


def test_nothing_is_accepted_past_the_end_of_the_completion():
    assert chain_depths(np.array([[4, -1, -1]]), np.array([[4, -1, -1]])).tolist() == [1]
