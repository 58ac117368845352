import json

import numpy as np
import pytest
import torch
from bench_world import EVALUATE, SHAPE, World

from draftline.baselines import Unigram, evaluate_baseline, label_counts
from draftline.decode.replay import depth_table
from draftline.drafter.config import DrafterConfig
from draftline.drafter.model import Drafter
from draftline.evaluation import Bench, DrafterProposer, evaluate

VOCABULARY, SLOTS = 32, 5
SHARED = ("manifest", "heads", "completions", "states")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


def run(world, baseline):
    return evaluate_baseline(
        baseline,
        tokens=[world.path("tokens.parquet")] * 2,
        config={"drafter": SHAPE, "evaluate": EVALUATE},
        run={"device": "cpu"},
        **world.arguments(*SHARED),
    )


def test_labels_are_counted_behind_every_anchor_that_training_may_draw(world):
    expected = np.zeros((SLOTS, VOCABULARY), dtype=int)
    for row in world.rows:
        ids, first = row["prompt_ids"] + row["completion_ids"], len(row["prompt_ids"])
        for anchor in range(first, len(ids) - 1):
            for slot in range(1, SLOTS + 1):
                if anchor + slot < len(ids):
                    expected[slot - 1, ids[anchor + slot]] += 1
    paths = [world.path("tokens.parquet")]
    assert (label_counts(paths, SLOTS, VOCABULARY).numpy() == expected).all()
    assert (label_counts(paths * 3, SLOTS, VOCABULARY).numpy() == 3 * expected).all()


def test_labels_outside_the_supervised_spans_do_not_count(world, tmp_path):
    other = World.__new__(World)
    other.folder = tmp_path
    rows = [{"prompt_ids": [1, 2, 3, 4], "completion_ids": [5, 6, 7, 8, 9, 10], "assistant_spans": [1, 3, 5, 8, 9, 10]}]
    other.write_tokens(rows)
    counts = label_counts([other.path("tokens.parquet")], 3, VOCABULARY).numpy()
    found = [{token: int(counts[slot, token]) for token in np.nonzero(counts[slot])[0]} for slot in range(3)]
    # Anchors at positions 1, 5 and 6 (tokens 2, 6 and 7); position 9 has no supervised token behind it.
    assert found == [{3: 1, 7: 1, 8: 1}, {8: 1}, {10: 1}]


def test_unigram_proposes_the_marginals_of_each_slot_everywhere():
    counts = torch.tensor([[0, 4, 1, 4, 0], [9, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    marginals = Unigram(counts).propose(torch.empty(0), torch.empty(0), 0, np.zeros((7, 3), dtype=np.int64), 4)
    assert marginals.tokens.shape == (7, 3, 4)
    for anchor in range(7):
        assert marginals.tokens[anchor].tolist() == [[1, 3, 2, -1], [0, 3, -1, -1], [-1] * 4]
    expected = [[4 / 9, 4 / 9, 1 / 9, 0], [0.9, 0.1, 0, 0], [0] * 4]
    np.testing.assert_allclose(np.exp(marginals.log_probs[3]), expected, rtol=1e-6)
    # The chain is the most frequent token of each slot; a slot without labels ends it.
    truth = np.array([[1, 0, 2], [1, 3, 2], [3, 0, 0], [4, 4, 4]])
    chain, trees = depth_table(type(marginals)(*(part[:4] for part in marginals)), truth, [3, 6])
    assert chain.tolist() == [2, 1, 0, 0]
    # Most probable prefixes: 1, 3, 10, 30, 2, 20 (equals: the shorter, then the smaller token first).
    assert trees[3].tolist() == [2, 1, 1, 0]
    assert trees[6].tolist() == [2, 1, 2, 0]


def test_unigram_equals_a_count_of_its_own_rounds(world):
    found = run(world, "unigram")
    counts = label_counts([world.path("tokens.parquet")], SLOTS, VOCABULARY).numpy()
    best = counts.argmax(axis=1).tolist()
    means = []
    for row in world.rows:
        completion, place, lengths = row["completion_ids"], 0, []
        while place < len(completion) - 1:
            behind = completion[place + 1 :]
            agree = 0
            while agree < min(SLOTS, len(behind)) and best[agree] == behind[agree]:
                agree += 1
            lengths.append(min(agree + 1, len(behind)))
            place += lengths[-1]
        if lengths:
            means.append(sum(lengths) / len(lengths))
    assert found["chain"]["tau"] == pytest.approx(np.mean(means))
    assert found["ddtree"]["16"]["tau"] >= found["ddtree"]["4"]["tau"] > 1
    json.dumps(found)


def test_untrained_is_the_first_drafter_as_it_starts(world):
    config = DrafterConfig.from_settings(SHAPE, world.manifest, [0, 2])
    drafter = Drafter.initialized(config, SHAPE["seed"]).eval()
    bench = Bench(world.path("completions.parquet"), world.path("states.safetensors"), world.manifest)
    assert run(world, "untrained") == evaluate(DrafterProposer(drafter, world.heads), bench, EVALUATE)
