"""The bytes that autograd's graph keeps, against closed forms and against PyTorch's own hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import call

B, T, D, H, L, V = 2, 16, 32, 4, 3, 256
N = B * T
ACTIVATION = N * D


def decoder(dtype: torch.dtype = torch.float32) -> tuple[pytorch.ByteDecoder, torch.Tensor]:
    torch.manual_seed(0)
    model = pytorch.ByteDecoder(d_model=D, nhead=H, num_layers=L, max_len=T).to(dtype)
    return model, torch.randint(0, V, (B, T))


def saved_by(model: pytorch.ByteDecoder, tokens: torch.Tensor, mode: str) -> torch_ref.SavedBytes:
    flags = torch_ref.mode_flags(mode)
    return torch_ref.saved_for_backward(lambda x, y: model.loss(x, y, **flags), tokens, tokens.roll(-1, 1))


# Elements that the head and the loss keep: the head's input, the log-probabilities, the weight of the mean.
HEAD = ACTIVATION + N * V + 1
# Arrays that a layer keeps: its input as the attention takes it, q, k, v, the softmax, the mixed values, the input and output
# of the first norm, the input of the second, the hidden units (four times as wide), means and deviations of both norms.
LAYER = 12 * ACTIVATION + B * H * T * T + 4 * N


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_forms_of_the_three_modes(dtype):
    model, tokens = decoder(dtype)
    width = dtype.itemsize
    by_mode = {mode: saved_by(model, tokens, mode) for mode in torch_ref.MODES}
    assert {mode: (s.device_bytes, s.host_bytes) for mode, s in by_mode.items()} == {
        "off": ((L * LAYER + HEAD) * width, 0),
        "checkpoint": ((L * ACTIVATION + HEAD) * width, 0),
        "offload": (HEAD * width, L * ACTIVATION * width),
    }
    assert {s.input_bytes for s in by_mode.values()} == {2 * N * 8}  # tokens and targets, int64


class Uncheckpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = self.drop(self.norm(self.conv(x)).relu())
        return h.softmax(1), (h * h.exp()).sum()


@pytest.mark.parametrize("name", ["decoder", "mixture"])
def test_plain_mode_agrees_with_what_saved_tensor_hooks_see(name):
    model, tokens = (Uncheckpointed(), None) if name == "mixture" else decoder()
    fn, inputs = (model, (torch.randn(2, 3, 9, requires_grad=True),)) if tokens is None else (model.loss, (tokens, tokens))
    outside = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers(), *inputs)}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _result = fn(*inputs)
    expected = sum(s.nbytes() for key, s in storages.items() if key not in outside)
    assert expected > 0
    assert torch_ref.saved_for_backward(fn, *inputs).device_bytes == expected


def test_views_count_once_and_as_their_whole_storage():
    def fn(x):
        h = x * 1
        return h[:2].sin() + h[2:].cos() + h[1:3].sin()

    saved = torch_ref.saved_for_backward(fn, torch.ones(4, requires_grad=True))
    assert [(e.nbytes, e.place, e.operator) for e in saved.entries] == [(16, "device", "aten.mul.Tensor")]


def test_what_is_not_held_by_the_graph_does_not_count():
    weight, cache = nn.Parameter(torch.ones(3)), []

    def fn(x, scale):
        cache.append(x * 2)
        unused = torch.ones(1000)  # noqa: F841
        constant = torch.full((3,), 5.0)
        return ((x + scale) * weight * constant).sum() + cache[-1].detach().sum()

    saved = torch_ref.saved_for_backward(fn, torch.ones(3), torch.ones(3))
    # The sum and the product, both computed here, and the constant; not the arguments, which an addition does not need.
    assert sorted((e.operator, e.nbytes) for e in saved.entries) == [("aten.add.Tensor", 12), ("aten.full.default", 12)]


def test_parameters_and_repeated_arguments():
    weight, x = nn.Parameter(torch.ones(5)), torch.ones(5, requires_grad=True)
    saved = torch_ref.saved_for_backward(lambda a, b, w: a * b * w, x, b=x, w=weight)
    assert (saved.device_bytes, saved.input_bytes) == (20, 20)  # the product of x with itself, and x; not the weight
    saved = torch_ref.saved_for_backward(lambda a, b, w: a * w + b * w, x, b=x, w=weight)
    assert (saved.device_bytes, saved.input_bytes) == (0, 20)


def test_nested_checkpoints():
    inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]

    def outer(x):
        for block in inner:
            x = call("checkpoint", block, x)
        return x

    x = torch.randn(2, 8)
    saved = torch_ref.saved_for_backward(lambda x: call("checkpoint", outer, x).sin(), x)
    assert (saved.device_bytes, saved.input_bytes) == (64, 64)  # the input of the sine; the outer input


def test_wrong_use():
    with pytest.raises(torch_ref.InvalidArgumentError, match="fn is a Tensor, expected a function or a module"):
        torch_ref.saved_for_backward(torch.ones(2))
    with pytest.raises(torch_ref.InvalidArgumentError, match="no tensor with a graph.*with gradients enabled"):
        torch_ref.saved_for_backward(torch.exp, torch.ones(2))
