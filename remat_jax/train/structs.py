"""Shapes of arrays that remember the memory they are in, which `jax.ShapeDtypeStruct` and `jax.eval_shape` forget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.errors import ArgumentError


def struct(leaf: Any, dtype: Any) -> Any:
    """The shape of the array `leaf`, of another `dtype`, in the memory that it is in."""
    if compat.is_on_host(leaf):
        return jax.core.ShapedArray(leaf.shape, dtype, memory_space=jax.memory.Space.Host)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def result_structs(function: Callable[..., Any], *args: Any) -> Any:
    """The shapes of the arrays of `function(*args)`; nothing is run."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves, treedef = jax.tree.flatten(shapes)
    return jax.tree.unflatten(treedef, [struct(aval, leaf.dtype) for aval, leaf in zip(jaxpr.out_avals, leaves, strict=True)])


def device_bytes(tree: Any) -> int:
    """What the arrays of `tree` take of device memory: those in host memory take nothing of it."""
    return compat.tree_bytes([leaf for leaf in jax.tree.leaves(tree) if not compat.is_on_host(leaf)])


def structs(tree: Any, argument: str) -> Any:
    """`tree` with a `ShapeDtypeStruct` in place of every array; Python scalars become arrays of their JAX type."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | complex):
            leaf = jnp.asarray(leaf)
        if not compat.is_array(leaf):
            raise ArgumentError(
                f"{argument} holds {leaf!r} of type {type(leaf).__name__}: expected arrays or jax.ShapeDtypeStruct. Bind other "
                "values into the loss (a lambda or functools.partial)."
            )
        # NumPy's float64 and int64 are what JAX makes of them, which depends on jax_enable_x64.
        return struct(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))

    return jax.tree.map(one, tree)
