"""Copies to the host: what was computed, in memory that is used again. Tests on a GPU print that they need one."""

import pytest
import torch
from needs import needs_gpu

from draftline.host_copies import HostCopies, computed

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=needs_gpu),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def tensors(device, rows, seed=0):
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 6, generator=draw).to(device)
    return {"a": values, "b": values.to(torch.float8_e4m3fn), "c": values.double().sum(1)}


def equal(one, other):
    return all(torch.equal(one[name].cpu().view(torch.uint8), other[name].cpu().view(torch.uint8)) for name in one)


@pytest.mark.parametrize("rows", [[5, 3, 8, 1], [1, 2, 3]])
def test_copies_are_what_was_computed_whatever_came_before(device, rows):
    copies = HostCopies()
    for seed, count in enumerate(rows):
        made = tensors(device, count, seed)
        found = copies.fetch(made, computed(made["a"]))
        assert found.keys() == made.keys()
        assert all(found[name].device.type == "cpu" for name in found)
        assert all((found[name].dtype, found[name].shape) == (made[name].dtype, made[name].shape) for name in made)
        assert equal(found, made)


def test_memory_grows_to_the_largest_and_is_used_again(device):
    copies = HostCopies()
    places = []
    for count in (8, 3, 8):
        made = tensors(device, count)
        found = copies.fetch(made, computed(made["a"]))
        places.append(found["a"].data_ptr())
        assert found["a"].is_pinned() == (device == "cuda")
    assert len(set(places)) == 1


def test_what_is_changed_after_the_copy_does_not_reach_it(device):
    made = tensors(device, 4)
    found = HostCopies().fetch(made, computed(made["a"]))
    before = found["a"].clone()
    made["a"].zero_()
    assert torch.equal(found["a"], before)


@needs_gpu
def test_a_copy_waits_for_the_computation_before_its_mark():
    values = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        values = torch.tanh(values @ values / 64)
    found = HostCopies().fetch({"a": values}, computed(values))["a"].clone()
    assert torch.equal(found, values.cpu())
