"""The engine in the job answers as transformers' own generate does for each prompt alone."""

import copy
import dataclasses
import random

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from draftline.cpu_linear import PackedLinear, pack
from draftline.engines import Request, Sampling, transformers_engine
from draftline.engines.sampler import distribution, draw, uniform
from draftline.engines.transformers_engine import Batch, TransformersEngine
from draftline.loading import load_model

VOCABULARY = 61
GREEDY = Sampling()
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def llama(seed=0):
    config = LlamaConfig(**SIZES, **IDS, num_key_value_heads=2, num_hidden_layers=3, initializer_range=0.3)
    return build(LlamaForCausalLM, config, seed)


def windowed(seed=0):
    """Sliding-window attention, narrower than the prompts."""
    config = MistralConfig(
        **SIZES, **IDS, num_key_value_heads=2, num_hidden_layers=2, sliding_window=7, initializer_range=0.3
    )
    return build(MistralForCausalLM, config, seed)


def hybrid(seed=0):
    """Gated delta nets and full attention, as in Qwen3.5."""
    config = Qwen3_5TextConfig(
        **SIZES, **IDS, num_key_value_heads=2, num_hidden_layers=4, initializer_range=0.3,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    return build(Qwen3_5ForCausalLM, config, seed)


def build(kind, config, seed):
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    return kind(config).eval()


MODELS = {"llama": llama, "windowed": windowed, "hybrid": hybrid}


def prompts(count, seed=0):
    """Random prompts of two tasks: most begin with one of two texts."""
    rng = random.Random(seed)
    starts = [[rng.randrange(VOCABULARY) for _ in range(9)] for _ in range(2)]
    starts[1][:4] = starts[0][:4]
    return [
        [*starts[n % 2], *(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30)))]
        if n < count - 2
        else [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))]
        for n in range(count)
    ]


def requests(count=20, most=45):
    limits = [1 + 7 * n % most for n in range(count)]
    return [Request(f"{n:02d}", ids, [], limit, seed=n) for n, (ids, limit) in enumerate(zip(prompts(count), limits))]


def answers(model, asked, slots, stop_ids=frozenset(), sampling=GREEDY):
    found = {request.id: result for request, result in Batch(model, asked, sampling, slots, set(stop_ids)).run()}
    assert sorted(found) == sorted(request.id for request in asked)
    return found


def alone(model, request, stop_ids):
    """transformers' own greedy generation, one row; with the smallest gap between the best two logits of its steps."""
    ids = torch.tensor([request.prompt_ids])
    output = model.generate(
        ids, max_new_tokens=request.max_new_tokens, do_sample=False, eos_token_id=sorted(stop_ids) or None,
        return_dict_in_generate=True, output_logits=True, attention_mask=torch.ones_like(ids),
    )  # fmt: skip
    best_two = torch.stack(output.logits)[:, 0].topk(2).values
    return output.sequences[0, ids.shape[1] :].tolist(), float((best_two[:, 0] - best_two[:, 1]).min())


STOPS = {3, 17}


@pytest.fixture(scope="module", params=MODELS)
def expected(request):
    """A model, requests, and what transformers' own generate answers to each of them alone."""
    model, asked = MODELS[request.param](), requests()
    found = [alone(model, one, STOPS) for one in asked]
    assert min(gap for _, gap in found) > 1e-4, "a tie: choose another seed"
    assert 3 < sum(ids[-1] in STOPS for ids, _ in found) < 18
    return model, asked, {one.id: ids for one, (ids, _) in zip(asked, found)}


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_greedy_rows_equal_generate_on_each_prompt_alone(expected, slots):
    model, asked, answer = expected
    found = answers(model, asked, slots, STOPS)
    assert {name: result.ids for name, result in found.items()} == answer
    for result in found.values():
        assert result.finish_reason == ("stop" if result.ids[-1] in STOPS else "length")


def test_prompts_run_in_padded_groups_and_alone_give_the_same(expected, monkeypatch):
    model, asked, answer = expected
    monkeypatch.setattr(transformers_engine, "PREFILL_TOKENS", {"cpu": 1})
    assert {name: result.ids for name, result in answers(model, asked, 16, STOPS).items()} == answer


def test_packed_linear_layers_give_the_same(expected):
    model, asked, answer = copy.deepcopy(expected)
    pack(model)
    assert sum(type(module) is PackedLinear for module in model.modules()) > 10
    assert {name: result.ids for name, result in answers(model, asked, 16, STOPS).items()} == answer


