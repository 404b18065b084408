"""DiffSynth-Studio's own form, with its quirks, beside the correct form."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import Gate, all_equal, gradients
from torch_ref.faithful import gradient_checkpoint_forward as faithful

LEAF = torch.ones(1, requires_grad=True)
# Packed tensors and their bytes for a block of two float32 tensors of shape (2, 3).
PACKED = {
    ("faithful", "positional"): (2, 48),
    ("faithful", "mixed"): (1, 24),
    ("faithful", "keywords"): (0, 0),
    ("right", "positional"): (2, 48),
    ("right", "mixed"): (2, 48),
    ("right", "keywords"): (2, 48),
}


@pytest.mark.parametrize(("form", "given"), PACKED)
def test_what_is_offloaded(form, given):
    torch.manual_seed(0)
    block = Gate()
    x, y = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    forward = faithful if form == "faithful" else torch_ref.gradient_checkpoint_forward
    calls = {
        "positional": lambda x, y: forward(block, True, True, x, y),
        "mixed": lambda x, y: forward(block, False, True, x, y=y),
        "keywords": lambda x, y: forward(block, True, True, x=x, y=y),
    }
    with torch_ref.receipt() as r:
        grads = gradients(calls[given], block, x, y)
    assert (r.tensors_packed, r.bytes_on_host) == PACKED[form, given]
    assert (r.bytes_offered, r.bytes_brought_back) == (48, r.bytes_on_host)
    assert all_equal(grads, gradients(block, block, x, y))


def test_a_shared_tensor_is_copied_once_per_use_and_containers_stay():
    shared = torch.ones(10, requires_grad=True)
    moved = {}
    for name, forward in (("faithful", faithful), ("right", torch_ref.gradient_checkpoint_forward)):
        with torch_ref.receipt() as r:
            _held = [forward(torch.mul, False, True, torch.ones(1), shared) for _ in range(3)]
        moved[name] = (r.tensors_packed, r.bytes_on_host)
    assert moved == {"faithful": (6, 3 * 44), "right": (6, 3 * 4 + 40)}
    with torch_ref.receipt() as r:
        faithful(lambda x, y, held: (x * y * held[0]).sin(), True, True, shared, shared, [torch.ones(1)])
    assert (r.calls[0].tensors_offered, r.bytes_offered, r.tensors_packed, r.bytes_on_host) == (2, 44, 2, 80)


def test_keywords_that_the_checkpoint_knows_never_reach_the_block():
    received: list[dict] = []

    def block(x, **options):
        received.append(options)
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    faithful(block, True, False, x, debug=False, early_stop=True, determinism_check="none")
    assert received == [{}]
    for name in ("function", "use_reentrant"):
        with pytest.raises(TypeError, match=f"multiple values for (keyword )?argument '{name}'"):
            faithful(block, True, False, x, **{name: 1})


@pytest.fixture
def deepspeed(monkeypatch):
    calls: list[tuple] = []

    def run(function, *args):
        calls.append(args)
        return function(*args)

    stub = SimpleNamespace(checkpointing=SimpleNamespace(is_configured=lambda: stub.configured, checkpoint=run))
    stub.configured, stub.calls = True, calls
    monkeypatch.setitem(sys.modules, "deepspeed", stub)
    return stub


def test_deepspeed_loses_keyword_names_and_the_offload(deepspeed):
    def subtract(first, second):
        return first - second

    one, two = torch.ones(1, requires_grad=True), torch.full((1,), 2.0)
    with torch_ref.receipt() as r:
        y = faithful(subtract, True, True, second=two, first=one)
    assert y.item() == 1.0  # 2 - 1: names are lost, only the order counts
    assert len(deepspeed.calls) == 1
    assert r.bytes_on_host == 0
    assert len(r.warnings) == 1 and "DeepSpeed's checkpointing is configured, so the offload flag was ignored" in r.warnings[0]


@pytest.mark.parametrize(
    ("flags", "configured", "x", "used"),
    [
        ((1, None), True, LEAF, 1),
        (("yes", None), True, LEAF, 1),
        ((True, False), True, [LEAF], 0),  # no gradient at the top level
        ((False, True), True, LEAF, 0),
        ((False, False), True, LEAF, 0),
        ((True, False), False, LEAF, 0),
    ],
)
def test_when_deepspeed_is_used(deepspeed, flags, configured, x, used):
    deepspeed.configured = configured
    faithful(lambda x: (x[0] if isinstance(x, list) else x).sin(), *flags, x)
    assert len(deepspeed.calls) == used


# A value for either flag, and whether DiffSynth-Studio, which only tests its truth, takes it for True.
TRUTH = [(1, True), (0, False), (None, False), ("yes", True), (torch.tensor(1), True), ([], False)]


@pytest.mark.parametrize(("flag", "truth"), TRUTH, ids=[repr(flag) for flag, _ in TRUTH])
def test_flags_are_taken_by_their_truth_here_alone(flag, truth):
    x = torch.ones(2, 3, requires_grad=True)
    for given, meant in (((flag, False), (truth, False)), ((False, flag), (False, truth)), ((flag, flag), (truth, truth))):
        block = pytorch.ToyModel()
        with torch_ref.count_calls(block) as calls, torch_ref.receipt() as r:
            faithful(block, *given, x).sum().backward()
        assert (calls.total, r.calls[0].mode) == (2 if any(meant) else 1, torch_ref.modes.mode_of(*meant))
        assert (r.bytes_on_host > 0) == meant[1]
        with pytest.raises(torch_ref.InvalidArgumentError, match="expected True or False"):
            torch_ref.gradient_checkpoint_forward(block, *given, x)
