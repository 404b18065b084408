"""Counts the matmuls and FLOPs that a jaxpr executes. Dead code does not count; a scan's body counts once per iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.matmuls import MATMULS, eqn_flops
from remat_jax.core.walk import executed_bodies
from remat_jax.errors import UnsupportedError


def matmuls(fn: Callable[..., Any], *args: Any) -> int:
    """The number of matrix multiplications that one call of `fn` executes. Each iteration of a scan counts.

    >>> import jax, jax.numpy as jnp
    >>> matmuls(jax.grad(lambda w: jnp.sum(jnp.sin(w @ w))), jnp.ones((4, 4)))
    3
    """
    return count(jax.make_jaxpr(fn)(*args), lambda eqn: eqn.primitive.name in MATMULS)


def flops(fn: Callable[..., Any], *args: Any) -> int:
    """The floating-point operations of the matrix multiplications and convolutions of one call of `fn`, 2 per multiply-add.

    >>> import jax.numpy as jnp
    >>> flops(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((3, 5)))
    60
    """
    return count(jax.make_jaxpr(fn)(*args), eqn_flops)


def count(jaxpr: ClosedJaxpr, weight: Callable[[Any], int | bool]) -> int:
    """The sum of `weight(eqn)` over the equations that the closed `jaxpr` executes, after dead-code elimination.

    A `cond` counts as its most expensive branch.
    """
    return _count(compat.dce(jaxpr), weight)


def _count(jaxpr: ClosedJaxpr, weight: Callable[[Any], int | bool]) -> int:
    total = 0
    for eqn in jaxpr.jaxpr.eqns:
        inside = over_bodies(eqn, lambda body: _count(body, weight))
        if inside and eqn.primitive.name == "while":
            raise UnsupportedError(
                "the matrix multiplications in a while loop cannot be counted: its trip count is unknown before it runs. "
                "Use lax.scan, or a fori_loop with static bounds."
            )
        total += int(weight(eqn)) + inside
    return total


def over_bodies(eqn: JaxprEqn, count_body: Callable[[Any], int]) -> int:
    """`count_body` summed over the jaxprs that `eqn` runs. A scan's body counts per iteration, a `cond` as its costliest."""
    counted = list(map(count_body, executed_bodies(eqn)))
    if eqn.primitive.name == "cond":
        return max(counted)
    return sum(counted) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