def test_a_row_continued_from_its_sampled_ids_ends_as_if_never_cut(expected):
    model, asked, answer = expected
    halves = [
        dataclasses.replace(one, sampled_ids=ids[: len(ids) // 2], max_new_tokens=one.max_new_tokens - len(ids) // 2)
        for one in asked
        if len(ids := answer[one.id]) > 1
    ]
    for name, result in answers(model, halves, 5, STOPS).items():
        assert result.ids == answer[name][len(answer[name]) // 2 :]


def test_a_beginning_that_many_prompts_share_is_run_once(monkeypatch):
    model, asked = llama(), requests(20, most=1)
    seen = []
    real = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: seen.append(k["input_ids"].numel()) or real(*a, **k))
    monkeypatch.setattr(transformers_engine, "PREFILL_TOKENS", {"cpu": 1})
    answers(model, asked, 20)
    whole = sum(len(one.prompt_ids) for one in asked)
    assert sum(seen) == whole - 18 * 9 + 2 * 9


def test_a_batch_of_many_generations_keeps_no_more_columns_than_its_rows_need():
    model = llama()
    asked = [Request(f"{n:03d}", [n % 7, 5, 6], [], 6, seed=0) for n in range(80)]
    batch = Batch(model, asked, GREEDY, 4, set())
    widest = max(batch.mask_BT.shape[1] for _ in batch.run())
    assert widest <= 3 + 6
    assert all(layer.get_seq_length() <= 9 and layer.keys.shape[2] <= 9 + 64 for layer in batch.cache.attention)


@pytest.mark.parametrize(("rows", "bias"), [(1, False), (64, True), (300, True)])
def test_a_packed_linear_layer_equals_the_product_in_float64(rows, bias):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(48, 96, bias=bias))
    input = torch.randn(rows, 1, 48)
    exact = input.double() @ layer[0].weight.double().T + (layer[0].bias.double() if bias else 0)
    pack(layer)
    torch.testing.assert_close(layer(input).double(), exact, rtol=1e-5, atol=1e-6)


SAMPLINGS = [
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, top_k=12, top_p=0.6),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05),
    Sampling(temperature=1.0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_distribution_is_that_of_transformers(sampling):
    torch.manual_seed(1)
    logits = torch.randn(6, VOCABULARY) * 3
    config = GenerationConfig(
        do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
        min_p=sampling.min_p or None,
    )  # fmt: skip
    scores = logits
    for process in llama()._get_logits_processor(config, input_ids_seq_length=1):
        scores = process(torch.zeros(6, 1, dtype=torch.int64), scores)
    candidates, weights = distribution(logits, sampling)
    ours = torch.zeros_like(logits).scatter(1, candidates, weights / weights.sum(-1, keepdim=True))
    torch.testing.assert_close(ours, scores.softmax(-1), rtol=1e-5, atol=1e-6)


def test_draws_follow_the_distribution():
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0]).repeat(20000, 1)
    sampling = Sampling(temperature=1.5, top_k=4)
    drawn = draw(logits, sampling, range(20000), [7] * 20000).bincount(minlength=5) / 20000
    exact = torch.tensor([1.0, 3.0, 2.0, -torch.inf, 0.0]).div(1.5).softmax(-1)
    # Four standard deviations of a share of 20000 draws are at most 0.014.
    torch.testing.assert_close(drawn, exact, rtol=0, atol=0.014)


def test_uniform_numbers_are_uniform_over_seeds_and_over_steps():
    for numbers in ([uniform(seed, 0) for seed in range(5000)], [uniform(2**62 + 5, step) for step in range(5000)]):
        assert 0 <= min(numbers) <= max(numbers) < 1
        # The Kolmogorov-Smirnov distance of 5000 uniform numbers stays below 0.03 but once in ten thousand.
        assert max(abs(number - n / 5000) for n, number in enumerate(sorted(numbers))) < 0.03


def test_a_sampled_row_depends_on_its_seed_and_on_nothing_beside_it():
    model, sampling = llama(), Sampling(temperature=1.0, top_p=0.9)
    asked = requests()
    together = answers(model, asked, 16, STOPS, sampling)
    for some, slots in ((asked[:7], 3), (asked[7:], 2)):
        assert answers(model, some, slots, STOPS, sampling).items() <= together.items()
    others = [dataclasses.replace(one, seed=one.seed + 1000) for one in asked]
    different = answers(model, others, 16, STOPS, sampling)
    assert sum(different[name].ids != together[name].ids for name in together) > 10


def test_sampling_from_the_likeliest_token_alone_is_greedy(expected):
    model, asked, answer = expected
    found = answers(model, asked, 16, STOPS, Sampling(temperature=0.7, top_k=1))
    assert {name: result.ids for name, result in found.items()} == answer


def test_nothing_asked_gives_nothing():
    assert answers(llama(), [], 4) == {}


def test_the_tiny_target_answers_as_generate_does(tiny_target):
    with TransformersEngine(tiny_target.manifest, {"device": "cpu"}, 4) as engine:
        asked = [Request(f"{n}", [5 + n, 300 * n + 7, 40, 41][: 2 + n], [], 12, seed=0) for n in range(3)]
        found = {request.id: result.ids for request, result in engine.generate(asked, GREEDY)}
    model = load_model(tiny_target.manifest)
    for request in asked:
        ids, gap = alone(model, request, set(tiny_target.manifest.eos_token_ids))
        assert gap > 1e-4, "a tie: choose other prompts"
        assert found[request.id] == ids
