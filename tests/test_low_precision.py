"""Low precision: a checkpoint changes only XLA's roundings in bfloat16, and policies save the products of float8 matmuls."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
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

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = """
import json
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np
import remat_jax as rj
from tests.small_models import Stack

class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, dtype=jnp.bfloat16)(y)
        return x + nn.Dense(32, dtype=jnp.bfloat16)(nn.gelu(nn.Dense(64, dtype=jnp.bfloat16)(x)))

x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 32)), jnp.bfloat16)
shapes = jax.eval_shape(Stack(Layer).init, jax.random.key(0), x)
draw = np.random.default_rng(1).normal
params = jax.tree.map(lambda one: draw(scale=0.2, size=one.shape).astype(one.dtype), shapes)

def loss(block):
    return lambda params, x: (Stack(block).apply(params, x).astype(jnp.float32) ** 2).mean()

plain, by_hand = loss(Layer), loss(nn.remat(Layer))
losses = (plain, by_hand, rj.checkpoint_blocks(plain, {Layer: "full"}), rj.checkpoint_blocks(plain, {Layer: "dots"}))
found = [jax.tree.leaves(jax.jit(jax.value_and_grad(one))(params, x)) for one in losses]
print(json.dumps([all(np.array_equal(*pair) for pair in zip(found[0], one)) for one in found[1:]]))
"""


def test_gradients_are_bit_for_bit_those_without_where_xla_keeps_no_excess_precision(in_a_hurry: dict[str, str]) -> None:
    """Without the flag they differ, under a handwritten checkpoint as under ours. XLA's own passes round; LLVM's do not."""
    flags = f"{in_a_hurry['XLA_FLAGS']} --xla_allow_excess_precision=false"
    environment = in_a_hurry | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, True, True]


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
    with pytest.raises(NoEffectError, match="'@dots' matches no residual.*'@primitive:custom_[jv][jv]p_call' selects"):
        rj.checkpoint_blocks(loss, {Mlp: "dots"})(params)
