"""One policy text in both frameworks, on the decoder: the same recomputed products, kept bytes and gradients.

Products and bytes are counted in units of one layer, and both frameworks are held to the same closed form. `@dots`
selects the six products of a layer: q/k/v in one (three times the layer's width), scores, values, output; and the two of the
feed-forward network (four times and once the width). `@dots_with_no_batch_dims` leaves out scores and values.

Bytes are those that the graph keeps between the passes. PyTorch: the storages that the graph holds, without parameters, but
with an argument that the graph keeps. PyTorch's first block keeps the batch itself; a scan stacks a copy of the batch with the
inputs of the other layers. JAX: the arrays that leave the forward pass for the backward pass, without parameters and batch.
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
from parity_tests import matrix
from parity_tests import support as s
from remat_jax.memory.residuals import kept_residuals

BATCH, TIME, WIDTH, LAYERS, HEADS = 3, 64, 64, 4, 4
SIZES = {"num_layers": LAYERS, "d_model": WIDTH, "nhead": HEADS}
STREAM = BATCH * TIME * WIDTH * 4
# Heads · time is the layer's width times time over a head's width: the scores are that many streams.
SCORES = HEADS * TIME // WIDTH


class Kept(NamedTuple):
    """Bytes between the passes."""

    device: int
    host: int


class Row(NamedTuple):
    """A layer's kept streams on the device and on the host, and the number of its recomputed products."""

    device: int
    host: int
    again: int


# The products in order are 3, SCORES, 1, 1 and 4, 1 streams; the layer's input is one.
TABLE = {
    "full": Row(1, 0, 6),
    "offload_inputs": Row(0, 1, 6),
    "dots": Row(1 + 10 + SCORES, 0, 0),
    "dots_with_no_batch_dims": Row(1 + 9, 0, 2),
    "offload_dot_with_no_batch_dims": Row(1, 9, 2),
    "save: *self_attn*:dot_general*": Row(1 + 5 + SCORES, 0, 2),
    "offload: *ffn*:dot_general*; save: @dots": Row(1 + 5 + SCORES, 5, 0),
    "offload: @inputs; save: @dots_with_no_batch_dims": Row(9, 1, 2),
    "offload: @dots, @inputs": Row(0, 11 + SCORES, 0),
    "recompute: *self_attn*; save: @dots": Row(1 + 5, 0, 4),
    "save: @primitive:dot_general": Row(1 + 10 + SCORES, 0, 0),
}
SOME = ("dots_with_no_batch_dims", "offload: *ffn*:dot_general*; save: @dots", "offload: @dots, @inputs")
CASES = [
    *((framework, policy) for framework in ("torch", "linen") for policy in TABLE),
    *(("nnx", policy) for policy in ("full", "offload_inputs", *SOME)),
]


@functools.cache
def job(framework: str, scan: bool = True) -> rj.Workload:
    """The training loss of the stack, which is never allocated."""
    make, block = s.MODULES[framework].DecoderStack, s.block_of("DecoderStack", framework)
    x = jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), jnp.float32)
    if framework == "nnx":
        model = nnx.eval_shape(lambda: make(**SIZES, scan=scan, rngs=nnx.Rngs(0)))
        return rj.Workload.from_nnx(model, lambda m, x, y: s.mean_squared(m(x), y), (x, x), block)
    model = make(**SIZES, scan=scan)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return rj.Workload(lambda params, x, y: s.mean_squared(model.apply(params, x), y), params, (x, x), block)


@functools.cache
def bytes_kept(framework: str, policy: str, scan: bool = True) -> Kept:
    """Bytes that a training step of the stack keeps between the passes; the batch counts if PyTorch's first block keeps it."""
    if framework != "torch":
        table = kept_residuals(job(framework, scan), policy)
        return Kept(table.device_bytes, table.host_bytes)
    model = pytorch.DecoderStack(**SIZES)
    with torch_ref.checkpoint_blocks(model, {pytorch.DecoderLayer: policy}):
        x = torch.zeros(BATCH, TIME, WIDTH, requires_grad=True)
        saved = torch_ref.saved_for_backward(lambda x, y: s.mean_squared(model(x), y), x, x.detach())
    return Kept(saved.device_bytes + saved.input_bytes, saved.host_bytes)


def bytes_expected(policy: str) -> Kept:
    """Outside the blocks the loss keeps the difference for the mean square."""
    device, host, _ = TABLE[policy]
    return Kept(LAYERS * device * STREAM + STREAM, LAYERS * host * STREAM)


@functools.cache
def products(framework: str, policy: str) -> int:
    """Matrix multiplications of one training step of the byte decoder."""
    case = matrix.Case(framework, "ByteDecoder", "scan", "off", "float32")
    if framework != "torch":
        return matrix.cost(case, policy).matmuls
    model = s.make_torch("ByteDecoder", "float32")
    with torch_ref.count_matmuls() as count, torch_ref.checkpoint_blocks(model, {pytorch.DecoderLayer: policy}):
        matrix.torch_step(case, model)
    return count.total


