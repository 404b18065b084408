"""Hazards of keeping an array: in-place changes, random numbers, nesting, autocast, two backward passes."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import all_equal, gradients
from parity_tests.reference.test_every_way import noisy
from torch_ref import selective_checkpoint


def layer(**options: Any) -> tuple[pytorch.DecoderLayer, torch.Tensor]:
    torch.manual_seed(0)
    return pytorch.DecoderLayer(8, 2, **options).double(), torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)


def under(policy: str, block: Any) -> Any:
    return functools.partial(selective_checkpoint, block, policy)


# Changes in place.


class InPlace(nn.Module):
    """Changes the first product, or a view of it, in place; not idempotent, so a second change would show."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.first, self.second, self.view = nn.Linear(3, 4).double(), nn.Linear(4, 3).double(), view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.view:
            h[:, 1:].mul_(2)
        else:
            h.tanh_()
        return self.second(h).sin()


def in_place(view: bool) -> tuple[InPlace, torch.Tensor]:
    torch.manual_seed(0)
    return InPlace(view), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)


views = pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])


@views
@pytest.mark.parametrize("policy", ["full", "offload: @dots", "offload: *", "save: second:dot*", "recompute: first:*; save: *"])
def test_a_change_in_place_of_what_is_not_saved_is_repeated(policy, view):
    block, x = in_place(view)
    assert all_equal(gradients(under(policy, block), block, x), gradients(block, block, x))


@views
@pytest.mark.parametrize("policy", ["dots", "everything", "save: first*"])
def test_a_change_in_place_of_what_is_saved_is_refused_in_the_forward_pass(policy, view):
    block, x = in_place(view)
    says = r"changes first:dot_general#0 in place, which policy '.*' saves.*Put 'recompute: first:dot_general#0'"
    with pytest.raises(torch_ref.MutatedTensorError, match=says):
        selective_checkpoint(block, policy, x)


def test_the_result_of_a_change_in_place_is_no_array():
    with pytest.raises(torch_ref.NoEffectError, match="matches no array"):
        selective_checkpoint(lambda x: x.sin().mul_(3).exp(), "save: *mul_*", torch.ones(2, requires_grad=True))


def test_a_change_of_the_output_by_the_caller_is_refused_where_it_matters():
    x = torch.ones(2, requires_grad=True)
    selective_checkpoint(lambda x: x.exp().sin(), "save: *sin*", x).mul_(2).sum().backward()
    assert x.grad.tolist() == pytest.approx([2 * math.cos(math.e) * math.e] * 2)

    def block(x):
        y = x.exp().sin()
        return y, y.cos()

    first, second = selective_checkpoint(block, "save: *sin*", x)
    first.mul_(2)
    with pytest.raises(RuntimeError, match="has been mutated"):
        second.sum().backward()


def test_offloaded_arguments_that_change_afterwards_are_noticed():
    x = torch.ones(2, requires_grad=True) * 1
    output = selective_checkpoint(lambda x: x.sin().cos(), "offload: @inputs; save: *sin*", x)
    x.add_(1)
    with pytest.raises(torch_ref.MutatedTensorError, match="was changed in place between the forward and the backward"):
        output.sum().backward()


# Random numbers.


@pytest.mark.parametrize("action", ["save", "offload"])
def test_a_random_operator_cannot_be_kept(action):
    x = torch.randn(5, requires_grad=True)
    says = f"matches only operators that draw random numbers in noisy.*nothing to {action}"
    with pytest.raises(torch_ref.NoEffectError, match=says):
        selective_checkpoint(noisy, f"{action}: *native_dropout*", x)
    with torch_ref.receipt() as r:
        selective_checkpoint(noisy, "offload: *", x)
    # The argument, sine, cosine, sigmoid, two products and the exponential: not the masks and their results.
    assert r.bytes_on_host == 7 * 20


def test_a_copy_that_an_inner_block_finds_on_the_host_does_not_shift_what_the_outer_one_keeps():
    condition, x = torch.randn(4), torch.randn(4, requires_grad=True)

    def inner(x, c):
        return (x * c.sin()).sin()

    def outer(x):
        return selective_checkpoint(inner, "offload: @inputs", x.to(torch.float64).to(torch.float32), condition).exp()

    def chain(x, call):
        return call(call(x))

    plain = gradients(lambda x: chain(x, lambda x: inner(x, condition).exp()), nn.Module(), x)
    grads = gradients(lambda x: chain(x, under("save: *to_copy*, *sin*", outer)), nn.Module(), x)
    assert all_equal(grads, plain)


# Autocast, two backward passes, other recomputations.


@pytest.mark.parametrize("policy", ["full", "dots", "offload: @inputs; save: @dots"])
def test_gradients_of_shared_weights_are_summed_in_float32_under_autocast(policy):
    """The cast of a weight is not cached between calls. (PyTorch's own context_fn fails here.)"""
    torch.manual_seed(0)
    block, x = pytorch.DecoderLayer(8, 2), torch.randn(3, 5, 8, requires_grad=True)

    def run(call):
        def fn(x):
            with torch.autocast("cpu", torch.bfloat16):
                return call(call(call(x))).float()

        return gradients(fn, block, x)

    for gradient, expected in zip(run(under(policy, block)), run(block), strict=True):
        assert (gradient - expected).norm() <= 2**-8 * expected.norm() + 1e-6


def test_what_is_saved_serves_one_backward_pass():
    block, x = layer()
    output = selective_checkpoint(block, "dots", x).sum()
    torch.autograd.grad(output, [x], retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        torch.autograd.grad(output, [x])


BATCH_NORMS = {
    "plain checkpoint": (lambda block, x: checkpoint(block, x, use_reentrant=False), True),
    "reentrant": (lambda block, x: checkpoint(block, x, use_reentrant=True), True),
    "faithful offload": (lambda block, x: torch_ref.faithful.gradient_checkpoint_forward(block, False, True, x), True),
    "right": (lambda block, x: torch_ref.gradient_checkpoint_forward(block, True, False, x), False),
}


@pytest.mark.parametrize("call", BATCH_NORMS)
def test_statistics_that_the_recomputation_updates_again(call):
    run, is_found = BATCH_NORMS[call]
    block, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(5, 3, requires_grad=True)
    found = torch_ref.doctor(lambda x: run(block, x), x).findings
    assert [finding.trap for finding in found] == ["buffers_updated_twice"] * is_found
    assert all("BatchNorm1d.running_mean, BatchNorm1d.running_var" in finding.problem for finding in found)
    run(block, x).sum().backward()
    assert int(block[1].num_batches_tracked) == 2 + is_found
    assert torch_ref.doctor(lambda x: run(block.eval(), x), x).ok
