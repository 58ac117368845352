"""Features are the tapped layers' outputs, whatever shares a batch; nothing above them runs."""

import itertools
from collections import Counter

import kernel_packages
import pytest
import torch
from kernel_packages import CONVOLUTION_LOOKED_AT, LOOKED_AT, install
from needs import needs_gpu
from small_models import BUILDERS, SHAPE, build
from states_fixtures import LENGTHS, samples_of
from transformers import DogeConfig, DogeForCausalLM, MiniMaxConfig, MiniMaxForCausalLM
from transformers.integrations import use_kernel_func_from_hub_with_fallback

from draftline import extraction, fusion, packed_attention
from draftline.agreement import distance
from draftline.extraction import batches, extract, filled, prepare
from draftline.kernels import STEPS, kernels, places, torch_kernels, versions
from draftline.loading import decoder_layers
from draftline.packed_attention import packs, prefer_packed_attention

TAPPED = [0, 2]


def sequences():
    return [sample.input_ids for sample in samples_of()]


def plain_states(model, ids_T):
    """The same by transformers: one sequence, no padding, no hooks."""
    with torch.no_grad():
        states = model(input_ids=ids_T[None].long().to(model.device), output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1][0] for i in TAPPED], dim=-1)


def largest_error(found, references):
    """By sequence, in parts of the sequence's largest number."""
    return max(
        float((found_TF - reference_TF).abs().max() / reference_TF.abs().max())
        for found_TF, reference_TF in zip(found, references, strict=True)
    )


def assert_as_alone(found, name):
    """Each sequence's features are those that it has alone, but for rounding: some tokens of a random hybrid make much of it.

    The first tokens are also looked at by themselves: an earlier sequence's convolution or state would show there.
    """
    model, exact = build(name), build(name).double()
    for part in (slice(None), slice(3)):
        alone, references = ([plain_states(side, ids_T)[part] for ids_T in sequences()] for side in (model, exact))
        ours = [found[n][part] for n in range(len(alone))]
        assert largest_error(ours, alone) < max(1e-5, 4 * largest_error(alone, references))


@pytest.mark.parametrize("batch_tokens", [1, 100, 100_000])
@pytest.mark.parametrize("name", BUILDERS)
def test_features_equal_output_hidden_states_row_by_row(name, batch_tokens):
    found = dict(extract(build(name), TAPPED, sequences(), batch_tokens))
    assert sorted(found) == list(range(len(LENGTHS)))
    assert_as_alone(found, name)


def test_sequences_may_be_lists():
    model = build("llama")
    (_, from_tensor), (_, from_list) = (
        *extract(model, TAPPED, [torch.arange(9)]),
        *extract(model, TAPPED, [list(range(9))]),
    )
    assert torch.equal(from_tensor, from_list)


def test_layers_above_the_highest_the_norm_and_the_head_never_run():
    model, calls = build("hybrid"), Counter()
    watched = {**{f"layer {i}": layer for i, layer in enumerate(decoder_layers(model))}}
    watched |= {"norm": model.model.norm, "head": model.lm_head}
    for name, module in watched.items():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    forwards = len(batches(LENGTHS, 100))
    assert len(list(extract(model, [0, 1], sequences(), batch_tokens=100))) == len(LENGTHS)
    assert calls == {"layer 0": forwards, "layer 1": forwards}


def test_hooks_are_gone_between_samples():
    model = build("llama")
    for _ in extract(model, TAPPED, sequences(), batch_tokens=100):
        assert not any(layer._forward_hooks for layer in decoder_layers(model))
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("budget", [1, 63, 64, 150, 10_000])
def test_batches_hold_each_sequence_once_longest_first_within_the_budget(budget):
    groups = batches(LENGTHS, budget)
    flat = [n for group in groups for n in group]
    assert sorted(flat) == list(range(len(LENGTHS)))
    assert [LENGTHS[n] for n in flat] == sorted(LENGTHS, reverse=True)
    for group, following in zip(groups, [*groups[1:], None]):
        assert len(group) == 1 or LENGTHS[group[0]] * len(group) <= budget
        if following:
            assert LENGTHS[group[0]] * (len(group) + 1) > budget


@pytest.mark.parametrize("budget", [1, 63, 64, 150, 10_000])
def test_packed_batches_hold_each_sequence_once_and_leave_no_room_for_a_later_one(budget):
    groups = filled(LENGTHS, budget)
    assert sorted(n for group in groups for n in group) == list(range(len(LENGTHS)))
    for g, group in enumerate(groups):
        tokens = sum(LENGTHS[n] for n in group)
        assert len(group) == 1 or tokens <= budget
        assert all(tokens + LENGTHS[n] > budget for later in groups[g + 1 :] for n in later)