def products_expected(policy: str) -> int:
    return s.LAYERS * (18 + TABLE[policy].again) + 3


@pytest.mark.parametrize(("framework", "policy"), CASES)
def test_the_same_products_run_again_and_the_same_bytes_are_kept(framework: str, policy: str) -> None:
    assert products(framework, policy) == products_expected(policy)
    assert bytes_kept(framework, policy) == bytes_expected(policy)


@pytest.mark.parametrize("framework", ["linen", "nnx"])
@pytest.mark.parametrize(("policy", "batch"), [("full", STREAM), ("offload_inputs", 0)])
def test_unrolled_layers_keep_the_same_but_for_a_copy_of_the_batch(policy: str, batch: int, framework: str) -> None:
    device, host = bytes_kept("torch", policy)
    assert bytes_kept(framework, policy, scan=False) == Kept(device - batch, host)


# The policies of the modes are in the matrix; PyTorch's gradients under every policy in `reference/test_selective.py`.
JAX_CASES = [
    *(("linen", "ByteDecoder", "scan", policy) for policy in (*SOME, "recompute: *self_attn*; save: @dots")),
    ("nnx", "DecoderStack", "scan", SOME[2]),
    ("linen", "DecoderStack", "unrolled", SOME[1]),
]


@pytest.mark.parametrize(("framework", "kind", "layers", "policy"), JAX_CASES)
def test_jax_s_gradients_are_plain_pytorch_s(framework: str, kind: str, layers: str, policy: str) -> None:
    case = matrix.Case(framework, kind, layers, "off", "float64")
    with matrix.precision(case):
        step = matrix.jax_step(case, policy)
        result = matrix.jax_result(case, step, s.quick(step.function, *step.arguments))
    assert matrix.problems(case, result) == []


# Where the frameworks differ by nature; the docstring of `torch_ref.selective_checkpoint` says why.


def test_everything_saves_what_is_computed_in_pytorch_and_what_backward_reads_in_jax() -> None:
    torch_side, jax_side = (bytes_kept(side, "everything") for side in ("torch", "linen"))
    plain = bytes_kept("linen", "off")
    assert jax_side.device == plain.device < torch_side.device
    # Five copies into another layout, q/k/v as a product and as a sum, the scaled queries, scores and softmax, the mixed
    # values, the output, the hidden units before and after the ReLU, the last product, two sums, two norms with their means
    # and deviations (one number for each row of WIDTH). A layer's output is the next layer's input, so besides these there are
    # only the batch and the loss's arrays.
    streams = 5 + 3 + 3 + 1 + 2 * SCORES + 1 + 1 + 4 + 4 + 1 + 2 + 2
    norms = 4 * STREAM // WIDTH
    assert torch_side == Kept(LAYERS * (streams * STREAM + norms) + 2 * STREAM, 0)
    assert products("torch", "everything") == products("linen", "everything") == s.LAYERS * 18 + 3


@pytest.mark.parametrize(("index", "elements"), [(0, 3), (1, 4), (2, 6), (3, 5)])
def test_arguments_have_the_same_numbers(index: int, elements: int) -> None:
    """Dictionaries in their own order in PyTorch and by their keys in JAX; keywords by their names in both."""
    sizes = {"a": 3, "b": 4, "y": 6, "z": 5}
    values = {name: np.ones(size, "float32") for name, size in sizes.items()}
    policy = f"offload: *:input#{index}; recompute: *"

    def torch_block(x: Any, *, z: Any, y: Any) -> Any:
        return (x["a"].sin().sum() * x["b"].sin()).sum() + z.sin().sum() * y.sin().sum()

    def jax_loss(p: Any) -> Any:
        p = jax.tree.map(lambda leaf: leaf * 1.0, p)
        return rj.remat(jax_block, policy)({"a": p["a"], "b": p["b"]}, z=p["z"], y=p["y"])

    def jax_block(x: Any, *, z: Any, y: Any) -> Any:
        return (jnp.sin(x["a"]).sum() * jnp.sin(x["b"])).sum() + jnp.sin(z).sum() * jnp.sin(y).sum()

    x, y, z = ({name: torch.tensor(values[name], requires_grad=True) for name in names} for names in ("ab", "y", "z"))
    with torch_ref.receipt() as receipt:
        torch_ref.selective_checkpoint(torch_block, policy, x, **z, **y).backward()
    assert receipt.bytes_on_host == rj.residuals(rj.Workload(jax_loss, values, (), "*"), "off").host_bytes == 4 * elements


@pytest.mark.parametrize(("read", "by_torch", "by_jax"), [(False, 16, 0), (True, 16, 16)])
def test_pytorch_keeps_a_last_product_that_backward_does_not_read(read: bool, by_torch: int, by_jax: int) -> None:
    """Written once for both frameworks; with a sine after the product, backward reads the product, and both keep it."""
    x, weight = np.ones((1, 4), "float32"), np.ones((4, 4), "float32")

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
