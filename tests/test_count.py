"""Counting matmuls and FLOPs: what is executed, as integers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_jax.cost.count import count, flops, matmuls
from remat_jax.errors import UnsupportedError

W, X = jnp.ones((3, 3)), jnp.ones((2, 3))


def test_dead_code_is_not_counted() -> None:
    assert matmuls(lambda w, x: (x @ w, x @ w @ w)[0], W, X) == 1
    assert matmuls(jax.jit(lambda w, x: (jax.jit(lambda: x @ w @ w)(), x)[1]), W, X) == 0


def test_a_scan_counts_its_rounds_also_nested() -> None:
    def loop(length: int, body: Any) -> Any:
        return lambda w, x: jax.lax.scan(lambda x, _: (body(w, x), None), x, None, length=length)[0]

    assert matmuls(loop(5, lambda w, x: x @ w), W, X) == 5
    assert matmuls(loop(5, loop(3, lambda w, x: x @ w @ w)), W, X) == 30
    # An output of the scan that nobody reads costs nothing.
    assert matmuls(lambda w, x: jax.lax.scan(lambda x, _: (x + 1, x @ w), x, None, length=4)[0], W, X) == 0


def test_a_cond_counts_as_its_most_expensive_branch() -> None:
    assert matmuls(lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w), W, X) == 2
    branches = [lambda x: x, lambda x: x @ W, lambda x: x @ W @ W @ W]
    assert matmuls(lambda i, x: jax.lax.switch(i, branches, x), 0, X) == 3


def test_a_while_loop_with_matmuls_is_refused_and_one_without_is_free() -> None:
    with pytest.raises(UnsupportedError, match="trip count is unknown"):
        matmuls(lambda w, x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x), W, X)
    assert matmuls(lambda w, x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + 1, x) @ w, W, X) == 1


def test_derivatives_checkpoints_and_custom_rules():
    @jax.custom_vjp
    def kernel(w: Any, x: Any) -> Any:
        return x @ w

    kernel.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, ct: (saved[1].T @ ct, ct @ saved[0].T))

    def loss(f: Any) -> Any:
        return jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(f(w, jnp.sin(f(w, x))))), (0, 1))

    assert matmuls(loss(lambda w, x: x @ w), W, X) == matmuls(loss(kernel), W, X) == 6
    # Only sin's derivative, outside the region, reads the second recomputed output.
    assert matmuls(loss(jax.checkpoint(lambda w, x: jnp.sin(x @ w))), W, X) == 8
    assert matmuls(kernel, W, X) == 1
    assert matmuls(jax.vmap(lambda x: x @ W), jnp.ones((7, 2, 3))) == 1


def test_flops_by_hand() -> None:
    assert flops(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((3, 5))) == 2 * 2 * 3 * 5
    assert flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), jnp.ones((4, 2, 3)), jnp.ones((4, 3, 5))) == 4 * 2 * 2 * 3 * 5
    assert flops(lambda a, b: jnp.einsum("ijk,ijk->", a, b), jnp.ones((4, 2, 3)), jnp.ones((4, 2, 3))) == 2 * 24
    assert flops(lambda a: a + a, jnp.ones((4, 2))) == 0
    scanned = lambda a, b: jax.lax.scan(lambda x, _: (x @ b, None), a, None, length=6)[0]  # noqa: E731
    assert flops(scanned, jnp.ones((2, 3)), jnp.ones((3, 3))) == 6 * 2 * 2 * 3 * 3


@pytest.mark.parametrize(
    ("image", "kernel", "options", "expected"),
    [
        # Output positions × output features × kernel positions × input features of its group, twice.
        ((1, 8, 8, 3), (3, 3, 3, 5), {"padding": "SAME"}, 2 * 64 * 5 * 9 * 3),
        ((1, 8, 8, 4), (3, 3, 1, 4), {"padding": "SAME", "feature_group_count": 4}, 2 * 64 * 4 * 9),
        ((2, 8, 8, 3), (2, 2, 3, 5), {"padding": "VALID", "window_strides": (2, 2)}, 2 * 2 * 16 * 5 * 4 * 3),
    ],
)
def test_flops_of_convolutions(image: Any, kernel: Any, options: dict[str, Any], expected: int) -> None:
    def convolve(x: Any, k: Any) -> Any:
        given = {"window_strides": (1, 1), "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
        return jax.lax.conv_general_dilated(x, k, **given)

    assert flops(convolve, jnp.ones(image), jnp.ones(kernel)) == expected


def test_any_weight_can_be_counted() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), jnp.cos(c)), x, None, length=3))(1.0)
    assert count(jaxpr, lambda eqn: eqn.primitive.name in ("sin", "cos")) == 6
