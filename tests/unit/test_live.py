import copy

import numpy as np
import pytest
import small_models
import torch
from small_models import STOP, TAPPED, greedy, heads_of, noisy_marginals, prompts, random_drafter

from draftline.decode.draft import Marginals, draft
from draftline.decode.live import Target, decode, proposer
from draftline.decode.replay import depth_table, truth, walk
from draftline.decode.tree import build_tree

SLOTS, LIMIT = 5, 24


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


TARGETS = ["llama", "qwen3", "sliding", "hybrid"]
METHODS = [None, 1, 6, 16]
"""Budgets; None is the chain."""


@pytest.fixture(scope="module", params=TARGETS)
def model(request):
    return small_models.build(request.param)


@pytest.fixture(scope="module")
def expected(model):
    """Prompts with the completions of transformers' own greedy search; some stop, some reach the limit."""
    found = [(prompt, greedy(model, prompt, LIMIT)) for prompt in prompts(4)]
    stopped = [completion[-1] == STOP for _, completion in found]
    assert any(len(completion) > 10 for _, completion in found)
    assert not all(stopped)
    return found


def assert_close(found, wanted):
    """Within 1e-4 of the largest value: what split and batched fp32 forwards of a recurrent layer differ by."""
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def noisy(prompt, completion, error):
    """A drafter that knows the completion but errs, for `decode`."""
    sequence = prompt + completion
    return lambda features, anchor: noisy_marginals(sequence, len(features), SLOTS, 16, error)


@pytest.mark.parametrize("budget", METHODS)
def test_live_decoding_equals_greedy_search_and_its_rounds_equal_replay(model, expected, budget):
    lengths = []
    for prompt, completion in expected:
        live = decode(Target(model, TAPPED), noisy(prompt, completion, 0.3), prompt, LIMIT, [STOP], budget)
        assert live.completion_ids == completion
        anchors = range(len(prompt), len(prompt) + len(completion) - 1)
        each = [noisy_marginals(prompt + completion, anchor, SLOTS, 16, 0.3) for anchor in anchors]
        if each:
            marginals = Marginals(*(np.concatenate(part) for part in zip(*each)))
            chain, trees = depth_table(marginals, truth(completion, SLOTS), [budget or 1])
            assert live.rounds == walk(chain if budget is None else trees[budget])
        lengths += live.rounds.lengths
    assert len(set(lengths)) >= (2 if budget == 1 else 4)


@pytest.mark.parametrize("budget", [None, 16])
def test_a_drafter_accepts_live_what_replay_finds_in_the_stored_features(model, expected, budget):
    drafter, heads = random_drafter(block_size=SLOTS + 1), heads_of(model)
    accepted = 0
    for prompt, completion in expected:
        live = decode(Target(model, TAPPED), proposer(drafter, heads, budget or 1), prompt, LIMIT, [STOP], budget)
        assert live.completion_ids == completion
        ids = torch.tensor([prompt + completion])
        states = model(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1][0] for layer in TAPPED], dim=-1)
        anchors = torch.arange(len(prompt), ids.shape[1] - 1)
        right = truth(completion, SLOTS)
        marginals = draft(drafter, heads, drafter.context(features), anchors, ids[0, anchors], 16, torch.tensor(right))
        chain, trees = depth_table(marginals, right, [16])
        assert live.rounds == walk(chain if budget is None else trees[16])
        accepted += sum(live.rounds.accepted)
    assert accepted > 0


@pytest.mark.parametrize("budget", METHODS)
def test_the_cache_after_a_round_is_that_of_a_fresh_forward(model, budget):
    prompt, target = prompts(1)[0], Target(model, TAPPED)
    token, features = target.prefill(prompt)
    sequence = [*prompt, token]
    for step in range(4):
        draw = np.random.default_rng(step)
        tokens = np.stack([draw.permutation(small_models.MASK)[:8] for _ in range(SLOTS)]).tolist()
        log_probs = np.sort(np.log(draw.dirichlet(np.ones(8), size=SLOTS)))[:, ::-1].tolist()
        count = slice(None) if budget else slice(1)
        candidates = [slot[count] for slot in tokens], [slot[count] for slot in log_probs]
        tree = build_tree(sequence[-1], *candidates, budget or SLOTS)
        choices, of_nodes = target.verify(tree)
        # Any path may have been accepted; here one ends at a random node.
        path, node = [], int(draw.integers(len(tree)))
        bonus = choices[node]
        while node > 0:
            path.insert(0, node)
            node = tree.parents[node]
        target.commit(tree, path)
        features = torch.cat([features, of_nodes[[0, *path]]])
        sequence += [*(tree.tokens[node] for node in path), bonus]

        fresh = model(torch.tensor([sequence]), output_hidden_states=True)
        states = torch.cat([fresh.hidden_states[layer + 1][0] for layer in TAPPED], dim=-1)
        assert_close(features, states[:-1])
        assert target.cache.get_seq_length() == len(sequence) - 1
        ahead = model(torch.tensor([sequence[-1:]]), cache=copy.deepcopy(target.cache), use_cache=True)
        assert_close(ahead.logits[0, 0], fresh.logits[0, -1])


