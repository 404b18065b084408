"""The rewritten losses that the doctor compiles before it advises a head in chunks or attention in a kernel."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.core.walk import equations
from remat_jax.diagnosis.beyond import attention_in_a_kernel, head_in_chunks, with_change
from remat_jax.errors import UnsupportedError

ROWS, LENGTH, WIDTH, HEADS, CLASSES = 2, 64, 32, 4, 640


class Layer(nn.Module):
    """Attention with two queries for each key, in the form of `einsum`."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        groups = HEADS // 2
        query = nn.DenseGeneral((groups, 2, WIDTH // HEADS))(x)
        key, value = (nn.DenseGeneral((groups, WIDTH // HEADS))(x) for _ in range(2))
        weights = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", query, key))
        mixed = jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(x.shape)
        return x + nn.Dense(WIDTH)(mixed), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)[0]


def job(*, returned: bool = False, flipped: bool = False) -> rj.Workload:
    """A scanned decoder with a head; `flipped` puts the classes first, `returned` returns the logits."""
    x, targets = (
        jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH)[:ndim], dtype) for ndim, dtype in ((3, jnp.float32), (2, jnp.int32))
    )
    params = jax.eval_shape(Decoder().init, jax.random.key(0), x), jax.ShapeDtypeStruct((WIDTH, CLASSES), jnp.float32)

    def loss(params: Any, x: Any, targets: Any) -> Any:
        hidden = Decoder().apply(params[0], x)[:, :-1]
        logits = jnp.einsum("dv,btd->vbt", params[1], hidden).transpose(1, 2, 0) if flipped else hidden @ params[1]
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, 1:, None], -1)[..., 0]
        value = losses.mean() + jnp.square(params[1]).mean()
        return (value, logits) if returned else value

    return rj.Workload(loss, params, (x, targets), Layer, has_aux=returned)


def sizes(workload: rj.Workload, change: Any, policy: str) -> set[int]:
    """The sizes of all arrays in the gradient of the changed loss."""
    loss = with_change(workload, policy, change)
    jaxpr = compat.dce(jax.make_jaxpr(jax.grad(loss))(workload.params, *workload.batch))
    return {math.prod(atom.aval.shape) for eqn in equations(jaxpr) for atom in eqn.outvars}


@pytest.mark.parametrize("policy", ["off", "full", "save: */DenseGeneral_0:*"])
@pytest.mark.parametrize("flipped", [False, True])
def test_a_changed_head_makes_one_chunk_of_logits(flipped: bool, policy: str) -> None:
    """63 tokens are padded to 64. Attention still computes its scores, which `off` keeps for all 3 layers."""
    array_sizes = sizes(job(flipped=flipped), head_in_chunks, policy)
    assert ROWS * LENGTH // 8 * CLASSES in array_sizes and ROWS * (LENGTH - 1) * CLASSES not in array_sizes
    assert max(array_sizes) == ROWS * HEADS * LENGTH**2 * (3 if policy == "off" else 1)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("policy", ["off", "full", "save: */DenseGeneral_0:*"])
def test_a_changed_attention_makes_no_scores(policy: str) -> None:
    """With two queries for each key, in a scan; the kernel's own tiles are not counted, because they are not in memory."""
    workload, scores = job(), ROWS * HEADS * LENGTH**2
    loss = with_change(workload, policy, attention_in_a_kernel)
    jaxpr = compat.dce(jax.make_jaxpr(jax.grad(loss))(workload.params, *workload.batch))
    made = [eqn for eqn in equations(jaxpr) for atom in eqn.outvars if math.prod(atom.aval.shape) == scores]
    assert not made and any(eqn.primitive.name == "pallas_call" for eqn in equations(jaxpr))


def test_what_cannot_be_changed_is_said() -> None:
    with pytest.raises(UnsupportedError, match="does not read the logits of a head outside loops, or returns them"):
        sizes(job(returned=True), head_in_chunks, "full")
    dense = rj.Workload(lambda w, x: (x @ w).mean(), jnp.ones((4, 4)), (jnp.ones((2, 4)),), "*")
    for change, message in ((head_in_chunks, "does not read the logits of a head"), (attention_in_a_kernel, "no attention")):
        with pytest.raises(UnsupportedError, match=message):
            sizes(dense, change, "off")


def test_a_changed_head_has_the_mean_of_the_cross_entropy() -> None:
    """A constant that the loss multiplies by is not added: it has no gradient."""

    def loss(kernel: Any, hidden: Any, targets: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ kernel, targets)
        return (losses * jnp.ones(targets.shape)).mean()

    keys = jax.random.split(jax.random.key(0), 3)
    kernel, hidden = jax.random.normal(keys[0], (WIDTH, CLASSES)), jax.random.normal(keys[1], (ROWS, LENGTH, WIDTH))
    targets = jax.random.randint(keys[2], (ROWS, LENGTH), 0, CLASSES)
    changed = with_change(rj.Workload(loss, kernel, (hidden, targets), "*"), "off", head_in_chunks)
    (value, gradient), (expected, of_kernel) = (jax.value_and_grad(fn)(kernel, hidden, targets) for fn in (changed, loss))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, of_kernel, atol=1e-6)


def test_the_weights_of_a_head_still_have_a_gradient() -> None:
    workload = job()
    loss = with_change(workload, "full", head_in_chunks)
    arrays = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), (workload.params, *workload.batch))
    gradients = jax.grad(loss)(*arrays)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradients[1]))
