"""The drafter computes what transformers' own DFlash implementation computes, and sees what it may see."""

import copy
import math

import pytest
import torch
from needs import needs_gpu

from draftline.drafter import mask
from draftline.drafter.config import DrafterConfig
from draftline.drafter.model import Drafter

B, H, T = 8, 48, 90
ANCHORS = torch.tensor([20, 23, 40, 60])
FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {"full": (FULL, FULL, FULL), "sliding": (SLIDING, SLIDING, FULL), "all sliding": (SLIDING, SLIDING, SLIDING)}


def config(**changes):
    values = {
        "hidden_size": H,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": 100,
        "block_size": B,
        "mask_token_id": 99,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "layer_types": LAYERS["full"],
    }
    return DrafterConfig(**{**values, **changes})


def drafter_of(layers, **changes):
    window = 13 if SLIDING in LAYERS[layers] else None
    shape = config(layer_types=LAYERS[layers], sliding_window=window, **changes)
    drafter = Drafter.initialized(shape, seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():  # large enough that attention is far from uniform, norms not one
            parameter.mul_(8) if parameter.dim() == 2 else parameter.uniform_(0.5, 1.5)
    return drafter


@pytest.fixture
def features():
    return torch.randn(T, 2 * H, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def blocks():
    return torch.randn(len(ANCHORS), B, H, generator=torch.Generator().manual_seed(3))


def packed(drafter, features, blocks, anchors=ANCHORS):
    """One training-like forward over all blocks."""
    context = drafter.context(features)
    return drafter(context, torch.arange(len(features)), blocks, anchors, torch.zeros_like(anchors))


def alone(drafter, features, block, anchor):
    """One inference-like forward of a block over features 0..anchor-1."""
    context = drafter.context(features[:anchor])
    one = torch.tensor([anchor])
    return drafter(context, torch.arange(anchor), block[None], one, torch.zeros_like(one))[0]


@pytest.mark.parametrize("layers", ["full", "all sliding", "sliding"])
def test_output_equals_transformers_own_dflash_assistant(layers, features, blocks):
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    ours = drafter_of(layers, is_causal=False)  # theirs sees the whole block on sliding layers too
    shape = ours.config
    reference = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: getattr(shape, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
            **{name: getattr(shape, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")},
            **{name: getattr(shape, name) for name in ("rms_norm_eps", "max_position_embeddings", "block_size")},
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            sliding_window=shape.sliding_window or 2048,
            layer_types=list(shape.layer_types),
            target_layer_ids=list(shape.target_layer_ids),
            attn_implementation="eager",
        )
    ).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = {names.get(name, name): tensor for name, tensor in ours.state_dict().items()}
    assert weights.keys() == reference.state_dict().keys()
    reference.load_state_dict(weights)
    with torch.no_grad():
        for block, anchor in zip(blocks, ANCHORS.tolist()):
            attention = {FULL: None, SLIDING: None}
            if SLIDING in shape.layer_types:
                attention = {FULL: None, SLIDING: additive_window_mask(anchor, shape.sliding_window)}
            theirs = reference(
                noise_embeds=block[None], context_hidden_states=features[None, :anchor], attention_mask=attention
            ).last_hidden_state[0]
            torch.testing.assert_close(alone(ours, features, block, anchor), theirs, atol=1e-5, rtol=1e-5)


def additive_window_mask(anchor, window):
    query, key = torch.arange(anchor, anchor + B)[:, None], torch.arange(anchor + B)
    return torch.zeros(B, anchor + B).masked_fill(key <= query - window, float("-inf"))[None, None]


def reference_forward(drafter, features, block, anchor):
    """The four steps of the forward by hand, in float64, key by key, for one block."""
    weights = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    shape = drafter.config
    D, A, K = shape.head_dim, shape.num_attention_heads, shape.num_key_value_heads

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + shape.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(x, position):
        result = x.clone()
        for pair in range(D // 2):
            angle = position * shape.rope_theta ** (-2 * pair / D)
            first, second = x[..., pair], x[..., pair + D // 2]
            result[..., pair] = first * math.cos(angle) - second * math.sin(angle)
            result[..., pair + D // 2] = second * math.cos(angle) + first * math.sin(angle)
        return result

    def project(x, name):
        return x @ weights[f"{name}.weight"].T

    context = norm(project(features[:anchor].double(), "fc"), "hidden_norm")
    hidden = block.double()
    for layer in range(shape.num_hidden_layers):
        at = f"layers.{layer}"
        sliding = shape.layer_types[layer] == SLIDING
        normed = norm(hidden, f"{at}.input_layernorm")
        rows = torch.cat([context, normed])
        keys = norm(project(rows, f"{at}.self_attn.k_proj").view(-1, K, D), f"{at}.self_attn.k_norm")
        keys = torch.stack([turned(key, position) for position, key in enumerate(keys)])
        values = project(rows, f"{at}.self_attn.v_proj").view(-1, K, D)
        queries = norm(project(normed, f"{at}.self_attn.q_proj").view(-1, A, D), f"{at}.self_attn.q_norm")
        outputs = torch.zeros(B, A, D, dtype=torch.float64)
        for slot in range(B):
            position = anchor + slot
            seen = [p for p in range(anchor + B) if not sliding or (position - shape.sliding_window < p <= position)]
            query = turned(queries[slot], position)
            for head in range(A):
                scores = keys[seen, head * K // A] @ query[head] / math.sqrt(D)
                outputs[slot, head] = scores.softmax(0) @ values[seen, head * K // A]
        hidden = hidden + project(outputs.flatten(1), f"{at}.self_attn.o_proj")
        normed = norm(hidden, f"{at}.post_attention_layernorm")
        gate, up = project(normed, f"{at}.mlp.gate_proj"), project(normed, f"{at}.mlp.up_proj")
        hidden = hidden + project(gate * torch.sigmoid(gate) * up, f"{at}.mlp.down_proj")
    return norm(hidden, "norm")


@pytest.mark.parametrize("layers", LAYERS)
def test_output_equals_a_float64_computation_key_by_key(layers, features, blocks):
    drafter = drafter_of(layers)
    with torch.no_grad():
        for block, anchor in zip(blocks[:3], [23, 5, 40]):
            expected = reference_forward(drafter, features, block, anchor)
            torch.testing.assert_close(alone(drafter, features, block, anchor).double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", LAYERS)
def test_training_forward_equals_inference_forward(layers, features, blocks):
    drafter = drafter_of(layers)
    with torch.no_grad():
        together = packed(drafter, features, blocks)
        for n, anchor in enumerate(ANCHORS.tolist()):
            torch.testing.assert_close(together[n], alone(drafter, features, blocks[n], anchor), atol=1e-5, rtol=1e-5)


def test_packed_documents_do_not_see_each_other(features, blocks):
    drafter = drafter_of("sliding")
    other = torch.randn(31, 2 * H, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        context = drafter.context(torch.cat([other, features[:60]]))
        positions = torch.cat([torch.arange(31), torch.arange(60)])
        anchors, starts = torch.tensor([7, 31, 20, 60]), torch.tensor([0, 0, 31, 31])
        result = drafter(context, positions, blocks, anchors, starts)
        expected = [
            alone(drafter, source, block, anchor)
            for source, block, anchor in zip([other, other, features, features], blocks, anchors.tolist())
        ]
    torch.testing.assert_close(result, torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", LAYERS)
def test_features_from_the_anchor_on_change_nothing(layers, features, blocks):
    drafter = drafter_of(layers)
    with torch.no_grad():
        before = packed(drafter, features, blocks)
        moved = features.clone()
        moved[40:] = torch.randn(T - 40, 2 * H)
        after = packed(drafter, moved, blocks)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3], after[3])


def test_feature_before_the_anchor_changes_its_block(features, blocks):
    drafter = drafter_of("full")
    with torch.no_grad():
        before = packed(drafter, features, blocks)
        moved = features.clone()
        moved[39] += 1
        after = packed(drafter, moved, blocks)
    changed = (before - after).abs().amax(dim=(1, 2))
    assert torch.equal(changed[:2], torch.zeros(2))
    assert (changed[2:] > 1e-3).all()


def test_blocks_do_not_see_each_other(features, blocks):
    drafter = drafter_of("sliding")
    with torch.no_grad():
        before = packed(drafter, features, blocks)
        moved = blocks.clone()
        moved[1] += 1  # anchor 23 lies inside the block at 20
        after = packed(drafter, features, moved)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.equal(before[1], after[1])


def test_full_layers_see_later_slots_and_sliding_layers_do_not(features, blocks):
    for layers, sees in (("full", True), ("all sliding", False)):
        drafter = drafter_of(layers)
        moved = blocks.clone()
        moved[:, 7] += 1
        with torch.no_grad():
            before, after = packed(drafter, features, blocks), packed(drafter, features, moved)
        assert torch.equal(before[:, 1], after[:, 1]) is not sees
        assert not torch.equal(before[:, 7], after[:, 7])


def test_window_moves_with_the_slot(features, blocks):
    """One sliding layer of window 13: slot 0 at 40 sees features from 28 on, slot 5 only from 33 on."""
    shape = config(num_hidden_layers=1, layer_types=(SLIDING,), sliding_window=13)
    drafter = Drafter.initialized(shape, seed=1)
    moved = features.clone()
    moved[:33] += 1
    with torch.no_grad():
        before, after = (alone(drafter, f, blocks[2], 40) for f in (features, moved))
    changed = (before - after).abs().amax(dim=1)
    assert (changed[:5] > 0).all()
    assert torch.equal(changed[5:], torch.zeros(3))


def test_a_block_without_context_is_finite(features, blocks):
    drafter = drafter_of("sliding")
    with torch.no_grad():
        result = packed(drafter, features, blocks, torch.tensor([0, 0, 1, 60]))
    assert result.isfinite().all()


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3), (True, 13), (False, 13)])
def test_dense_mask_is_the_written_rule(causal, window):
    seen = mask.dense(torch.tensor([4, 20]), B, 20, causal, window)
    for n, anchor in enumerate([4, 20]):
        for slot in range(B):
            for key in range(20 + B):
                in_context = key < 20
                position = key if in_context else anchor + key - 20
                expected = key < anchor if in_context else not causal or key - 20 <= slot
                if window is not None:
                    expected = expected and position > anchor + slot - window
                assert bool(seen[n, slot, key]) is expected, (anchor, slot, key)


def test_mask_on_cuda_is_the_dense_mask():
    """flex_attention's rule, evaluated pair by pair on the CPU, against the dense one."""
    from draftline.drafter.attention import Layout

    anchors, starts = torch.tensor([3, 9, 6]), torch.tensor([0, 0, 9])
    for causal, window in [(False, None), (True, 5)]:
        layout = Layout(anchors, starts, 4, 15)
        rule = layout.rule(causal, window)
        query, key = torch.arange(12)[:, None], torch.arange(15 + 12)
        seen = rule(None, None, query, key)
        first = 0
        for document, added in zip(layout.documents, layout.dense_masks(causal, window)):
            expected = added == 0
            for n in range(document.blocks):
                rows = seen[(first + n) * 4 : (first + n + 1) * 4]
                context = rows[:, document.start : document.start + document.context]
                assert torch.equal(context, expected[n, :, : document.context])
                own = 15 + (first + n) * 4
                assert torch.equal(rows[:, own : own + 4], expected[n, :, document.context :])
                assert int(rows.sum()) == int(expected[n].sum())
            first += document.blocks


def test_two_evaluations_are_bit_equal(features, blocks):
    drafter = drafter_of("full").eval()
    with torch.no_grad():
        assert torch.equal(packed(drafter, features, blocks), packed(drafter, features, blocks))


def test_initialization_follows_from_the_seed():
    one, same, other = (Drafter.initialized(config(), seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert one["fc.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(one["norm.weight"], torch.ones(H))


@needs_gpu
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("counts", [(1,), (3, 1), (5, 7), (20, 9, 11), (150, 90, 60)])
@pytest.mark.parametrize("fuses", [False, True])
def test_on_a_gpu_outputs_and_gradients_are_those_on_the_cpu(layers, counts, fuses):
    """8 to 2,400 queries of one to three documents: kernels are made anew for some numbers of them."""
    draw = torch.Generator().manual_seed(4)
    anchors = [torch.randint(0, T, (count,), generator=draw).sort().values for count in counts]
    starts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)) * T
    features = torch.randn(len(counts) * T, 2 * H, generator=draw)
    blocks = torch.randn(sum(counts), B, H, generator=draw)
    positions = torch.arange(T).repeat(len(counts))
    own, results = drafter_of(layers), []
    for device in ("cpu", "cuda"):
        drafter = copy.deepcopy(own).to(device)
        if fuses and device == "cuda":
            drafter.fuse()
        inputs = (tensor.to(device) for tensor in (positions, blocks, torch.cat(anchors), starts))
        output = drafter(drafter.context(features.to(device)), *inputs)
        output.square().sum().backward()
        results.append([output, *(parameter.grad for parameter in drafter.parameters())])
    for expected, found in zip(*results, strict=True):
        assert float((found.cpu() - expected).norm()) <= 1e-4 * float(expected.norm())
