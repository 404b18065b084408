"""One block under a policy: gradients, executions, names, receipts."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import all_equal, gradients
from parity_tests.test_selective import TABLE
from torch_ref import selective_checkpoint
from torch_ref.host import live_host_copies
from torch_ref.selective import run_under

B, T, D, H = 2, 16, 16, 4
# One array of the layer's width, in elements. The scores are H·T / D of them, as many as in the other test's table.
S = B * T * D
SCORES = S * H * T // D


def layer(**options: Any) -> tuple[pytorch.DecoderLayer, torch.Tensor]:
    torch.manual_seed(0)
    return pytorch.DecoderLayer(D, H, **options).double(), torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)


def names(block: Callable[..., Any], *args: Any, policy: str = "save: *", path: str = "", **kwargs: Any) -> list[str]:
    _, seen = run_under(block, block, torch_ref.Policy.parse(policy), path, args, kwargs)
    return [candidate.name for candidate in seen.candidates]


@pytest.mark.parametrize("policy", TABLE)
def test_what_is_kept_and_what_runs_again_in_closed_form_and_gradients_are_those_of_a_plain_call(policy):
    block, x = layer(dropout=0.4)
    plain = gradients(block, block, x, seed=3)
    assert all_equal(gradients(functools.partial(selective_checkpoint, block, policy), block, x, seed=3), plain)
    block, x = layer()
    device, host, again = TABLE[policy]
    saved = torch_ref.saved_for_backward(lambda x: selective_checkpoint(block, policy, x=x), x)
    assert (saved.device_bytes + saved.input_bytes, saved.host_bytes) == (device * S * 8, host * S * 8)
    with torch_ref.count_matmuls() as count, torch_ref.receipt() as r:
        selective_checkpoint(block, policy, x=x).sum().backward()
    assert count.total == 18 + again
    assert (r.bytes_offered, r.bytes_on_host, r.bytes_brought_back) == (host * S * 8,) * 3


def test_names_are_paths_and_primitives_and_count_from_zero():
    block, x = layer()
    block_names = names(block, x, path="decoder/layers/0")
    assert block_names[0] == "decoder/layers/0:input#0"
    inside = [name.removeprefix("decoder/layers/0").lstrip("/") for name in block_names]
    assert [name for name in inside if "dot_general" in name] == [
        "self_attn:dot_general#0",
        "self_attn:dot_general#1",
        "self_attn:dot_general#2",
        "self_attn/out_proj:dot_general#0",
        "ffn/0:dot_general#0",
        "ffn/2:dot_general#0",
    ]
    for name in (":add#0", ":add#1", "norm1:native_layer_norm#0", "ffn/1:relu#0", "self_attn:_softmax#0"):
        assert name in inside
    # Views and the mask, which is a constant, have no names.
    assert not [name for name in inside if any(part in name for part in ("view", "transpose", "split", "full", "slice", ":t#"))]


def test_the_table_of_primitives_on_real_operators():
    conv = nn.Conv2d(2, 3, 3)

    def block(x, w):
        y = conv(x).sigmoid().exp().tanh().flatten(1)
        return torch.where(y > 0, torch.baddbmm(y[None], (y @ w)[None], w.t()[None]).sum(0), y.amax()) @ y[0]

    named = names(block, torch.randn(2, 2, 4, 4), torch.randn(12, 5))
    expected = "input input conv_general_dilated logistic exp tanh gt dot_general dot_general reduce_sum reduce_max select_n"
    assert [name.rpartition(":")[2].partition("#")[0] for name in named] == [*expected.split(), "dot_general"]
    assert named[2] == "Conv2d:conv_general_dilated#0"


@pytest.mark.parametrize(("selector", "elements"), [("@dots", 96 + 16), ("@dots_with_no_batch_dims", 16)])
def test_convolutions_are_dots_and_have_no_say_in_the_other_kind(selector, elements):
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(3 * 8, 4))
    x = torch.randn(4, 2, 10)
    saved = torch_ref.saved_for_backward(lambda x: selective_checkpoint(net, f"save: {selector}", x), x)
    assert saved.device_bytes == elements * 4


def test_names_in_functions_methods_and_captured_modules():
    block, x = layer()
    assert "ffn/0:dot_general#0" in names(block.forward, x)
    captured = names(lambda x: block.ffn(x).sin(), x)
    assert captured == [":input#0", "Sequential/0:dot_general#0", "Sequential/1:relu#0", "Sequential/2:dot_general#0", ":sin#0"]


def test_an_exception_leaves_its_module_and_no_hook():
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    fails = Fails()

    def block(x):
        try:
            fails(x)
        except ZeroDivisionError:
            return x.sin()

    assert names(block, torch.ones(2)) == [":input#0", ":sin#0"]
    with pytest.raises(ZeroDivisionError):
        selective_checkpoint(fails, "dots", torch.ones(2))
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks


def test_inputs_are_numbered_with_keywords_in_order_and_moved_one_by_one():
    a, b, c = (torch.randn(n, requires_grad=True) for n in (2, 3, 5))
    weight = nn.Parameter(torch.ones(1))

    def block(first, *, z, y, weight):
        return (first["x"].sum() * z * weight).sum() * y.sum()

    call = functools.partial(selective_checkpoint, block)
    with torch_ref.receipt() as r:
        call("offload: *:input#1", {"x": a}, z=c, y=b, weight=weight).backward()
    assert (r.bytes_on_host, r.bytes_brought_back) == (12, 12)
    with pytest.raises(torch_ref.NoEffectError, match="':input#3' matches no array"):
        call("offload: :input#3", {"x": a}, z=c, y=b, weight=weight)


def test_off_and_no_grad_are_plain_calls_and_the_receipt_says_the_mode():
    block, x = layer()
    with torch_ref.receipt() as r:
        selective_checkpoint(block, "off", x)
        selective_checkpoint(block, "dots_saveable", x)
        selective_checkpoint(block, "offload:  @dots ; save: *relu*;", x)
        with torch.no_grad():
            selective_checkpoint(block, "offload", x)
    assert [(entry.block, entry.mode, entry.form) for entry in r.calls] == [
        ("DecoderLayer", "off", "selective"),
        ("DecoderLayer", "dots", "selective"),
        ("DecoderLayer", "offload: @dots; save: *relu*", "selective"),
        ("DecoderLayer", "offload_inputs", "selective"),
    ]
    assert r.warnings[0] == "DecoderLayer: called with gradients disabled, so mode 'offload_inputs' had nothing to keep."
    assert r.calls[2].tensors_packed == 6 and r.calls[2].bytes_on_host == (10 * S + SCORES) * 8


def test_the_device_gives_back_what_is_offloaded():
    block, x = layer()
    with torch_ref.receipt() as r:
        output = selective_checkpoint(block, "offload: *", x)
        assert r.bytes_released == r.bytes_on_host - x.nbytes - output.nbytes  # the caller has these


def test_memory_comes_back_without_the_garbage_collector():
    block, x = layer()
    gc.collect()
    gc.disable()
    try:
        before = len(live_host_copies())
        output = selective_checkpoint(block, "offload: @dots; save: *", x)
        assert len(live_host_copies()) == before + 6
        output.sum().backward()
        del output
        assert len(live_host_copies()) == before
        output = selective_checkpoint(block, "offload: *", x)
        del output
        assert len(live_host_copies()) == before
    finally:
        gc.enable()


def test_backward_on_another_thread():
    block, x = layer()
    expected, grads = gradients(block, block, x), []
    output = selective_checkpoint(block, "save: *self_attn*:dot_general*; offload: *ffn*", x)
    thread = threading.Thread(target=lambda: grads.extend(gradients(lambda x: output, block, x)))
    thread.start()
    thread.join()
    assert all_equal(grads, expected)


@pytest.mark.gpu
def test_on_a_gpu_gradients_agree_and_the_device_gives_back_what_is_moved():
    """On a GPU autograd recomputes on its own thread; the copies are pinned and run beside the computation."""
    block, x = layer(dropout=0.4)
    block, x = block.cuda(), x.detach().cuda().requires_grad_()
    for policy in [*TABLE, "everything", "offload: *"]:
        expected = gradients(block, block, x, seed=3)
        with torch_ref.receipt() as r:
            grads = gradients(functools.partial(selective_checkpoint, block, policy), block, x, seed=3)
        for gradient, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
        assert r.bytes_on_host == r.bytes_brought_back and (r.bytes_on_host > 0) is ("offload" in policy)


@pytest.mark.parametrize(
    ("policy", "error", "says"),
    [
        ("save: *self_atn*:dot*", "NoEffectError", "matches no array of DecoderLayer. Did you mean 'self_attn:dot_general"),
        ("save: @dots; recompute: nothing", "NoEffectError", "the selector 'nothing' matches no array"),
        ("save: *transpose*", "NoEffectError", "Views, changes in place and constants have no names"),
        ("save: @primitive:full", "NoEffectError", "Views, changes in place and constants have no names"),
        (None, "PolicyError", "policy is None, of type NoneType"),
        ("recompute: @dots; offload: @primitive:dot_general", "NothingToOffloadError", "offloads nothing in DecoderLayer"),
    ],
)
def test_a_policy_without_effect_is_refused(policy, error, says):
    block, x = layer()
    with pytest.raises(getattr(torch_ref, error), match=says):
        selective_checkpoint(block, policy, x)
    with pytest.raises(torch_ref.InvalidArgumentError, match="block is a Tensor, expected a module or a function"):
        selective_checkpoint(torch.ones(2), policy)


def test_scalars_are_kept_and_nothing_else_to_move_is_an_error():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(torch_ref.NothingToOffloadError, match="scalars and random numbers are not offloaded"):
        selective_checkpoint(lambda x: x.sum().exp(), "offload: *sum*, *exp*", x)
    with torch_ref.receipt() as r:
        selective_checkpoint(lambda x: x.sum().exp() * x.sin(), "offload: *:*", x).sum().backward()
    # The argument, the sine and the product.
    assert (r.bytes_on_host, r.tensors_packed) == (36, 3)
    with torch_ref.receipt() as r:
        selective_checkpoint(lambda x, scale: x * scale, "offload: @inputs", x, torch.tensor(2.0)).sum().backward()
    assert r.bytes_on_host == 12
    assert selective_checkpoint(lambda x: x.sin(), "offload: *sin*", x[:0]).shape == (0,)
    assert selective_checkpoint(lambda x: x.sin(), "offload: @inputs", x[:0]).shape == (0,)
