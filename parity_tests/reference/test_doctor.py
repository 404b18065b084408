"""Every trap is planted and found, its remedy removes it, and correct models have none."""

from __future__ import annotations

import cProfile
import functools
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torch_ref
from examples import pytorch

X, W = torch.ones(2, 4), nn.Parameter(torch.ones(4))


def keep(function, *args, **kwargs):
    return checkpoint(function, *args, **{"use_reentrant": False} | kwargs)


class Stack(nn.Module):
    """Layers that `run(layer, x)` calls."""

    def __init__(self, run, count=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.run = run

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return x


class LateBound(Stack):
    def forward(self, x):
        for layer in self.layers:
            x = keep(lambda x: layer(x), x)  # noqa: B023
        return x


class BoundNow(Stack):
    def forward(self, x):
        for layer in self.layers:
            x = keep(lambda x, layer=layer: layer(x), x)
        return x


class Nested(Stack):
    """One checkpoint around all layers, and one around each layer."""

    def forward(self, x):
        return keep(super().forward, x)


class Flagged(Stack):
    """Has the flag of Hugging Face's models."""

    reads = False

    def __init__(self):
        super().__init__(lambda layer, x: layer(x))
        self.gradient_checkpointing = True

    def forward(self, x):
        if self.reads and self.gradient_checkpointing and self.training:
            return Stack.forward(self, keep(torch.sin, x))
        return Stack.forward(self, x)


class FlaggedAndRead(Flagged):
    reads = True


def first_of(layer):
    return lambda xs: layer(xs[0])


def offloaded(layer, x):
    with save_on_cpu():
        return keep(layer, x)


def offloaded_by_keyword(layer, x):
    with save_on_cpu():
        return keep(layer, input=x)


def in_place(x):
    return x.mul_(2).sin()


def changed_later(x):
    h = x * W
    y = keep(torch.sin, h)
    return y + h.add_(1)


PLANTED = [
    (
        "hidden_from_offload",
        lambda: Stack(offloaded_by_keyword),
        r"layers.0 \(Linear\) at .*_doctor.py:\d+ \(keep\), from .*\(offloaded_by_keyword\): 1 .*32 bytes \(keyword 'input' \[",
        lambda: Stack(offloaded),
    ),
    (
        "hidden_from_offload",
        lambda: Stack(lambda layer, x: torch_ref.faithful.gradient_checkpoint_forward(layer, True, True, input=x)),
        r"layers.0 \(Linear\) at \S*test_doctor.py:\d+ .*stay on the device.*use torch_ref.gradient_checkpoint_forward, which",
        lambda: Stack(lambda layer, x: torch_ref.gradient_checkpoint_forward(layer, True, True, input=x)),
    ),
    (
        "flag_without_effect",
        Flagged,
        r"the model \(Flagged\): gradient_checkpointing is set, but nothing read it.*put the policy on them from outside",
        FlaggedAndRead,
    ),
    (
        "rebound_variable",
        lambda: LateBound(None),
        r"layers.\d \(Linear\) at .*\(keep\), from .*\(forward\).*the variable 'layer', which was rebound.*layer=layer",
        lambda: BoundNow(None),
    ),
    (
        "nested_container",
        lambda: Nested(lambda layer, x: keep(lambda xs, layer=layer: layer(xs[0]), [x])),
        r"layers.0 \(Linear\).*1 tensor.*32 bytes \(argument 0\[0\] \[2, 4\]\), alive.*torch_ref.gradient_checkpoint_forward",
        lambda: Nested(lambda layer, x: torch_ref.gradient_checkpoint_forward(first_of(layer), True, False, [x])),
    ),
    (
        "mutated_input",
        lambda: lambda x: keep(in_place, x * W),
        r"in_place at .*1 tensor\(s\), 32 bytes \(argument 0 \[2, 4\]\), were changed in place by the block itself.*a clone",
        lambda: lambda x: keep(lambda x: in_place(x.clone()), x * W),
    ),
    (
        "mutated_input",
        lambda: changed_later,
        r"changed in place after the call: the recomputation would start from other values\. Make the change out of place",
        lambda: lambda x: keep(torch.sin, x * W) + (x * W).add(1),
    ),
    (
        "reentrant_without_gradient",
        lambda: Stack(lambda layer, x: checkpoint(layer, x, use_reentrant=True), count=1),
        r"layers.0 \(Linear\).*the parameters inside get no gradient\. Use use_reentrant=False",
        lambda: Stack(keep, count=1),
    ),
    (
        "random_state",
        lambda: Stack(lambda layer, x: keep(lambda x: torch.dropout(layer(x), 0.5, True), x, preserve_rng_state=False)),
        r"preserve_rng_state=False: the recomputation draws another mask\. Leave preserve_rng_state at its default",
        lambda: Stack(lambda layer, x: keep(lambda x: torch.dropout(layer(x), 0.5, True), x)),
    ),
]


@pytest.mark.parametrize(("trap", "wrong", "message", "cured"), PLANTED, ids=[f"{k}-{p[0]}" for k, p in enumerate(PLANTED)])
def test_a_planted_trap_is_found_and_its_remedy_makes_it_go_away(trap, wrong, message, cured):
    diagnosis = torch_ref.doctor(wrong(), X)
    assert {finding.trap for finding in diagnosis.findings} == {trap}
    assert not diagnosis.ok
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(str(diagnosis))
    healthy = torch_ref.doctor(cured(), X)
    assert healthy.ok, str(healthy)
    assert healthy.regions >= 1


def images():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d())


