"""`gradient_checkpoint_forward`: a block in every mode computes what the plain call does.

A block that captures a variable which is rebound before the recomputation is refused.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from torch import nn

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import Gate, all_equal, call, gradients, live_copies
from tests.public_names import undocumented

Pair = namedtuple("Pair", "left right")


def test_tensors_anywhere_in_the_arguments_are_offloaded():
    a, b, c, d, e = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(5))

    def block(a, extra, *, options):
        return (a * extra[0] * extra[1]["deep"][0] * options["pair"][0] * options["pair"][1]).sin()

    with torch_ref.receipt() as r:
        call("offload", block, a, [b, {"deep": (c, None)}], options={"pair": Pair(d, e)}).sum().backward()
    assert (r.tensors_packed, r.bytes_offered, r.bytes_on_host, r.bytes_brought_back) == (5, 160, 160, 160)


def test_the_block_sees_the_callers_own_objects_and_the_recomputation_has_its_own_list():
    seen: list[int] = []

    def collect(x, store, marker):
        store.append(x * 2)
        seen.append(id(marker))
        return store[-1].sin()

    store, marker = [], object()
    call("offload", collect, torch.ones(2, requires_grad=True), store=store, marker=marker).sum().backward()
    assert len(store) == 1 and seen == [id(marker)] * 2


@pytest.mark.parametrize("mode", ["checkpoint", "offload"])
def test_an_argument_given_three_times_is_one_object_in_the_recomputation_too(mode):
    identical: list[bool] = []

    def attend(q, k, v):
        identical.append(q is k and k is v)
        return (q * k).sin() * v

    x = torch.randn(3, requires_grad=True)
    with torch_ref.receipt() as r:
        call(mode, attend, x, k=x, v=x).sum().backward()
    assert identical == [True, True]
    assert r.tensors_packed == (mode == "offload")


@pytest.mark.parametrize("mode", torch_ref.MODES)
def test_without_gradients_the_call_is_plain(mode):
    block, x, before = Gate(), torch.ones(2, 3, requires_grad=True), live_copies()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, torch_ref.count_calls(block) as calls, torch_ref.receipt() as r:
            assert not call(mode, block, x, x).requires_grad
        assert (calls.total, r.tensors_packed, r.bytes_on_host, live_copies()) == (1, 0, 0, before)


@pytest.mark.parametrize(
    ("view", "strides", "elements"),
    [
        (lambda t: t, (6, 1), 24),
        (lambda t: t.t(), (1, 6), 24),
        (lambda t: t[1:3], (6, 1), 12),
        (lambda t: t[:1].expand(4, 6), (0, 1), 6),
        (lambda t: t[0, 0], (), 1),
        # Elements are skipped or repeated: the copy has no gaps.
        (lambda t: t[:, ::2], (3, 1), 12),
        (lambda t: t.as_strided((3, 3), (1, 2)), (1, 3), 9),
        (lambda t: t.as_strided((2, 3), (2, 2)), (1, 2), 6),
        (lambda t: torch.view_as_complex(t.view(-1, 2)).conj(), (1,), 24),
    ],
)
def test_layout_survives_the_host(view, strides, elements):
    seen: list[torch.Tensor] = []

    def look(w, x):
        seen.append(x)
        return (w * x.real.sum()).sin()

    variant = view(torch.arange(24.0).reshape(4, 6))
    with torch_ref.receipt() as r:
        call("offload", look, torch.ones(1, requires_grad=True), x=variant).sum().backward()
    assert seen[0] is variant and torch.equal(seen[1], variant)
    assert seen[1].stride() == strides and r.bytes_on_host == 4 + 4 * elements


def test_parameters_given_as_arguments_stay_on_the_device():
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3, requires_grad=True)
    with torch_ref.receipt() as r:
        y = call("offload", lambda x, w, wt: (x @ w).sin() @ wt, x=x, w=weight, wt=weight.t())
    assert (r.tensors_packed, r.bytes_offered, r.bytes_on_host) == (1, 24, 24)
    grads = torch.autograd.grad(y.sum(), (x, weight))
    expected = torch.autograd.grad(((x @ weight).sin() @ weight.t()).sum(), (x, weight))
    assert all_equal(list(grads), list(expected))


def test_a_tensor_changed_after_the_forward_pass_is_refused_and_the_next_call_sees_the_change():
    x, scale = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64, requires_grad=True)

    def product(s, x):
        return (s * x).sin()

    with torch_ref.receipt() as r:
        kept, moved = (call(mode, product, scale, x) for mode in ("checkpoint", "offload"))
        x.mul_(2)
        after = call("offload", product, scale, x)
    assert r.bytes_on_host == 16 + 2 * 16  # the scale once, two values of x
    (gradient,) = torch.autograd.grad(after.sum(), scale)
    assert gradient.tolist() == pytest.approx([2 * math.cos(2)] * 2, rel=1e-15)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*is at version 1; expected version 0"):
        kept.sum().backward()
    with pytest.raises(torch_ref.MutatedTensorError, match="argument of .*product.*at version 1, expected 0.*a clone"):
        moved.sum().backward()


def test_a_block_that_changes_its_input_in_place_cannot_spoil_the_host_copy():
    start = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = call("offload", lambda x: x.mul_(2).sin(), start * 1)
    (gradient,) = torch.autograd.grad(y.sum(), start, retain_graph=True)
    assert gradient[0].item() == pytest.approx(2 * math.cos(2), rel=1e-15)
    assert torch.equal(torch.autograd.grad(y.sum(), start)[0], gradient)


def test_host_copies_go_with_the_graph():
    before = live_copies()
    x = torch.ones(2, requires_grad=True)
    for end in (torch.Tensor.backward, lambda y: None):
        y = call("offload", lambda x: x.exp().sum(), x)
        assert live_copies() == before + 1
        end(y)
        del y
        assert live_copies() == before


RIGHT, FAITHFUL = torch_ref.gradient_checkpoint_forward, torch_ref.faithful.gradient_checkpoint_forward


@pytest.mark.parametrize(
    ("forward", "arguments", "message"),
    [
        (RIGHT, (torch.ones(2), True, False), "model is a Tensor, expected a module or a function"),
        (FAITHFUL, (torch.ones(2), True, False), "model is a Tensor, expected a module or a function"),
        (RIGHT, (torch.exp, torch.ones(2), True), "use_gradient_checkpointing is a Tensor, expected True or False"),
        (RIGHT, (torch.exp, False, "no"), "use_gradient_checkpointing_offload is a str, expected True or False"),
        (torch_ref.mode_flags, ("full",), "mode is 'full', expected one of off, checkpoint, offload"),
    ],
)
def test_wrong_arguments(forward, arguments, message):
    with pytest.raises(torch_ref.InvalidArgumentError, match=message):
        forward(*arguments)


def test_nothing_to_offload_is_an_error():
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(torch_ref.NothingToOffloadError, match=r"no argument of .*<lambda> is a tensor.*Pass the block"):
        call("offload", lambda w, n: w * n, weight, n=3)
    empty = torch.ones(0, 2, requires_grad=True)  # an empty batch is no mistake
    call("offload", torch.exp, empty).sum().backward()


def test_every_error_has_the_base_class_of_the_package():
    errors = {getattr(torch_ref, name) for name in torch_ref.__all__ if name.endswith("Error")}
    assert len(errors) == 9 and all(issubclass(error, torch_ref.TorchRefError) for error in errors)


def test_the_package_imports_neither_jax_nor_remat_jax():
    code = "import sys, torch_ref; print({'jax', 'remat_jax', 'flax', 'deepspeed'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# Captured variables.

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


@pytest.mark.gpu
@pytest.mark.parametrize("mode", torch_ref.MODES)
def test_on_a_gpu(mode):
    torch.manual_seed(6)
    model = pytorch.DecoderStack(4, 64, 4, dropout=0.2).cuda()
    x = torch.randn(8, 128, 64, device="cuda")
    flags = torch_ref.mode_flags(mode)
    gradients(model, model, x)

    def held(**flags):
        before = torch.cuda.memory_allocated()
        y = model(x, **flags)
        return torch.cuda.memory_allocated() - before, y

    plain = gradients(model, model, x)
    assert all_equal(gradients(lambda x: model(x, **flags), model, x), plain)
    with torch_ref.receipt() as r:
        nbytes, _y = held(**flags)
    kept = {"checkpoint": 4, "offload": 1}
    if mode in kept:  # x itself was there before; the last output is the caller's
        assert nbytes == kept[mode] * x.nbytes
    assert r.bytes_on_host == (4 * x.nbytes if mode == "offload" else 0)
    assert r.bytes_released == (3 * x.nbytes if mode == "offload" else 0)


@pytest.mark.parametrize("package", ["torch_ref", "examples.pytorch", "examples.pytorch.faithful"])
def test_every_public_name_has_an_example(package: str) -> None:
    assert undocumented(package) == []
