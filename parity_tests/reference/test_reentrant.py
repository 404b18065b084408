"""Reentrant and non-reentrant checkpointing: where they really differ, and common claims about them that are false.

| | reentrant | non-reentrant |
| --- | --- | --- |
| keywords for the block | refused | pass |
| no input requires a gradient | the parameters get none, a warning | the parameters get theirs |
| `torch.autograd.grad`, `backward(inputs=…)`, second derivatives | refused | work |
| tensors in a list argument, a dict result | cut off from the graph | work |
| a region that changes its input in place | refused, always | refused in the backward pass |
| an input changed after the call | refused in the backward pass | the same |
| in place on what the region made | works | works |
| control flow that depends on values | works | works |
| kept between the passes | the inputs of the region | the same bytes |
| recomputation | the whole region | ends at the last tensor that backward needs |
| the region's graph in the forward pass | not recorded | recorded |
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ref
from examples import pytorch

forms = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
REFUSED = "incompatible with .grad"


def run(reentrant, function, *args, **kwargs):
    return checkpoint(function, *args, use_reentrant=reentrant, **kwargs)


def leaf(value=2.0):
    return torch.full((3,), value, dtype=torch.float64, requires_grad=True)


def test_keywords():
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    assert run(False, layer, input=x).shape == (2, 3)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: input"):
        run(True, layer, input=x)


def test_inputs_without_gradient():
    layer, x = nn.Linear(3, 1, bias=False), torch.ones(2, 3)
    run(False, layer, x).sum().backward()
    assert layer.weight.grad.tolist() == [[2.0] * 3]
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        assert not run(True, layer, x).requires_grad


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda y, x: torch.autograd.grad(y.sum(), x)[0],
        lambda y, x: (y.sum().backward(inputs=[x]), x.grad)[1],
        lambda y, x: torch.autograd.grad(torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum(), x)[0],
    ],
    ids=["grad", "inputs", "second"],
)
def test_other_ways_to_differentiate(differentiate):
    x = leaf()
    expected = differentiate(torch.sin(x), x)
    x.grad = None
    assert torch.equal(differentiate(run(False, torch.sin, x), x), expected)
    with pytest.raises(RuntimeError, match=REFUSED):
        differentiate(run(True, torch.sin, x), x)


def test_tensors_in_containers():
    def product(pair):
        return {"product": pair[0] * pair[1]}

    x = leaf()
    run(False, product, [x, x * 2])["product"].sum().backward()
    assert x.grad.tolist() == [8.0] * 3
    with pytest.warns(UserWarning, match="None of the inputs"):
        assert not run(True, product, [x, x * 2])["product"].requires_grad
    # If an input requires a gradient, the graph of the dict is lost without a warning.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not run(True, lambda x: {"square": x * x}, x)["square"].requires_grad


@pytest.mark.parametrize(("reentrant", "message"), [(True, "a leaf Variable"), (False, "is at version 1; expected version 0")])
def test_a_region_that_changes_its_input_in_place_is_refused(reentrant, message):
    with pytest.raises(RuntimeError, match=message):
        run(reentrant, lambda x: x.mul_(3).exp(), leaf() * 1).sum().backward()
    # In the reference's offload, the change does not reach the copy on the host.
    x = leaf()
    torch_ref.gradient_checkpoint_forward(lambda x: x.mul_(3).exp(), False, True, x * 1).sum().backward()
    assert x.grad.tolist() == pytest.approx([3 * math.exp(6)] * 3, rel=1e-14)


@forms
def test_in_place_elsewhere(reentrant):
    """No gradient is silently wrong in either form: impossible cases are refused, the rest is right."""
    h = leaf() * 1
    y = run(reentrant, torch.exp, h)
    h.mul_(5)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        y.sum().backward()
    x = leaf()
    run(reentrant, lambda x: x.mul(3).add_(1).exp(), x).sum().backward()
    assert x.grad.tolist() == pytest.approx([3 * math.exp(7)] * 3, rel=1e-14)


@forms
def test_control_flow_that_depends_on_values(reentrant):
    """Neither form analyses a static graph: the region is Python code, and runs again as Python."""

    def collatz(x):
        while x.sum() > 1:
            x = x / 2
        return x * x

    x = leaf(5.0)
    run(reentrant, collatz, x).sum().backward()
    assert x.grad.tolist() == [2 * 5.0 / 16 / 16] * 3


def stack(reentrant, layers):
    def forward(x):
        for layer in layers:
            x = run(reentrant, layer, x)
        return x

    return forward


BATCH, TIME, WIDTH = 2, 8, 32
STREAM = BATCH * TIME * WIDTH * 4


def saved(forward):
    kept = torch_ref.saved_for_backward(forward, torch.zeros(BATCH, TIME, WIDTH, requires_grad=True))
    return kept.device_bytes + kept.input_bytes


@pytest.mark.parametrize("count", [4, 8, 16])
def test_memory_falls_by_a_factor_and_not_to_a_constant(count):
    """N checkpointed layers keep N inputs: O(N), as without checkpoints, with a smaller factor. Both forms keep the same."""
    layers = pytorch.DecoderStack(count, WIDTH, 4).layers
    plain = saved(nn.Sequential(*layers))
    assert saved(stack(True, layers)) == saved(stack(False, layers)) == count * STREAM
    assert plain == count * 13.125 * STREAM


@pytest.mark.parametrize("count", [4, 8])
def test_one_region_around_all_layers_moves_the_peak_into_the_backward_pass(count):
    """Between the passes one input is kept, whatever the depth. But the recomputation keeps everything at once."""

    def peak(forward):
        def build():
            model = pytorch.DecoderStack(count, WIDTH, 4)
            x = torch.zeros(64 * BATCH, TIME, WIDTH, requires_grad=True)
            return torch_ref.TrainingStep(model, lambda x: forward(model, x).sum(), (x,))

        tracked = torch_ref.peak_bytes(build)
        return tracked.breakdown["activations"] + tracked.breakdown["temp"]

    model = pytorch.DecoderStack(count, WIDTH, 4)
    assert saved(lambda x: run(False, model, x)) == STREAM
    plain, whole = peak(lambda model, x: model(x)), peak(lambda model, x: run(False, model, x))
    layers = peak(lambda model, x: model(x, use_gradient_checkpointing=True))
    assert plain > count * 13.125 * 64 * STREAM and whole >= plain > 2 * layers


def perceptron(x, up, down):
    return torch.relu(x @ up) @ down


def test_only_the_non_reentrant_form_ends_a_recomputation_early():
    counts = {}
    for reentrant in (True, False):
        x, up, down = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
        with torch_ref.count_matmuls() as count:
            run(reentrant, perceptron, x, up, down).sum().backward()
        counts[reentrant] = count.total
    assert counts == {True: 8, False: 7}


@forms
def test_the_forward_pass_records_a_graph_only_without_reentrance(reentrant):
    recorded = []

    def block(x):
        recorded.append(torch.is_grad_enabled())
        return x.sin()

    run(reentrant, block, leaf()).sum().backward()
    assert recorded == ([False, True] if reentrant else [True, True])
