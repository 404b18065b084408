"""The policies that docs/choosing.md gives for matmuls in float8: they save the products and change no gradient."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import NoEffectError
from tests.small_models import assert_bit_equal

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)


def product(a: Any, b: Any, axes: tuple[int, int]) -> Any:
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)


@jax.custom_vjp
def quantised_dot(x: Any, w: Any) -> Any:
    """A matmul in float8, as TransformerEngine makes it: its rule quantises and keeps the quantised operands."""
    return _forward(x, w)[0]


def _forward(x: Any, w: Any) -> Any:
    quantised = x.astype(E4M3), w.astype(E4M3)
    return product(*quantised, (1, 0)), quantised


def _backward(quantised: Any, cotangent: Any) -> Any:
    x, w = quantised
    return product(cotangent.astype(E5M2), w, (1, 1)), product(x, cotangent.astype(E5M2), (0, 0))


quantised_dot.defvjp(_forward, _backward)


class Dot(nn.Module):
    """`quantised_dot` in place of `lax.dot_general`."""

    @nn.compact
    def __call__(self, x: Any, w: Any, *_: Any, **__: Any) -> Any:
        return quantised_dot(x, w)


class Mlp(nn.Module):
    dot: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.gelu(nn.Dense(16, use_bias=False, dot_general_cls=self.dot, name="up")(x))
        return x + nn.Dense(8, use_bias=False, dot_general_cls=self.dot, name="down")(h)


@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("dot", "policy"),
    [
        (nn.Fp8DotGeneral, "save: *Fp8*:custom_vjp_call#4"),
        (fp8_ops.NANOOFp8DotGeneralOp, "save: @primitive:custom_jvp_call"),
        (Dot, "save: @primitive:custom_vjp_call"),
    ],
    ids=["Fp8DotGeneral", "NANOO", "TransformerEngine"],
)
def test_the_policy_for_fp8_saves_the_products(dot: Any, policy: str) -> None:
    model = Mlp(dot)
    params = model.init(jax.random.key(0), X)

    def loss(params: Any) -> Any:
        return jnp.mean(model.apply(params, X) ** 2)

    step = jax.value_and_grad(loss)
    under = {text: jax.value_and_grad(rj.checkpoint_blocks(loss, {Mlp: text})) for text in (policy, "everything", "full")}
    assert matmuls(under["full"], params) == matmuls(step, params) + 1
    for text in (policy, "everything"):
        assert matmuls(under[text], params) == matmuls(step, params)
        assert_bit_equal(jax.jit(under[text])(params), jax.jit(step)(params))
    with pytest.raises(
        NoEffectError, match="'@dots' matches no residual.*'@primitive:custom_[jv][jv]p_call' selects the results"
    ):
        rj.checkpoint_blocks(loss, {Mlp: "dots"})(params)