def by_ends(place):
    """transformers' torch version of a kernel as one that takes packed sequences: each begins anew."""
    own = place.torch_version

    def rule(query, key, value, g, beta, cu_seqlens, **options):
        parts = [slice(*ends) for ends in itertools.pairwise(cu_seqlens.tolist())]
        kept = {name: options[name] for name in ("output_final_state", "use_qk_l2norm_in_kernel")}
        outputs = [own(query[:, p], key[:, p], value[:, p], g=g[:, p], beta=beta[:, p], **kept)[0] for p in parts]
        return torch.cat(outputs, dim=1), None

    def convolution(hidden, weight, bias, activation, seq_idx, **options):
        firsts = [0, *(seq_idx[0].diff().nonzero().flatten() + 1).tolist(), seq_idx.shape[1]]
        parts = [slice(*ends) for ends in itertools.pairwise(firsts)]
        return torch.cat([own(hidden[..., p].contiguous(), weight, bias, activation) for p in parts], dim=-1)

    found = {"torch_chunk_gated_delta_rule": rule, "causal_conv1d_fn": convolution}[place.name]
    found.__module__ = "fla"
    return found


def chosen_by_ends(model):
    for place in places(model):
        if place.name not in STEPS:
            place.choose(by_ends(place))


PACKING = sorted(BUILDERS.keys() - {"sliding"})


@pytest.mark.parametrize("batch_tokens", [1, 100, 100_000])
@pytest.mark.parametrize("name", PACKING)
def test_features_of_packed_sequences_are_those_of_each_alone(name, batch_tokens):
    """On the CPU torch's rule and convolution by ends stand for the packages'."""
    model = build(name)
    with torch_kernels(model):
        chosen_by_ends(model)
        prefer_packed_attention(model)
        assert packs(model)
        found = dict(extract(model, TAPPED, sequences(), batch_tokens))
    assert_as_alone(found, name)


def test_sequences_are_packed_only_where_every_kernel_keeps_them_apart():
    llama, sliding, hybrid = (build(name) for name in ("llama", "sliding", "hybrid"))
    assert not packs(llama)
    for model in (llama, sliding, hybrid):
        prefer_packed_attention(model)
    assert packs(llama)
    assert not packs(sliding)
    with torch_kernels(hybrid):
        prefer_packed_attention(hybrid)
        assert hybrid.config._attn_implementation == "sdpa"
        chosen_by_ends(hybrid)
        prefer_packed_attention(hybrid)
        assert packs(hybrid)
        with torch_kernels(hybrid):
            assert not packs(hybrid)


def minimax():
    """Its linear attention is transformers' own, with a state that goes on through a row."""
    return MiniMaxForCausalLM(MiniMaxConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, block_size=16))


def doge():
    """Its attention makes a mask of its own, out of the values."""
    model = DogeForCausalLM(DogeConfig(**SHAPE))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A)
    return model


@pytest.mark.parametrize("make", [minimax, doge])
def test_a_model_that_packing_would_change_is_padded(make, monkeypatch):
    said = []
    monkeypatch.setattr(extraction, "say", said.append)
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    expected = [plain_states(model, ids_T) for ids_T in sequences()]
    found = dict(extract(prepare(model), TAPPED, sequences()))
    assert model.config._attn_implementation == "sdpa"
    assert "sequences are padded" in said[-1]
    for n, reference_TF in enumerate(expected):
        torch.testing.assert_close(found[n], reference_TF, atol=1e-4 * float(reference_TF.abs().max()), rtol=1e-4)


def test_a_window_that_is_not_in_the_layer_types_is_seen():
    model = build("llama")
    model.config.sliding_window = 6
    prefer_packed_attention(model)
    assert model.config._attn_implementation == "sdpa"


def test_attention_that_is_not_torchs_own_stays_as_it_is():
    model = build("llama")
    model.set_attn_implementation("eager")
    prefer_packed_attention(model)
    assert model.config._attn_implementation == "eager"


@pytest.fixture
def places_again():
    """Kernels that a test chooses are chosen for the whole process."""
    before = places(build("hybrid"))
    yield
    for place in before:
        place.names[place.name] = place.function


@needs_gpu
@pytest.mark.parametrize("batch_tokens", [1, 100, 100_000])
@pytest.mark.parametrize("name", BUILDERS)
def test_on_a_gpu_features_are_those_of_each_sequence_alone_in_fp32(name, batch_tokens, places_again):
    """At most twice as far as transformers' own bf16 forward on the CPU; so are the first tokens, which a neighbour would change."""
    exact, rounded = build(name).bfloat16().float(), build(name).bfloat16()
    model = prepare(build(name).bfloat16().to("cuda"))
    assert packs(model) == (name != "sliding")
    found = dict(extract(model, TAPPED, sequences(), batch_tokens))
    with torch_kernels(exact), torch_kernels(rounded):
        references, own = ([plain_states(side, ids_T) for ids_T in sequences()] for side in (exact, rounded))
    for part in (slice(None), slice(3)):
        theirs = [states_TF[part] for states_TF in references]
        ours, plain = ([side[n][part].cpu() for n in range(len(theirs))] for side in (found, own))
        allowed = 2 * distance(plain, theirs).figures()["relative_rms"]
        assert distance(ours, theirs).figures()["relative_rms"] < allowed


