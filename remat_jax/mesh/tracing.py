"""Tracing under a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from remat_jax import compat


def under(mesh: AbstractMesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` traced under `mesh`, so that a bare `PartitionSpec` in a constraint of its own means this mesh."""
    if mesh is None:
        return function

    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return function(*args)

    traced.__name__ = getattr(function, "__name__", "function")
    return traced


def pinned(tree: Any, shardings: Any) -> Any:
    """Every array of `tree` where `shardings`, a pytree of the same form, says."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def local_struct(leaf: Any, sharding: NamedSharding) -> Any:
    """What one device holds of `leaf`, as a shape in the memory that it is in."""
    shape = sharding.shard_shape(leaf.shape)
    if compat.is_on_host(leaf):
        return jax.core.ShapedArray(shape, leaf.dtype, memory_space=jax.memory.Space.Host)
    return jax.ShapeDtypeStruct(shape, leaf.dtype)
