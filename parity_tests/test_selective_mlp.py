"""One policy text in both frameworks, on the deep perceptron: the same recomputed products, kept bytes and gradients.

A block is a product and its ReLU; its backward pass needs its input and its product. Policies differ only in whether they keep
the product, and where they keep the two. The head is outside the blocks; it keeps its input, and the loss the difference for
the mean square. PyTorch's first block keeps the batch itself, which is no residual: it is not counted on either side.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import remat_jax as rj
import torch_ref
from examples import pytorch
from examples.models import deep_mlp_linen, deep_mlp_nnx
from examples.models import weights as w
from parity_tests import support as s
from parity_tests.test_residual_bytes import Kept
from remat_jax.cost.count import matmuls
from remat_jax.parity import float64_error

LAYERS, BATCH, WIDTH = 6, 48, 32
SIZES = {"num_layers": LAYERS, "hidden_size": WIDTH, "in_features": WIDTH, "out_features": WIDTH}
BLOCKS = LAYERS - 1
ACTIVATION = BATCH * WIDTH * 4
MODULES = {"linen": deep_mlp_linen, "nnx": deep_mlp_nnx}
FORMS = ["torch", "linen", "linen-scan", "nnx", "nnx-scan"]


class Row(NamedTuple):
    """Where a block's input and its product are between the passes, and how often the product is recomputed."""

    input: str
    product: str
    again: int


TABLE = {
    "full": Row("device", "", 1),
    "offload_inputs": Row("host", "", 1),
    "dots": Row("device", "device", 0),
    "dots_with_no_batch_dims": Row("device", "device", 0),
    "offload_dot_with_no_batch_dims": Row("device", "host", 0),
    "save: *:dot_general*": Row("device", "device", 0),
    "save: @primitive:dot_general": Row("device", "device", 0),
    "offload: @inputs; save: @dots_with_no_batch_dims": Row("host", "device", 0),
    "offload: @dots, @inputs": Row("host", "host", 0),
    "save: @inputs; offload: *dot_general#0": Row("device", "host", 0),
    "recompute: *:dot_general#0; save: @dots; offload: @inputs": Row("host", "", 1),
}
policies = pytest.mark.parametrize("policy", TABLE)
forms = pytest.mark.parametrize("form", FORMS)