@needs_gpu
def test_on_a_gpu_a_hybrid_runs_on_fla_and_compiled_norms(places_again):
    model = prepare(build("hybrid").bfloat16().to("cuda"))
    found = kernels(model, model.config.layer_types)
    assert found["full_attention"] == packed_attention.NAME
    assert found["linear_attention"]["chunk_gated_delta_rule"] == "fla"
    assert found["linear_attention"]["causal_conv1d_fn"] in ("fla", "causal_conv1d")
    assert found["compiled"] == ["Qwen3_5MLP", "Qwen3_5RMSNorm", "Qwen3_5RMSNormGated"]
    with torch_kernels(model):
        assert not fusion.fused(model)
    assert fusion.fused(model) == found["compiled"]


def test_kernels_name_attention_and_each_function_of_a_linear_layer():
    model = build("hybrid")
    found = kernels(model, model.config.layer_types)
    assert found["full_attention"] == "sdpa"
    assert found["linear_attention"]["chunk_gated_delta_rule"] in ("torch", "fla")
    assert found["linear_attention"]["causal_conv1d_fn"] in ("torch", "causal_conv1d")
    assert {"torch", "transformers"} <= versions().keys()


@use_kernel_func_from_hub_with_fallback("fsum", "math")
def torch_fsum(values):
    return values.sum()


@use_kernel_func_from_hub_with_fallback("fsum", "a_package_that_nobody_has")
def torch_plain(values):
    return values.sum()


class Mixer(torch.nn.Module):
    def forward(self, values):
        return torch_fsum(values) + torch_plain(values)


def test_a_kernel_from_a_package_is_named_by_its_package():
    model = build("llama")
    decoder_layers(model)[0].mixer = Mixer()
    found = kernels(model, ["linear_attention"])["linear_attention"]
    assert found["fsum"] == "math"
    assert found["plain"] not in ("math", "a_package_that_nobody_has")


LOOK = """
import json, torch
from small_models import build
from draftline.kernels import kernels, torch_kernels
model = build("hybrid")
found = kernels(model, model.config.layer_types)["linear_attention"]
try:
    model(torch.arange(9)[None])
    called = ""
except RuntimeError as error:
    called = str(error)
with torch_kernels(model):
    forced = kernels(model, model.config.layer_types)["linear_attention"]
    logits = model(torch.arange(9)[None]).logits.sum().item()
again = kernels(model, model.config.layer_types)["linear_attention"]
print(json.dumps([found, called, forced, again, logits]))
"""


def look(folder):
    """Kernels of a hybrid model where the packages of `folder` are, and which of them its forward called.

    Where torch's versions were forced, they ran, and after that the others are back.
    """
    found, called, forced, again, logits = kernel_packages.run(folder, LOOK)
    assert set(forced.values()) == {"torch"}
    assert forced.keys() == found.keys()
    assert again == found
    assert logits == pytest.approx(build("hybrid")(torch.arange(9)[None]).logits.sum().item(), rel=1e-5)
    return found, called


def test_kernels_are_those_that_a_forward_calls_where_the_packages_are_there(tmp_path):
    found, called = look(install(tmp_path, LOOKED_AT, CONVOLUTION_LOOKED_AT))
    assert found == {
        "causal_conv1d_fn": "causal_conv1d",
        "causal_conv1d_update": "causal_conv1d",
        "chunk_gated_delta_rule": "fla",
        "recurrent_gated_delta_rule": "fla",
    }
    assert called == "the package's causal_conv1d_fn was called"


def test_kernels_are_those_that_a_forward_calls_where_only_fla_is_there(tmp_path):
    found, called = look(install(tmp_path, LOOKED_AT))
    assert (found["causal_conv1d_fn"], found["chunk_gated_delta_rule"]) == ("torch", "fla")
    assert called == "the package's chunk_gated_delta_rule was called"


def test_a_package_that_cannot_be_imported_does_not_count_as_there(tmp_path):
    """What happens where triton is missing or broken: transformers takes its own version and says nothing."""
    found, called = look(install(tmp_path, "raise ImportError('no triton')"))
    assert set(found.values()) == {"torch"}
    assert called == ""


def test_no_graph_is_kept():
    (_, features_TF), *_ = extract(build("llama"), TAPPED, sequences())
    assert not features_TF.requires_grad
