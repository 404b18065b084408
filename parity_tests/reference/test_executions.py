from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import call

L = 3
# A layer has six products: q/k/v, scores, values, output, and two in the feed-forward network. Backward takes two for each.
# The head is one more product. Without a gradient for the input there is one less.
FORWARD, BACKWARD = 6, 12


def run(fn, *args, **kwargs) -> torch_ref.MatmulCount:
    with torch_ref.count_matmuls() as count:
        fn(*args, **kwargs).sum().backward()
    return count


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(("mode", "executions"), [("off", 1), ("checkpoint", 2), ("offload", 2)])
def test_matmuls_of_the_decoder(mode, executions, early_stop):
    torch.manual_seed(0)
    model = pytorch.ByteDecoder(d_model=16, nhead=2, num_layers=L, max_len=8)
    tokens = torch.randint(0, 256, (2, 8))
    # The last operator is a norm, whose statistics backward needs: stopping early saves no product.
    with set_checkpoint_early_stop(early_stop), torch_ref.count_calls(pytorch.DecoderLayer) as calls:
        count = run(model.loss, tokens, tokens, **torch_ref.mode_flags(mode))
    assert count.total == L * (executions * FORWARD + BACKWARD) + 3
    assert count.per_operator["bmm"] == L * (executions * 2 + 4)
    # Only the first product of a layer reads a transposed view, which PyTorch splits into `mm` and `add`.
    assert count.per_operator["addmm"] == L * executions * 3 + 1
    assert count.per_operator["mm"] == L * (executions + 8) + 2
    assert calls.total == L * executions
    assert set(calls.per_module.values()) == {executions}


@pytest.mark.parametrize(("requires_grad", "saving"), [(True, 0), (False, 1)])
def test_matmuls_of_a_stack(requires_grad, saving):
    stack = pytorch.DecoderStack(L, 16, 2)
    count = run(stack, torch.randn(2, 4, 16, requires_grad=requires_grad))
    assert count.total == L * (FORWARD + BACKWARD) - saving


@pytest.mark.parametrize(
    ("mode", "early_stop", "total"),
    [("off", True, 6), ("checkpoint", True, 7), ("checkpoint", False, 8), ("offload", True, 7), ("offload", False, 8)],
)
def test_stopping_early_saves_the_last_matmul_of_a_perceptron(mode, early_stop, total):
    block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(3, 4, requires_grad=True)
    with set_checkpoint_early_stop(early_stop):
        assert run(call, mode, block, x).total == total


def test_shapes_and_flops():
    layer = pytorch.DecoderLayer(d_model=16, nhead=2)
    with torch_ref.count_matmuls() as count:
        layer(torch.randn(3, 5, 16))
    assert count.executed == [
        torch_ref.Matmul("mm", (15, 16), (16, 48)),
        torch_ref.Matmul("bmm", (6, 5, 8), (6, 8, 5)),
        torch_ref.Matmul("bmm", (6, 5, 5), (6, 5, 8)),
        torch_ref.Matmul("addmm", (15, 16), (16, 16)),
        torch_ref.Matmul("addmm", (15, 16), (16, 64)),
        torch_ref.Matmul("addmm", (15, 64), (64, 16)),
    ]
    assert count.flops == 2 * 15 * 16 * (48 + 16 + 64 + 64) + 2 * 2 * 6 * 5 * 8 * 5


def test_all_four_operators_are_counted():
    a, b, c = torch.ones(2, 3, 4), torch.ones(2, 4, 5), torch.ones(2, 3, 5)
    with torch_ref.count_matmuls() as count:
        torch.bmm(a, b)
        torch.baddbmm(c, a, b)
        torch.mm(a[0], b[0])
        torch.addmm(c[0], a[0], b[0])
    assert count.per_operator == {"bmm": 1, "baddbmm": 1, "mm": 1, "addmm": 1}
    assert [m.flops for m in count.executed] == [240, 240, 120, 120]


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_recomputation_that_stops_early_never_ends_but_starts(early_stop):
    block = pytorch.ToyModel()
    ended: list[int] = []
    block.register_forward_hook(lambda *_: ended.append(1))
    with set_checkpoint_early_stop(early_stop), torch_ref.count_calls(block) as calls:
        call("checkpoint", block, torch.ones(2, requires_grad=True)).sum().backward()
    assert calls.total == 2
    assert len(ended) == (1 if early_stop else 2)


def test_calls_by_module_and_class():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()]
    last = nn.Linear(2, 2)
    with torch_ref.count_calls(layers[0], nn.Tanh) as calls:
        nn.Sequential(*layers, layers[0], last)(torch.ones(1, 2))
    layers[0](torch.ones(1, 2))
    assert calls.per_module == {layers[0]: 2, layers[2]: 1}
    assert (calls.per_class, calls.total) == ({"Linear": 2, "Tanh": 1}, 3)


def test_nested_checkpoints_run_the_inner_block_three_times():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def outer(x):
        return call("checkpoint", inner, x).sin()

    with torch_ref.count_calls(inner) as calls:
        call("checkpoint", outer, torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls.total == 3


def test_wrong_use():
    with pytest.raises(torch_ref.InvalidArgumentError, match="blocks contains 'Linear', expected modules or classes"):
        with torch_ref.count_calls("Linear"):
            pass
    with pytest.raises(torch_ref.InvalidArgumentError, match="blocks is empty, expected at least one"):
        with torch_ref.count_calls():
            pass
