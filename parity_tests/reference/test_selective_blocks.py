"""`checkpoint_blocks`: policies on a finished model, applied and removed from outside."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ref
from examples.pytorch import ByteDecoder, DecoderLayer, DecoderStack, ExplicitMultiheadAttention
from parity_tests.reference.blocks import all_equal, gradients
from torch_ref import NoEffectError, checkpoint_blocks

LAYERS = 3


def stack(**options: Any) -> tuple[DecoderStack, torch.Tensor]:
    torch.manual_seed(0)
    model = DecoderStack(LAYERS, 8, 2, **options).double()
    return model, torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)


def products(model: nn.Module, *inputs: torch.Tensor) -> int:
    with torch_ref.count_matmuls() as count:
        model(*inputs).sum().backward()
    return count.total


PLAIN = 18 * LAYERS


def test_the_model_stays_what_it_is():
    model, x = stack(dropout=0.3)
    state, classes = list(model.state_dict()), [type(module).__name__ for module in model.modules()]
    signature, plain = inspect.signature(model.layers[0].forward), gradients(model, model, x)
    with checkpoint_blocks(model, {DecoderLayer: "offload: *ffn*:dot_general*; save: @dots"}) as applied:
        assert list(model.state_dict()) == state and [type(module).__name__ for module in model.modules()] == classes
        assert inspect.signature(model.layers[0].forward) == signature
        assert model.load_state_dict(model.state_dict()).missing_keys == []
        assert all_equal(gradients(model, model, x), plain)
        assert products(model, x) == PLAIN
        assert list(applied.blocks) == ["layers/0", "layers/1", "layers/2"]
        assert str(applied.blocks["layers/1"]) == "offload: *ffn*:dot_general*; save: @dots"
    assert "forward" not in vars(model.layers[0]) and not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize(("policy", "again"), [("full", 6), ("save: *self_attn*:dot_general*", 2), ("dots", 0), ("off", 0)])
def test_policies_hold_until_they_are_removed(policy, again):
    model, x = stack()
    applied = checkpoint_blocks(model, {DecoderLayer: policy})
    assert [products(model, x) for _ in range(2)] == [PLAIN + again * LAYERS] * 2
    applied.remove()
    applied.remove()
    assert products(model, x) == PLAIN


def test_names_are_led_by_the_path_in_the_model():
    torch.manual_seed(0)
    model = ByteDecoder(d_model=8, nhead=2, num_layers=LAYERS, max_len=6)
    tokens = torch.zeros(2, 6, dtype=torch.long)
    with checkpoint_blocks(model, {DecoderLayer: "save: decoder/layers/1/self_attn:dot_general#0"}):
        saved = torch_ref.saved_for_backward(model.loss, tokens, tokens)
        assert [entry.shape for entry in saved.entries if entry.operator.startswith("aten.mm")] == [(12, 24)]
        assert products(model, tokens) == PLAIN + 3 + 6 * LAYERS - 1
    with checkpoint_blocks(model, {DecoderLayer: "offload: decoder/layers/2/*:dot*; save: decoder/layers/0/*:dot*"}):
        assert products(model, tokens) == PLAIN + 3 + 6
    with checkpoint_blocks(model, {DecoderLayer: "save: decoder/layers/9/*"}):
        with pytest.raises(NoEffectError, match=r"no array of decoder/layers/0, decoder/layers/1, decoder/layers/2\."):
            model(tokens)


def test_in_evaluation_and_without_gradients_blocks_are_called_plainly():
    model, x = stack()
    with checkpoint_blocks(model, {DecoderLayer: "full"}), torch_ref.receipt() as r:
        assert products(model.eval(), x) == PLAIN
        with torch.no_grad():
            model.train()(x)
        model.layers[1].eval()
        assert products(model, x) == PLAIN + 6 * (LAYERS - 1)
    assert [(entry.block, entry.mode) for entry in r.calls if entry.form == "selective"] == [("DecoderLayer", "full")] * 2


def test_several_classes_and_blocks_inside_blocks():
    model, x = stack()
    plain = gradients(model, model, x)
    with checkpoint_blocks(model, {ExplicitMultiheadAttention: "dots", nn.Sequential: "full"}):
        assert all_equal(gradients(model, model, x), plain)
        # The second product of the feed-forward network is its output: backward does not need it.
        assert products(model, x) == PLAIN + LAYERS
    with checkpoint_blocks(model, {DecoderLayer: "full", nn.Sequential: "dots"}):
        assert all_equal(gradients(model, model, x), plain)
    with checkpoint_blocks(model, {nn.Linear: "save: *layers/0/ffn/0*", nn.Module: "full"}) as applied:
        assert applied.blocks["layers/0/ffn/0"].rules
        assert applied.blocks[""].name == applied.blocks["layers/0/ffn"].name == "full"
        assert all_equal(gradients(model, model, x), plain)


def test_a_copy_is_under_the_policies_until_they_are_removed():
    model, x = stack()
    applied = checkpoint_blocks(model, {DecoderLayer: "full"})
    copied = copy.deepcopy(model)
    nn.init.ones_(copied.layers[0].norm1.bias)
    assert products(copied, x) == PLAIN + 6 * LAYERS
    changed = gradients(copied, copied, x)
    assert not all_equal(changed, gradients(model, model, x))
    applied.remove()
    assert products(copied, x) == products(model, x) == PLAIN
    assert all_equal(gradients(copied, copied, x), changed)
    with checkpoint_blocks(copied, {DecoderLayer: "dots"}):
        assert all_equal(gradients(copied, copied, x), changed)
    again = pickle.loads(pickle.dumps(checkpoint_blocks(model, {DecoderLayer: "full"})))
    assert list(again.blocks) == ["layers/0", "layers/1", "layers/2"]


def test_a_forward_that_something_else_replaced_is_called_and_put_back():
    model, x = stack()
    layer, calls = model.layers[0], []

    def replaced(x):
        calls.append(1)
        return DecoderLayer.forward(layer, x)

    layer.forward = replaced
    with checkpoint_blocks(model, {DecoderLayer: "full"}):
        assert products(model, x) == PLAIN + 6 * LAYERS
    assert len(calls) == 2 and layer.forward is replaced


def test_a_second_policy_on_the_same_block_is_refused_and_leaves_the_first():
    model, x = stack()
    with checkpoint_blocks(model, {DecoderLayer: "dots"}):
        for policies in ({DecoderLayer: "full"}, {nn.ModuleList: "full", DecoderLayer: "full"}):
            with pytest.raises(torch_ref.InvalidArgumentError, match="a policy on its module 'layers/0': 'save: @dots'"):
                checkpoint_blocks(model, policies)
        assert products(model, x) == PLAIN
        assert "forward" not in vars(model.layers)


@pytest.mark.parametrize(
    ("policies", "error", "says"),
    [
        ({ByteDecoder: "full"}, "NoEffectError", "ByteDecoder, .* no module in the model, a DecoderStack; .*DecoderLayer"),
        ({nn.Module: "full", nn.Linear: "dots"}, "NoEffectError", "Linear, but classes listed before it match all"),
        ({}, "InvalidArgumentError", "expected a mapping .* with at least one entry"),
        (None, "InvalidArgumentError", "policies is None"),
        ({"layers_*": "full"}, "InvalidArgumentError", "policies has the key 'layers_\\*', expected a class"),
        ({DecoderLayer: "fill"}, "PolicyError", "policies\\[DecoderLayer\\] is 'fill'"),
        ({DecoderLayer: None}, "PolicyError", "policies\\[DecoderLayer\\] is None"),
    ],
)
def test_wrong_use_is_refused_at_once(policies, error, says):
    model, _ = stack()
    with pytest.raises(getattr(torch_ref, error), match=says):
        checkpoint_blocks(model, policies)
    with pytest.raises(torch_ref.InvalidArgumentError, match="model is a function, expected a module"):
        checkpoint_blocks(lambda x: x, policies)
    assert not model._forward_hooks and "forward" not in vars(model.layers[0])


class Detour(nn.Module):
    """Has a block that it never calls, and one whose parts it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), DecoderLayer(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize(
    ("block", "policy", "error", "says"),
    [
        (DecoderLayer, "full", NoEffectError, "no block of this class was called"),
        (nn.Linear, "offload: @primitive:sin, @dots; recompute: *", NoEffectError, "'@primitive:sin' matches no array of used"),
        (nn.Linear, "recompute: @dots; offload: *:dot*", torch_ref.NothingToOffloadError, "offloads nothing in used"),
    ],
)
def test_a_policy_without_effect_is_refused_when_the_model_has_run(block, policy, error, says):
    model, x = Detour(), torch.randn(2, 3, requires_grad=True)
    applied = checkpoint_blocks(model, {block: policy})
    for _ in range(2):
        with pytest.raises(error, match=says):
            model(x)
        model.eval()(x)
        model.train()
        with torch.no_grad():
            model(x)
    applied.remove()


def test_what_only_a_part_of_the_model_ran_is_checked_at_the_end():
    model, x = Detour(), torch.randn(2, 3, requires_grad=True)
    with checkpoint_blocks(model, {nn.Linear: "dots"}):
        model.inside(x)
    for block, policy, says in (
        (nn.Linear, "save: *typo*", "'\\*typo\\*' matches no array"),
        (DecoderLayer, "full", "no block of this class was called"),
    ):
        with pytest.raises(NoEffectError, match=says), checkpoint_blocks(model, {block: policy}):
            model.inside(x)
    with pytest.raises(ZeroDivisionError), checkpoint_blocks(model, {DecoderLayer: "full"}):
        raise ZeroDivisionError
    assert "forward" not in vars(model.unused)


def test_a_model_inside_a_checkpoint():
    """Its recomputation stops before the last blocks; that is no error of their selectors."""
    model, x = stack()
    plain = gradients(model, model, x)
    with checkpoint_blocks(model, {DecoderLayer: "save: layers/2/norm2*; recompute: *"}):
        assert all_equal(gradients(lambda x: checkpoint(model, x, use_reentrant=False), model, x), plain)