def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


ONES = torch.ones(2, 3, 8)
CHECKPOINTED, OFFLOADED = {"use_gradient_checkpointing": True}, {"use_gradient_checkpointing_offload": True}
JOINT = (torch.ones(2, 5, 48), torch.ones(2, 4, 8))
# The number of checkpointed regions, the model, its arguments and keywords.
CLEAN = {
    "toy": (0, pytorch.ToyModel, (X.clone().requires_grad_(),)),
    "decoder, checkpoint": (2, lambda: pytorch.DecoderStack(2, 8, 2, dropout=0.5), (ONES,), CHECKPOINTED),
    "joint, offload": (2, lambda: pytorch.JointDecoder(2), JOINT, OFFLOADED),
    "sequential": (1, lambda: functools.partial(checkpoint_sequential, Stack(None).layers, 2, use_reentrant=False), (X,)),
    "reentrant": (3, lambda: Stack(reentrant), (X.clone().requires_grad_(),)),
    "frozen, reentrant": (3, lambda: Stack(reentrant).requires_grad_(False), (X,)),
    "save_on_cpu": (3, lambda: Stack(offloaded), (X,)),
    "keywords after an offload": (6, lambda: Stack(lambda layer, x: keep(layer, input=offloaded(layer, x))), (X,)),
    "offload function": (3, lambda: Stack(lambda layer, x: torch_ref.OffloadFunction(layer)(input=x)), (X,)),
    "images": (
        1,
        lambda: functools.partial(torch_ref.gradient_checkpoint_forward, images(), True, False),
        (torch.ones(2, 3, 5, 5),),
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_models_that_are_right(name):
    regions, make, args, *kwargs = CLEAN[name]
    diagnosis = torch_ref.doctor(make(), *args, **dict(*kwargs))
    assert diagnosis.ok, str(diagnosis)
    assert diagnosis.regions == regions


def test_flags_of_a_model_in_evaluation_mode_and_of_the_call():
    diagnosis = torch_ref.doctor(FlaggedAndRead().eval(), X)
    assert "evaluation mode, where nothing is checkpointed. Call train() on the model first." in str(diagnosis)

    class Deaf(Stack):
        def forward(self, x, use_gradient_checkpointing=False):
            return super().forward(x)

    diagnosis = torch_ref.doctor(Deaf(lambda layer, x: layer(x)), X, use_gradient_checkpointing=True)
    assert [f.block for f in diagnosis.findings] == ["the call"] and "no checkpoint was made in this call" in str(diagnosis)


def test_the_model_is_left_as_it_was():
    model = Flagged()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_ref.doctor(model, X)
    assert type(model) is Flagged and not model._forward_hooks and model.gradient_checkpointing is True
    with pytest.raises(ZeroDivisionError):
        torch_ref.doctor(Stack(lambda layer, x: 1 / 0), X)
    with pytest.raises(torch_ref.InvalidArgumentError, match="module is a Tensor, expected a module or a function"):
        torch_ref.doctor(X)


class ByType(nn.Module):
    """Reads its own class, and attributes in its own way."""

    def __init__(self):
        super().__init__()
        self.gradient_checkpointing = True
        self.linear = nn.Linear(4, 4)

    def __getattribute__(self, name):
        return self.linear if name == "layer" else super().__getattribute__(name)

    def forward(self, x):
        assert type(self) is ByType
        return keep(self.layer, x) if self.gradient_checkpointing else self.layer(x)


def test_a_model_sees_its_own_class_and_its_own_attributes():
    before = ByType.__getattribute__
    assert torch_ref.doctor(ByType(), X).ok
    assert ByType.__getattribute__ is before


def test_fused_attention_without_dropout_is_not_random():
    q = torch.ones(1, 2, 3, 4, requires_grad=True)

    def attend(dropout):
        def call(q):
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout)

        return torch_ref.doctor(lambda q: keep(call, q, preserve_rng_state=False), q)

    assert attend(0.0).ok
    assert [finding.trap for finding in attend(0.5).findings] == ["random_state"]


def test_a_reentrant_checkpoint_of_a_global_module_or_an_object_is_seen():
    class Caller:
        def __init__(self):
            self.layer = nn.Linear(4, 4)

        def __call__(self, x):
            return self.layer(x)

    for function in (Caller(), Caller().__call__, lambda x: GLOBAL(x)):
        diagnosis = torch_ref.doctor(lambda x, f=function: checkpoint(f, x, use_reentrant=True), X)
        assert [finding.trap for finding in diagnosis.findings] == ["reentrant_without_gradient"]


GLOBAL = nn.Linear(4, 4)


def test_a_profiler_in_c_is_named():
    if sys.version_info >= (3, 12):  # there they have their own hook in the interpreter
        return
    with cProfile.Profile(), pytest.raises(torch_ref.InvalidArgumentError, match="Call doctor outside cProfile"):
        torch_ref.doctor(nn.Linear(4, 4), X)