def test_every_node_of_a_tree_sees_its_own_path_and_no_other(model):
    prompt, target = prompts(1)[0], Target(model, TAPPED)
    token, _ = target.prefill(prompt)
    marginals = noisy_marginals(list(range(40)), 3, SLOTS, 8, 0.5)
    tree = build_tree(token, marginals.tokens[0].tolist(), marginals.log_probs[0].tolist(), 16)
    assert len(tree.paths()) > 3
    choices, features = target.verify(tree)
    for path in tree.paths():
        ids = prompt + [tree.tokens[node] for node in path]
        alone = model(torch.tensor([ids]), output_hidden_states=True)
        states = torch.cat([alone.hidden_states[layer + 1][0] for layer in TAPPED], dim=-1)
        assert_close(features[path], states[len(prompt) :])
        assert [choices[node] for node in path] == alone.logits[0, len(prompt) :].argmax(dim=-1).tolist()


def test_an_oracle_is_accepted_whole_and_a_wrong_drafter_never(model, expected):
    for prompt, completion in expected:
        right = decode(Target(model, TAPPED), noisy(prompt, completion, 0), prompt, LIMIT, [STOP])
        assert right.rounds.lengths[:-1] == [SLOTS + 1] * (len(right.rounds.lengths) - 1)
        assert right.completion_ids == completion

        def wrong(features, anchor, sequence=tuple(prompt + completion)):
            behind = [*sequence[len(features) + 1 :], *[0] * SLOTS][:SLOTS]
            tokens = (np.array(behind) + 1) % small_models.VOCABULARY
            return Marginals(tokens[None, :, None], np.zeros((1, SLOTS, 1), dtype=np.float32))

        never = decode(Target(model, TAPPED), wrong, prompt, LIMIT, [STOP])
        assert never.rounds.lengths == [1] * (len(completion) - 1)
        assert never.completion_ids == completion


def test_a_certain_drafter_of_budget_b_minus_1_equals_the_chain(model, expected):
    for prompt, completion in expected[:3]:

        def certain(features, anchor, prompt=prompt, completion=completion):
            marginals = noisy(prompt, completion, 0.3)(features, anchor)
            return Marginals(marginals.tokens[:, :, :1], np.zeros((1, SLOTS, 1), dtype=np.float32))

        chain, tree = (
            decode(Target(model, TAPPED), certain, prompt, LIMIT, [STOP], budget) for budget in (None, SLOTS)
        )
        assert chain == tree


def test_rounds_equal_those_of_transformers_own_dflash_generation():
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    model, drafter = small_models.build("llama"), random_drafter(block_size=SLOTS + 1)
    config = drafter.config
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("head_dim", "rms_norm_eps", "block_size", "mask_token_id")
    assistant = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: getattr(config, name) for name in shared + more},
            target_layer_ids=list(config.target_layer_ids),
            layer_types=list(config.layer_types),
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    ).eval()
    renamed = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    weights = {
        next((to + name.removeprefix(of) for of, to in renamed.items() if name.startswith(of)), name): tensor
        for name, tensor in drafter.state_dict().items()
    }
    assistant.load_state_dict(weights)
    heads = heads_of(model)
    contexts, their_drafts, our_drafts = [], [], []

    def note(module, args, given, output):
        contexts.append(given["context_hidden_states"].shape[1])
        their_drafts.append(heads.logits(output.last_hidden_state[0, 1:]).argmax(dim=-1).tolist())

    def propose(features, anchor):
        marginals = proposer(drafter, heads, 1)(features, anchor)
        our_drafts.append(marginals.tokens[0, :, 0].tolist())
        return marginals

    assistant.register_forward_hook(note, with_kwargs=True)
    accepted = 0
    for prompt in prompts(8, seed=3):
        for noted in (contexts, their_drafts, our_drafts):
            noted.clear()
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LIMIT,
            do_sample=False,
            assistant_model=assistant,
            speculation_type="dflash",
        )[0, len(prompt) :].tolist()
        ours = decode(Target(model, TAPPED), propose, prompt, LIMIT, [STOP])
        assert ours.completion_ids == theirs
        # Theirs drafts nothing when a single token is left.
        rounds = len(contexts)
        assert len(ours.rounds.lengths) - rounds in (0, 1)
        assert our_drafts[:rounds] == their_drafts
        # A call's context is what the round before committed; the first one's is the prompt.
        assert contexts == [len(prompt), *ours.rounds.lengths][:rounds]
        accepted += sum(ours.rounds.accepted)
    assert accepted > 0


def test_the_tiny_hybrid_decodes_its_own_greedy_completion(tiny_target):
    from draftline.loading import load_model

    model, stops, lengths = load_model(tiny_target.manifest), tiny_target.manifest.eos_token_ids, []
    for seed in range(3):
        prompt = np.random.default_rng(seed).integers(300, 3000, size=12).tolist()
        completion = greedy(model, prompt, 16)
        for budget in (None, 8):
            live = decode(Target(model, [1, 3, 5]), noisy(prompt, completion, 0.2), prompt, 16, stops, budget)
            assert live.completion_ids == completion
            lengths += live.rounds.lengths
    assert max(lengths) > 2
