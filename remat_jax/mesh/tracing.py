"""Tracing under a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from remat_jax import compat
from remat_jax.errors import ArgumentError


def under(mesh: AbstractMesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` traced under `mesh`, so that a bare `PartitionSpec` in a constraint of its own means this mesh.

    Raises:
      ArgumentError: when it is called under a mesh of another size.
    """
    if mesh is None:
        return function

    def traced(*args: Any) -> Any:
        check_context(mesh.size, f"a workload on a mesh of {mesh.size} devices ({dict(mesh.shape)})")
        with jax.sharding.use_abstract_mesh(mesh):
            return function(*args)

    traced.__name__ = getattr(function, "__name__", "function")
    return traced


def check_context(devices: int, called: str) -> None:
    """Refuse a `jax.set_mesh` around us that is of more or fewer than `devices` devices: JAX cannot leave it for another size.

    Raises:
      ArgumentError: naming both; `called` is what the message says of what is asked for.
    """
    around = jax.sharding.get_abstract_mesh()
    if not around.empty and around.size != devices:
        raise ArgumentError(
            f"jax.set_mesh: this call stands under a mesh of {around.size} devices ({dict(around.shape)}), and {called} cannot "
            "be traced there: leave the jax.set_mesh before this call; Workload(…, mesh=…) needs none"
        )


def pinned(tree: Any, shardings: Any) -> Any:
    """Every array of `tree` where `shardings`, a pytree of the same form, says."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def local_struct(leaf: Any, sharding: NamedSharding) -> Any:
    """What one device holds of `leaf`, as a shape in the memory that it is in."""
    shape = sharding.shard_shape(leaf.shape)
    if compat.is_on_host(leaf):
        return jax.core.ShapedArray(shape, leaf.dtype, memory_space=jax.memory.Space.Host)
    return jax.ShapeDtypeStruct(shape, leaf.dtype)
