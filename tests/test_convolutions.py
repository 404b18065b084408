from __future__ import annotations

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.cost.count import count
from remat_jax.errors import NoEffectError
from tests.small_models import assert_bit_equal
from tests.workloads import needs_gpu_compiler


class Block(nn.Module):
    """Two convolutions, and no matrix product."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(nn.LayerNorm()(nn.Conv(8, (3, 3), name="first")(x)))
        return nn.relu(x + nn.Conv(8, (3, 3), name="second")(jnp.tanh(y)))


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(8)(nn.gelu(nn.Conv(16, (3, 3))(x)))


class Net(nn.Module):
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(3):
            x = self.block(name=f"block_{index}")(x)
        return jnp.mean(nn.Dense(4)(x.mean((1, 2))) ** 2)


def setting(block: type[nn.Module] = Block) -> tuple[rj.Workload, Any, Any, jax.Array]:
    net, x = Net(block), jax.random.normal(jax.random.key(0), (2, 6, 6, 8))
    params = net.init(jax.random.key(1), x)
    return rj.Workload(net.apply, params, (x,), blocks=block), net.apply, params, x


def is_convolution(eqn: Any) -> bool:
    return eqn.primitive.name == "conv_general_dilated"


def convolutions(loss: Any, params: Any, x: jax.Array) -> int:
    return count(jax.make_jaxpr(jax.value_and_grad(loss))(params, x), is_convolution)


def test_convs_keeps_convolutions_and_nothing_else() -> None:
    job, loss, params, x = setting()
    plain, full, convs = (rj.checkpoint_blocks(loss, {Block: policy}) for policy in ("everything", "full", "save: @convs"))
    assert convolutions(plain, params, x) == convolutions(convs, params, x)
    # In the backward pass, only the ReLU behind it reads each block's second convolution.
    assert convolutions(full, params, x) - convolutions(convs, params, x) == 6
    kept = [row for row in rj.residuals(job, "save: @convs").rows if row.action == "save" and "block_" in row.name]
    assert {row.name.rpartition(":")[2].partition("#")[0] for row in kept} >= {"conv_general_dilated"}
    assert_bit_equal(*(jax.jit(jax.grad(fn))(params, x) for fn in (convs, loss)))


def test_convs_by_hand_and_in_pytorch() -> None:
    function = jax.checkpoint(
        lambda k, x: jnp.sin(jax.lax.conv(x, k, (1, 1), "SAME")).sum(), policy=rj.jax_policy("save: @convs")
    )
    k, x = jnp.ones((2, 2, 3, 3)), jnp.ones((1, 2, 5, 5))
    # One forward, and one for the kernel's gradient: the convolution itself is not recomputed.
    assert count(jax.make_jaxpr(jax.value_and_grad(function))(k, x), is_convolution) == 2


def test_dots_says_that_it_means_convolutions() -> None:
    _, loss, params, x = setting()
    with pytest.warns(rj.RematWarning, match="'@dots' selects the convolutions; '@convs' selects convolutions alone") as caught:
        jax.eval_shape(jax.grad(rj.checkpoint_blocks(loss, {Block: "dots"})), params, x)
    assert len(caught) == 1


def test_products_without_batch_dimensions_are_no_convolutions() -> None:
    _, loss, params, x = setting()
    with pytest.raises(NoEffectError, match="selects no convolution, as in JAX; '@convs' selects convolutions alone"):
        jax.eval_shape(jax.grad(rj.checkpoint_blocks(loss, {Block: "dots_with_no_batch_dims"})), params, x)


@pytest.mark.parametrize("policy", ["dots", "dots_with_no_batch_dims"])
def test_blocks_with_matrix_products_are_no_case_for_a_warning(policy: str) -> None:
    _, loss, params, x = setting(Mixed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jax.grad(rj.checkpoint_blocks(loss, {Mixed: policy})), params, x)


@needs_gpu_compiler
def test_convolutions_on_the_host_are_there() -> None:
    job, *_ = setting()
    report = rj.measure(job, "offload: @convs", "h200")
    offered = sum(row.bytes for row in rj.residuals(job, "offload: @convs").rows if row.action == "offload")
    assert report.host_bytes == offered > 0
