"""Matrix products and calls of modules are counted while PyTorch runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import call


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_recomputation_that_stops_early_starts_and_never_ends(early_stop):
    block, ended = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), []
    block.register_forward_hook(lambda *_: ended.append(1))
    with set_checkpoint_early_stop(early_stop), torch_ref.count_matmuls() as count, torch_ref.count_calls(block) as calls:
        call("checkpoint", block, torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert (count.total, calls.total, len(ended)) == ((7, 2, 1) if early_stop else (8, 2, 2))
    assert count.per_operator == {"addmm": 3 if early_stop else 4, "mm": 4}


def test_shapes_and_flops():
    layer = pytorch.DecoderLayer(d_model=16, nhead=2)
    with torch_ref.count_matmuls() as count:
        layer(torch.randn(3, 5, 16))
        torch.baddbmm(torch.ones(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert count.executed == [
        torch_ref.Matmul("mm", (15, 16), (16, 48)),
        torch_ref.Matmul("bmm", (6, 5, 8), (6, 8, 5)),
        torch_ref.Matmul("bmm", (6, 5, 5), (6, 5, 8)),
        torch_ref.Matmul("addmm", (15, 16), (16, 16)),
        torch_ref.Matmul("addmm", (15, 16), (16, 64)),
        torch_ref.Matmul("addmm", (15, 64), (64, 16)),
        torch_ref.Matmul("baddbmm", (2, 3, 4), (2, 4, 5)),
    ]
    assert count.flops == 2 * 15 * 16 * (48 + 16 + 64 + 64) + 2 * 2 * 6 * 5 * 8 * 5 + 240


def test_calls_by_module_and_class():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()]
    with torch_ref.count_calls(layers[0], nn.Tanh) as calls:
        nn.Sequential(*layers, layers[0], nn.Linear(2, 2))(torch.ones(1, 2))
    layers[0](torch.ones(1, 2))
    assert calls.per_module == {layers[0]: 2, layers[2]: 1}
    assert (calls.per_class, calls.total) == ({"Linear": 2, "Tanh": 1}, 3)


def test_nested_checkpoints_run_the_inner_block_three_times():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with torch_ref.count_calls(inner) as calls:
        call("checkpoint", lambda x: call("checkpoint", inner, x).sin(), torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls.total == 3


@pytest.mark.parametrize(
    ("blocks", "message"),
    [(["Linear"], "blocks contains 'Linear', expected modules or classes"), ([], "blocks is empty, expected at least one")],
)
def test_wrong_use(blocks, message):
    with pytest.raises(torch_ref.InvalidArgumentError, match=message), torch_ref.count_calls(*blocks):
        pass
