"""OpenPI's switch: the original's behaviour in numbers, and the correct form of each part."""

from __future__ import annotations

import copy
import logging
import weakref

import pytest
import torch
from torch import nn

import torch_ref
from examples import pytorch
from examples.pytorch import faithful
from parity_tests.reference.blocks import all_equal

LAYERS = 6
PATCHES, ACTIONS = (2, 5, 48), (2, 4, 8)


def decoder() -> pytorch.JointDecoder:
    torch.manual_seed(0)
    return pytorch.JointDecoder(LAYERS).double()


def inputs():
    torch.manual_seed(1)
    return [torch.randn(*shape, dtype=torch.float64) for shape in (PATCHES, ACTIONS)]


def openpi(model, *, enable=True, disable=False):
    outer = faithful.Pi0(model)
    if enable:
        outer.gradient_checkpointing_enable()
    if disable:
        outer.gradient_checkpointing_disable()
    return outer


def run(model, layers):
    """The number of layer outputs alive between the passes, each layer's executions, and the gradients."""
    references = []

    def remember(layer, args, output):
        if len(references) < 2 * LAYERS:
            references.extend(weakref.ref(y) for y in output)

    hooks = [layer.register_forward_hook(remember) for layer in layers]
    with torch_ref.count_calls(*layers) as calls:
        y = model(*inputs())
        alive = sum(reference() is not None for reference in references)
        gradients = torch.autograd.grad(y.square().sum(), list(layers.parameters()), materialize_grads=True)
    for hook in hooks:
        hook.remove()
    return alive, [calls.per_module[layer] for layer in layers], list(gradients)


def test_openpi_pays_for_two_checkpoints_and_frees_as_if_there_were_one():
    """12 outputs: 6 layers of two streams. The inner checkpoints get a list, whose tensors stay alive in its closure."""
    model = decoder()
    # Its final norms, also checkpointed with a list, hold the outputs of the last layer too.
    assert run(openpi(model), model.layers)[:2] == (12, [3, 3, 3, 3, 3, 2])
    # The correct form: one checkpoint per layer keeps the same and executes each layer twice.
    checkpointed = run(lambda p, a: model(p, a, use_gradient_checkpointing=True), model.layers)
    assert checkpointed[:2] == (11, [2] * LAYERS)
    plain = run(model, model.layers)
    assert plain[1] == run(model.eval(), model.layers)[1] == [1] * LAYERS
    assert all_equal(run(openpi(model.train()), model.layers)[2], plain[2]) and all_equal(checkpointed[2], plain[2])


def test_disabling_does_not_disable(caplog):
    model = decoder()
    with caplog.at_level(logging.INFO):
        outer = openpi(model, disable=True)
        assert run(outer, model.layers)[1] == [2] * LAYERS  # the layers are still checkpointed, the outer model is not
    assert outer.transformer.expert.gradient_checkpointing and not outer.gradient_checkpointing_enabled
    assert "Forcing gradient checkpointing to be enabled for Gemma expert model" in caplog.messages
    # In the original, checkpoints run even if they were never enabled.
    assert run(openpi(model, enable=False), model.layers)[1] == [2] * LAYERS


def test_the_training_script_goes_on_without():
    assert faithful.prepare_for_training(faithful.Pi0(decoder()))
    assert not faithful.prepare_for_training(nn.Linear(2, 2))
    with pytest.raises(torch_ref.InvalidArgumentError, match=r"Linear without blocks.*Pass blocks=SomeClass.*of Linear"):
        torch_ref.gradient_checkpointing_enable(nn.Linear(2, 2))


def test_the_switch():
    model = pytorch.ByteDecoder(d_model=8, nhead=2, num_layers=3)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    names = list(model.state_dict())
    assert not torch_ref.is_gradient_checkpointing(model)
    applied = torch_ref.gradient_checkpointing_enable(model, "dots")
    assert list(applied.blocks) == [f"decoder/layers/{k}" for k in range(3)] and list(model.state_dict()) == names

    def executed():
        with torch_ref.count_matmuls() as count, torch_ref.count_calls(*model.decoder.layers) as calls:
            model(tokens).sum().backward()
        return count.total, calls.total

    assert executed() == (18 * 3 + 3, 6)
    torch_ref.gradient_checkpointing_enable(model)  # set anew, not twice
    assert executed() == (24 * 3 + 3, 6) and torch_ref.is_gradient_checkpointing(model)
    torch_ref.gradient_checkpointing_disable(model)
    torch_ref.gradient_checkpointing_disable(model)
    assert executed() == (18 * 3 + 3, 3) and not torch_ref.is_gradient_checkpointing(model)
    chosen = torch_ref.gradient_checkpointing_enable(model, blocks=nn.LayerNorm)
    assert len(chosen.blocks) == 6
    with pytest.raises(torch_ref.PolicyError, match="nothing"):
        torch_ref.gradient_checkpointing_enable(model, "nothing")
    assert torch_ref.is_gradient_checkpointing(model)  # a malformed policy changes nothing
    with pytest.raises(torch_ref.InvalidArgumentError, match="model is a int, expected a module"):
        torch_ref.gradient_checkpointing_disable(3)


class Leafy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).sin()


class Headed(nn.Module):
    """Blocks that contain a layer of the class of their heads."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Leafy() for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return sum(head(x) for head in self.heads)


def executed(model):
    with torch_ref.count_calls(*(layer.inner for layer in model.layers)) as calls:
        model(torch.ones(2, 4)).sum().backward()
    return calls.total


def test_only_the_modules_of_the_lists_are_switched_and_nothing_is_nested():
    model = Headed()
    applied = torch_ref.gradient_checkpointing_enable(model)
    assert sorted(applied.blocks) == ["heads/0", "heads/1", "layers/0", "layers/1"]
    assert executed(model) == 4
    with pytest.raises(torch_ref.NoEffectError, match="Conv2d"):
        torch_ref.gradient_checkpointing_enable(model, blocks=nn.Conv2d)
    assert torch_ref.is_gradient_checkpointing(model) and executed(model) == 4


def test_switching_a_copy_off_leaves_the_model_on():
    model = Headed()
    torch_ref.gradient_checkpointing_enable(model)
    reference = copy.deepcopy(model)
    assert executed(model) == executed(reference) == 4
    torch_ref.gradient_checkpointing_disable(reference)
    assert (executed(model), executed(reference)) == (4, 2)
    assert torch_ref.is_gradient_checkpointing(model) and not torch_ref.is_gradient_checkpointing(reference)
    assert not torch_ref.is_gradient_checkpointing("model")