@functools.cache
def arrays(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.normal(size=(BATCH, WIDTH)).astype(dtype), random.normal(size=(BATCH, WIDTH)).astype(dtype)


def torch_model(dtype: torch.dtype = torch.float64) -> pytorch.DeepMLP:
    torch.manual_seed(0)
    return pytorch.DeepMLP(**SIZES).to(dtype)


def jax_job(form: str) -> tuple[Any, Any, type]:
    """The loss of the parameters and the data, abstract parameters, and the class of the blocks."""
    api, scan = form.removesuffix("-scan"), form.endswith("-scan")
    module = MODULES[api]
    if api == "linen":
        model = module.DeepMLP(**SIZES, scan=scan)
        shape = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
        parameters = jax.eval_shape(model.init, jax.random.key(0), shape)["params"]
        return lambda p, x, y: s.mean_squared(model.apply({"params": p}, x), y), parameters, module.MlpLayer
    model = nnx.eval_shape(lambda: module.DeepMLP(**SIZES, scan=scan, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    return lambda p, x, y: s.mean_squared(nnx.merge(graph, p)(x), y), state, module.MlpLayer


@functools.cache
def cost(form: str, policy: str) -> tuple[int, Kept]:
    """Matrix products of a training step whose batch has a gradient, and the bytes kept between its passes."""
    if form == "torch":
        model, (x, y) = torch_model(torch.float32), (torch.tensor(array) for array in arrays("float32"))
        x.requires_grad_()

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return s.mean_squared(model(x), y)

        with torch_ref.checkpoint_blocks(model, {pytorch.MlpLayer: policy}):
            saved = torch_ref.saved_for_backward(loss, x, y)
            with torch_ref.count_matmuls() as count:
                loss(x, y).backward()
        return count.total, Kept(saved.device_bytes, saved.host_bytes)
    loss, parameters, block = jax_job(form)
    batch = (jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),) * 2
    table = rj.residuals(rj.Workload(loss, parameters, batch, block), policy)
    step = jax.grad(rj.checkpoint_blocks(loss, {block: policy}), (0, 1))
    return matmuls(step, parameters, *batch), Kept(table.device_bytes, table.host_bytes)


def expected(policy: str) -> tuple[int, Kept]:
    row = TABLE[policy]
    places = [row.input, row.product]
    device, host = (BLOCKS * ACTIVATION * places.count(place) for place in ("device", "host"))
    batch = ACTIVATION if row.input == "device" else 0
    return 3 * LAYERS + BLOCKS * row.again, Kept(device - batch + 2 * ACTIVATION, host)


@policies
@forms
def test_the_same_products_run_again_and_the_same_bytes_are_kept(form: str, policy: str) -> None:
    assert cost(form, policy) == expected(policy)


def test_another_policy_in_its_place_is_seen() -> None:
    """The negative control of the test above."""
    for form in ("torch", "linen-scan", "nnx"):
        for policy, row in TABLE.items():
            for substitute in ("full", "offload_inputs", "dots", "offload: @dots, @inputs"):
                assert (cost(form, substitute) == expected(policy)) is (row == TABLE[substitute])


@functools.cache
def plain_gradients() -> dict[str, np.ndarray]:
    return torch_gradients("off")


def torch_gradients(policy: str) -> dict[str, np.ndarray]:
    model, (x, y) = torch_model(), (torch.tensor(array) for array in arrays("float64"))
    if policy == "off":
        s.mean_squared(model(x), y).backward()
    else:
        with torch_ref.checkpoint_blocks(model, {pytorch.MlpLayer: policy}):
            s.mean_squared(model(x), y).backward()
    return {name: w.as_numpy(parameter.grad) for name, parameter in model.named_parameters()}


def jax_gradients(form: str, policy: str) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        loss, abstract, block = jax_job(form)
        tree = w.from_torch(torch_model().state_dict(), "DeepMLP", scan=form.endswith("-scan"))
        parameters, to_tree = tree, lambda grads: grads
        if form.startswith("nnx"):
            model = nnx.eval_shape(lambda: deep_mlp_nnx.DeepMLP(**SIZES, scan=form.endswith("-scan"), rngs=nnx.Rngs(0)))
            parameters, to_tree = nnx.state(w.load_nnx(model, tree)), w.nnx_tree
        grads = s.run(jax.grad(rj.checkpoint_blocks(loss, {block: policy})), parameters, *arrays("float64"))
        return w.gradients_to_torch(to_tree(grads), "DeepMLP")


@policies
def test_pytorch_s_gradients_are_plain_pytorch_s(policy: str) -> None:
    assert float64_error(plain_gradients(), torch_gradients(policy))[0] <= s.LIMIT


@pytest.mark.parametrize(
    ("form", "policy"), [*(("linen-scan", policy) for policy in TABLE), ("nnx", "offload: @dots, @inputs")]
)
def test_jax_s_gradients_are_plain_pytorch_s(form: str, policy: str) -> None:
    assert float64_error(plain_gradients(), jax_gradients(form, policy))[0] <= s.LIMIT


def test_a_gradient_that_is_a_little_off_is_seen() -> None:
    wrong = {name: gradient * (1 + 1e-11) for name, gradient in plain_gradients().items()}
    assert not float64_error(plain_gradients(), wrong)[0] <= s.LIMIT


# Where the frameworks differ by nature; the docstring of `torch_ref.selective_checkpoint` says why.


@pytest.mark.parametrize(("read", "by_torch", "by_jax"), [(False, ACTIVATION, 0), (True, ACTIVATION, ACTIVATION)])
def test_pytorch_keeps_a_last_product_that_backward_does_not_read(read: bool, by_torch: int, by_jax: int) -> None:
    """Written once for both frameworks; with a sine after the product, backward reads the product, and both keep it."""
    x, weight = np.ones((BATCH, WIDTH), "float32"), np.ones((WIDTH, WIDTH), "float32")

    def block(x: Any, weight: Any) -> Any:
        product = x @ weight
        return (torch.sin if isinstance(x, torch.Tensor) else jnp.sin)(product) if read else product

    def torch_loss(x: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
        return torch_ref.selective_checkpoint(block, "dots", x, weight).sum()

    def jax_loss(weight: Any, x: Any) -> Any:
        return rj.remat(block, "dots")(x, weight).sum()

    saved = torch_ref.saved_for_backward(torch_loss, torch.tensor(x), torch.nn.Parameter(torch.tensor(weight)))
    table = rj.residuals(rj.Workload(jax_loss, weight, (x,), "*"), "off")
    assert (saved.device_bytes, table.device_bytes) == (by_torch, by_jax)
