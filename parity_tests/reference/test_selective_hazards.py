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
from parity_tests.reference.blocks import all_equal, call, gradients
from torch_ref import selective_checkpoint

KEEPING = ["full", "dots", "everything", "offload: @dots", "offload: *", "offload: @inputs; save: @dots"]
keeping = pytest.mark.parametrize("policy", KEEPING)


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


def test_the_result_of_a_change_in_place_is_no_array_and_constants_are_made_to_be_written_on():
    x = torch.ones(2, requires_grad=True)

    def block(x):
        mask = torch.zeros(2)
        mask[1:] = 5
        y = x.sin()
        return y.mul_(3).exp() * y.cos() * (x * mask.clone()).exp()

    expected = gradients(block, nn.Module(), x)
    with pytest.raises(torch_ref.NoEffectError, match="matches no array"):
        selective_checkpoint(block, "save: *mul_*", x)
    for policy in ("save: *cos*; offload: *sin*, *exp*", "recompute: *sin*; save: *"):
        assert all_equal(gradients(under(policy, block), nn.Module(), x), expected)


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


def noisy(x: torch.Tensor) -> torch.Tensor:
    """Two random operators and arithmetic on either side of each."""
    y = torch.native_dropout(x.sin(), 0.5, True)[0].cos()
    return (torch.bernoulli(y.sigmoid()) * y).exp() * torch.native_dropout(y, 0.5, True)[0]


@pytest.mark.parametrize("policy", ["full", "everything", "offload: *", "recompute: *native_dropout*; save: *", "save: *cos*"])
def test_random_operators_are_computed_again(policy):
    x = torch.randn(50, requires_grad=True)
    plain = gradients(noisy, nn.Module(), x, seed=5)
    assert all_equal(gradients(under(policy, noisy), nn.Module(), x, seed=5), plain)
    assert not all_equal(plain, gradients(noisy, nn.Module(), x, seed=6))


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


# Nesting.


NESTED = ["full", "dots", "offload: *", "mode offload"]


@pytest.mark.parametrize("outer", NESTED[:3])
@pytest.mark.parametrize("inner", NESTED)
def test_nested_blocks(outer, inner):
    block, x = layer(dropout=0.3)
    inside = functools.partial(call, "offload", block) if inner == "mode offload" else under(inner, block)
    plain = gradients(lambda x: block(block(x)), block, x)
    assert all_equal(gradients(under(outer, lambda x: inside(inside(x))), block, x), plain)


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


@keeping
def test_autocast(policy):
    torch.manual_seed(0)
    block, x = pytorch.DecoderLayer(8, 2), torch.randn(3, 5, 8, requires_grad=True)

    def run(call, times):
        def fn(x):
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(times):
                    x = call(x)
            return x.float()

        return gradients(fn, block, x)

    assert all_equal(run(under(policy, block), 1), run(block, 1))
    # Blocks that share weights: the cast of a weight is not cached between calls, so gradients are summed in float32 and not
    # in bfloat16. (PyTorch's own context_fn fails here.)
    for gradient, expected in zip(run(under(policy, block), 3), run(block, 3), strict=True):
        assert (gradient - expected).norm() <= 2**-8 * expected.norm() + 1e-6


@pytest.mark.parametrize("policy", ["full", "offload: @dots", "offload: *"])
def test_what_is_not_saved_serves_several_backward_passes(policy):
    block, x = layer()

    def twice(call):
        output = (call(x) ** 2).sum()
        first = torch.autograd.grad(output, [x], retain_graph=True)
        parameters = [x, *block.parameters()]
        inner = torch.autograd.grad(output, parameters, create_graph=True)
        return [*first, *torch.autograd.grad(sum((tensor**2).sum() for tensor in inner), parameters)]

    for gradient, expected in zip(twice(under(policy, block)), twice(block), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_what_is_saved_serves_one_backward_pass():
    block, x = layer()
    output = selective_checkpoint(block, "dots", x).sum()
    torch.autograd.grad(output, [x], retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        torch.autograd.grad(output, [x])


class Codebook(nn.Module):
    """Reads a buffer, then writes to it: in place, and by a new tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(3, 7))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        self.steps = self.steps + 1
        x = (x * self.mean.clone()).sin() * self.steps
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        return x


def norms():
    return {
        "batch norm": nn.BatchNorm1d(3),
        "cumulative average": nn.BatchNorm1d(3, momentum=None),
        "instance norm": nn.InstanceNorm1d(3, track_running_stats=True),
        "spectral norm": nn.utils.parametrizations.spectral_norm(nn.Conv1d(3, 3, 1)),
        "old spectral norm": nn.utils.spectral_norm(nn.Conv1d(3, 3, 1)),
        "lazy batch norm": nn.LazyBatchNorm1d(),
        "codebook": Codebook(),
    }


CALLS = {
    "checkpoint": lambda block, x: torch_ref.gradient_checkpoint_forward(block, True, False, x),
    "offload": lambda block, x: torch_ref.gradient_checkpoint_forward(block, True, True, x),
    "OffloadFunction": lambda block, x: torch_ref.OffloadFunction(block)(x),
    "captured": lambda block, x: torch_ref.gradient_checkpoint_forward(lambda y: block(y), True, False, x),
    "nested": lambda block, x: selective_checkpoint(lambda y: selective_checkpoint(block, "full", y), "full", x),
    **{policy: lambda block, x, policy=policy: selective_checkpoint(block, policy, x) for policy in ("full", "save: @dots")},
}


def step(norm, call):
    """Gradients and buffers after two batches, whose backward passes run after both forward passes."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv1d(2, 3, 3), norms()[norm], nn.ReLU(), nn.Conv1d(3, 3, 3))
    batches = [torch.randn(4, 2, 9, requires_grad=True) for _ in range(2)]
    sum(call(block, x).square().sum() for x in batches).backward()
    return [p.grad for p in block.parameters()] + [x.grad for x in batches], [b.clone() for b in block.buffers()]


@pytest.mark.parametrize(
    ("norm", "call"),
    [*((norm, "checkpoint") for norm in norms()), *(("codebook", call) for call in CALLS if call != "checkpoint")],
)
def test_buffers_are_updated_once_and_the_recomputation_reads_their_old_values(norm, call):
    gradients, buffers = step(norm, CALLS[call])
    expected_gradients, expected_buffers = step(norm, lambda block, x: block(x))
    assert len(buffers) >= 2 and all_equal(buffers, expected_buffers)
    assert all_equal(gradients, expected_gradients)


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


@pytest.mark.parametrize("policy", ["save: *:topk#0", "offload: *:topk#0"])
def test_operators_with_several_results_have_one_name(policy):
    x = torch.randn(4, 6, requires_grad=True)

    def block(x):
        value, index = x.sin().topk(2)
        return value.exp().sum() + index.sum()

    with torch_ref.receipt() as r:
        assert all_equal(gradients(under(policy, block), nn.Module(), x), gradients(block, nn.Module(), x))
    assert r.bytes_on_host == (8 * 4 + 8 * 8 if "offload" in policy else 0)
