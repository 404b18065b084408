"""`OffloadFunction`: the general form, and the tutorial's form, which doubles the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import torch_ref
from examples.pytorch import faithful
from torch_ref.host import live_host_copies


def test_the_tutorials_function_doubles_the_gradient_and_frees_nothing():
    torch.manual_seed(0)
    model = faithful.OffloadDecoder(16).double()
    x = torch.randn(4, 16, dtype=torch.float64)
    gradient = torch.autograd.grad(model(x).square().sum(), model.layer1.weight)[0]
    plain = model.layer2(model.layer1(x))
    expected = torch.autograd.grad(plain.square().sum(), model.layer1.weight)[0]
    assert torch.equal(gradient, 2 * expected)
    assert ((gradient - expected).norm() / expected.norm()).item() == pytest.approx(1.0, abs=1e-15)
    # The next layer keeps its input, which is the copied tensor: the device holds as much as before.
    kept = torch_ref.saved_for_backward(model, x).device_bytes
    without = torch_ref.saved_for_backward(nn.Sequential(model.layer1, model.layer2), x).device_bytes
    assert kept == without + x.nbytes  # the copy, which without an accelerator is in device memory too


def test_a_floor_keeps_small_tensors_on_the_device():
    x, mask = torch.randn(100, requires_grad=True), torch.ones(1)
    with torch_ref.receipt() as r:
        y = torch_ref.OffloadFunction(lambda x, m: (x * m).sin(), min_bytes=100)(x, mask)
    assert (r.tensors_packed, r.bytes_on_host, r.bytes_offered) == (1, 400, 404)
    y.sum().backward()
    with pytest.raises(torch_ref.NothingToOffloadError, match=r"min_bytes is 401.*largest tensor argument.*has 400: lower"):
        torch_ref.OffloadFunction(torch.sin, min_bytes=401)(x)


def test_what_views_one_storage_is_copied_once():
    base = torch.randn(6, 8, dtype=torch.float64)
    views = {"rows": base[1:4], "t": base.t(), "flat": base.view(-1)[5:20], "every": base[:, ::2], "same": base[1:4]}
    seen = []

    def block(w, **views):
        assert len({view.untyped_storage().data_ptr() for name, view in views.items() if name != "every"}) == 1
        seen.append({name: view.clone() for name, view in views.items()})
        return (w * sum(view.sum() for view in views.values())).sin()

    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    with torch_ref.receipt() as r:
        torch_ref.OffloadFunction(block)(w, **views).sum().backward()
    assert r.bytes_on_host == base.nbytes + w.nbytes == r.bytes_brought_back
    assert all(torch.equal(seen[1][name], view) for name, view in views.items())
    # A view alone moves its own elements, not the storage.
    with torch_ref.receipt() as r:
        torch_ref.OffloadFunction(block)(w, every=base[:, ::2], rows=base[1:3])
    assert r.bytes_on_host == (24 + 16 + 1) * 8


@pytest.mark.parametrize(
    ("function", "floor", "message"),
    [
        *((torch.sin, floor, "min_bytes is .*, expected an integer from 0 up") for floor in (-1, 1.5, True, None)),
        (torch.ones(2), 0, "model is a Tensor, expected a module or a function"),
    ],
)
def test_wrong_use(function, floor, message):
    with pytest.raises(torch_ref.InvalidArgumentError, match=message):
        torch_ref.OffloadFunction(function, min_bytes=floor)


@pytest.mark.gpu
def test_on_a_gpu_copies_are_pinned_and_back_before_they_are_used():
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512, device="cuda") for _ in range(6)]
    x = torch.randn(4096, 512, device="cuda", requires_grad=True)

    def forward(x, wrap):
        for layer in layers:
            x = torch.tanh(wrap(layer)(x))
        return x

    for _ in range(3):  # streams, pools and prefetched copies of the previous round must not show
        gradient = torch.autograd.grad(forward(x, torch_ref.OffloadFunction).square().sum(), x)[0]
        assert torch.equal(gradient, torch.autograd.grad(forward(x, lambda layer: layer).square().sum(), x)[0])
    with torch_ref.receipt() as r:
        y = forward(x, torch_ref.OffloadFunction)
        assert all(copy.tensor.is_pinned() for copy in live_host_copies())
    assert r.bytes_on_host == 6 * x.nbytes and r.bytes_released == 0  # tanh keeps its own results
    y.sum().backward()


def test_overlapping_arguments_that_the_block_writes_on_are_refused():
    x = torch.arange(8.0, requires_grad=True)

    def block(a, b):
        a.mul_(2)
        return (b * b).sum()

    base = x * 1
    a, b = base[:5], base[3:]
    with pytest.raises(torch_ref.MutatedTensorError, match=r"block changes an offloaded argument.*another argument overlaps"):
        torch_ref.OffloadFunction(block)(a, b)


def test_an_alias_with_a_version_counter_of_its_own_gets_a_copy_of_its_own():
    base, w = torch.ones(3), torch.ones(3, requires_grad=True)
    outputs = []
    for _ in range(2):
        alias = base.data
        outputs.append(torch_ref.OffloadFunction(lambda w, d: (w * d).sin())(w, alias))
        alias.add_(1)
        del alias
    (gradient,) = torch.autograd.grad(outputs[1].sum(), w)
    assert gradient.tolist() == pytest.approx([2 * math.cos(2)] * 3, rel=1e-6)


def test_an_iterator_is_refused():
    def product(x, factors):
        for factor in factors:
            x = x * factor
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    for mode in ("checkpoint", "offload"):
        flags = torch_ref.mode_flags(mode).values()
        with pytest.raises(torch_ref.InvalidArgumentError, match="argument of product is an iterator.*pass a list"):
            torch_ref.gradient_checkpoint_forward(product, *flags, x, iter([2, 3]))
        torch_ref.gradient_checkpoint_forward(product, *flags, x, [2, 3]).sum().backward()
    assert x.grad.item() == pytest.approx(2 * 6 * math.cos(6), rel=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_travel_and_those_without_content_stay():
    x = torch.ones(3, requires_grad=True)
    dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    for sparse, nbytes in ((dense.to_sparse(), 2 * 2 * 8 + 2 * 4), (dense.to_sparse_csr(), None)):
        with torch_ref.receipt() as r:
            y = torch_ref.OffloadFunction(lambda x, s: (s @ x.unsqueeze(1)).sin())(x, sparse)
        assert nbytes is None or r.bytes_on_host == x.nbytes + nbytes
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert gradient.tolist() == pytest.approx([3 * math.cos(3), 2 * math.cos(2), 0], rel=1e-6)
    with torch_ref.receipt() as r:
        torch_ref.OffloadFunction(lambda x, m: x.sin())(x, torch.empty(5, device="meta"))
    assert r.tensors_packed == 1
