"""Receipts: the bytes that offloads offered, put on the host, freed and brought back; executions; differing recomputations.

The bytes that autograd's graph keeps, against closed forms and against PyTorch's own hooks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import call
from torch_ref.faithful import gradient_checkpoint_forward as faithful


def test_an_offload_of_a_decoder_in_full():
    torch.manual_seed(0)
    model = pytorch.DecoderStack(3, 8, 2)
    x = torch.randn(2, 4, 8)
    with torch_ref.receipt() as r:
        y = model(x + 0, use_gradient_checkpointing_offload=True)
        assert (r.bytes_offered, r.bytes_on_host, r.tensors_packed, r.bytes_brought_back) == (768, 768, 3, 0)
        assert r.bytes_released == 768
        assert r.warnings == ()
    y.sum().backward()
    assert r.bytes_brought_back == 768
    entries = [(e.block, e.mode, e.form, e.bytes_offered, e.bytes_on_host, e.bytes_brought_back) for e in r.calls]
    assert entries == [("DecoderLayer", "offload", "right", 256, 256, 256)] * 3


def test_an_offload_that_moved_nothing_says_so():
    x = torch.ones(2, 3, requires_grad=True)
    with torch_ref.receipt() as r:
        faithful(pytorch.ToyModel(), True, True, x=x)
    assert len(r.warnings) == 1
    assert "1 offloaded call(s) moved 0 of the 24 offered bytes to the host (ToyModel)" in r.warnings[0]
    assert "the faithful form moves positional tensors only" in r.warnings[0]


def test_an_offload_that_freed_nothing_says_so():
    x = torch.ones(2, 3, requires_grad=True)
    with torch_ref.receipt() as r:
        _y = call("offload", pytorch.ToyModel(), x=x)
    assert r.warnings == ("24 bytes are on the host, but no device memory was freed: something else still holds the tensors.",)


def test_a_storage_gives_back_all_of_it_and_once():
    whole = torch.ones(100) * 1
    with torch_ref.receipt() as r:
        _y = call("offload", lambda a, b: a * b * torch.ones(1, requires_grad=True), whole[:10], whole[10:20])
        assert (r.bytes_on_host, r.bytes_released) == (80, 0)
        del whole
    assert r.bytes_released == 400


def test_calls_that_could_keep_nothing_say_so():
    with torch_ref.receipt() as empty:
        pass
    assert empty.warnings == ("no block was called through torch_ref inside this receipt.",)
    with torch_ref.receipt() as r, torch.no_grad():
        call("offload", pytorch.ToyModel(), torch.ones(2))
    assert r.warnings == ("ToyModel: called with gradients disabled, so mode 'offload' had nothing to keep.",)


def test_receipts_nest_and_end():
    x = torch.ones(2, requires_grad=True)
    with torch_ref.receipt() as outer:
        call("off", torch.exp, x)
        with torch_ref.receipt() as inner:
            call("checkpoint", torch.sin, x).sum().backward()
    call("off", torch.cos, x)
    assert [(e.block, e.mode) for e in outer.calls] == [("exp", "off"), ("sin", "checkpoint")]
    assert [e.block for e in inner.calls] == ["sin"]
    assert (outer.bytes_offered, outer.bytes_on_host, outer.bytes_brought_back, outer.warnings) == (0, 0, 0, ())


# Executions.


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


# Recomputations that differ.


class Changing(nn.Module):
    """A block whose second run differs from its first."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.linear, self.change, self.cache, self.queue = nn.Linear(4, 4), change, [], [2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.cache.append(y)
        match self.change:
            case "cache":
                return torch.tanh(torch.cat(self.cache, 1)).sum()
            case "shape in an operator":
                return torch.tanh(torch.cat(self.cache, 1) + y.detach()).sum()
            case "fewer":
                return torch.tanh(y) if len(self.cache) > 1 else torch.tanh(torch.sin(torch.tanh(y)))
            case "dtype":
                return torch.tanh(y.double() if len(self.cache) > 1 else y)
            case _:
                return torch.tanh(y * self.queue.pop())


@pytest.mark.parametrize("way", ["offload", "full", "save: *linear*"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cache", "recomputed metadata: .*2, 6, 4"),
        ("shape in an operator", "raised RuntimeError, and its forward pass did not"),
        ("fewer", "tensors saved during forward|computes"),
        ("dtype", "torch.float64|computes"),
        ("queue", "raised IndexError, and its forward pass did not: pop from empty list"),
    ],
)
def test_a_block_that_runs_otherwise_the_second_time_is_named_with_the_remedy(way, change, message):
    block, x = Changing(change), torch.ones(2, 3, 4, requires_grad=True) * 1.0
    run = call if way in torch_ref.MODES else lambda way, *rest: torch_ref.selective_checkpoint(rest[0], way, *rest[1:])
    output = run(way, block, x)
    with pytest.raises(torch_ref.ChangedRecomputationError, match=message) as caught:
        output.sum().backward()
    assert "Changing" in str(caught.value) and "as an argument of the block" in str(caught.value)


# What the graph keeps.

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


def test_nested_checkpoints_keep_the_outer_input():
    inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]

    def outer(x):
        for block in inner:
            x = call("checkpoint", block, x)
        return x

    x = torch.randn(2, 8)
    saved = torch_ref.saved_for_backward(lambda x: call("checkpoint", outer, x).sin(), x)
    assert (saved.device_bytes, saved.input_bytes) == (64, 64)  # the input of the sine; the outer input


def test_wrong_use_of_saved_for_backward():
    with pytest.raises(torch_ref.InvalidArgumentError, match="fn is a Tensor, expected a function or a module"):
        torch_ref.saved_for_backward(torch.ones(2))
    with pytest.raises(torch_ref.InvalidArgumentError, match="no tensor with a graph.*with gradients enabled"):
        torch_ref.saved_for_backward(torch.exp, torch.ones(2))
