"""A block that captures a variable which is rebound before the recomputation is refused."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

import torch_ref
from parity_tests.reference.blocks import call

# Each runs layers and leaves their output in `h`; a lambda's variable is looked up only when it runs again.
LATE = {
    "layer": "for layer in layers:\n    h = call(mode, lambda h: layer(h), h)",
    "k": "for k in range(3):\n    h = call(mode, functools.partial(lambda h: layers[k](h)), h)",
    "closure": "def run(h):\n    for cell in layers:\n        h = call(mode, lambda h: cell(h), h)\n    return h\nh = run(h)",
}
REMEDIES = {
    "default": lambda layer: lambda h, layer=layer: layer(h),
    "module": lambda layer: layer,
    "method": lambda layer: layer.forward,
    "closure of its own": lambda layer: lambda h: layer(h),
}


def stack() -> tuple[nn.ModuleList, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)).double()
    return layers, torch.randn(2, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("mode", ["checkpoint", "offload"])
@pytest.mark.parametrize("variable", LATE)
def test_a_late_bound_variable_is_refused(mode, variable):
    layers, x = stack()
    names = {"layers": layers, "h": x, "call": call, "mode": mode, "functools": functools}
    exec(LATE[variable], names)
    name = {"closure": "cell"}.get(variable, variable)
    with pytest.raises(torch_ref.ReboundVariableError, match=rf"<lambda>' captures the variable '{name}'.*{name}={name}"):
        names["h"].square().sum().backward()


def test_the_faithful_form_gives_wrong_gradients_silently():
    """Layers that multiply by 1, 3 and √7: backward multiplies by √7 three times, an error of (7 − 3) / 3 = 1.33."""
    layers = [nn.Linear(1, 1, bias=False).double() for _ in range(3)]
    for layer, factor in zip(layers, (1, 3, math.sqrt(7)), strict=True):
        nn.init.constant_(layer.weight, factor)
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)

    def error(bind):
        h = x
        for layer in layers:
            function = (lambda h, layer=layer: layer(h)) if bind else (lambda h: layer(h))  # noqa: B023
            h = torch_ref.faithful.gradient_checkpoint_forward(function, True, True, h)
        (gradient,) = torch.autograd.grad(h, x)
        return (gradient.item() - 3 * math.sqrt(7)) / (3 * math.sqrt(7))

    assert error(bind=False) == pytest.approx(4 / 3, rel=1e-14)
    assert error(bind=True) == 0.0


@pytest.mark.parametrize("mode", ["checkpoint", "offload"])
@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_remedies_work(mode, remedy):
    layers, x = stack()
    h = x
    for layer in layers:
        h = call(mode, REMEDIES[remedy](layer), h)
    expected = torch.autograd.grad(nn.Sequential(*layers)(x).square().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(h.square().sum(), x)[0], expected)


def test_a_variable_that_the_function_assigns_itself_may_change():
    calls = 0

    def block(x):
        nonlocal calls
        calls += 1
        return x.sin()

    call("checkpoint", block, torch.ones(2, requires_grad=True)).sum().backward()
    assert calls == 2


def test_a_captured_variable_that_is_gone_is_refused():
    factor = torch.ones(2)
    y = call("checkpoint", lambda x: (x * factor).sin(), torch.ones(2, requires_grad=True))
    factor = None
    with pytest.raises(torch_ref.ReboundVariableError, match="captures the variable 'factor'"):
        y.sum().backward()
