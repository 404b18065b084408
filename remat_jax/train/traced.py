"""A function of pytrees as a jaxpr of flat arrays, with the path and the memory of every array."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.errors import ArgumentError


def struct(leaf: Any, dtype: Any) -> Any:
    """The shape of the array `leaf` with `dtype`, in the memory of `leaf`."""
    if compat.is_on_host(leaf):
        return jax.core.ShapedArray(leaf.shape, dtype, memory_space=jax.memory.Space.Host)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def result_structs(function: Callable[..., Any], *args: Any) -> Any:
    """The shapes of the arrays of `function(*args)`, by tracing alone."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves, treedef = jax.tree.flatten(shapes)
    return jax.tree.unflatten(treedef, [struct(aval, leaf.dtype) for aval, leaf in zip(jaxpr.out_avals, leaves, strict=True)])


def device_bytes(tree: Any) -> int:
    """The bytes of the arrays of `tree` in device memory; arrays in host memory do not count."""
    return compat.tree_bytes([leaf for leaf in jax.tree.leaves(tree) if not compat.is_on_host(leaf)])


def structs(tree: Any, argument: str) -> Any:
    """`tree` with a `ShapeDtypeStruct` in place of every array; Python scalars become arrays of their JAX type."""

    def as_struct(leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | complex):
            leaf = jnp.asarray(leaf)
        if not compat.is_array(leaf):
            raise ArgumentError(
                f"{argument} holds {leaf!r} of type {type(leaf).__name__}: expected arrays or jax.ShapeDtypeStruct. Bind other "
                "values into the loss (a lambda or functools.partial)."
            )
        # Use the dtype that JAX gives NumPy's float64 and int64, which depends on jax_enable_x64.
        return struct(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))

    return jax.tree.map(as_struct, tree)


Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class FlatTrace:
    """A traced function.

    Attributes:
      jaxpr: the closed jaxpr; its inputs and outputs are the arrays of the arguments and the result, all in device memory.
      values: the arrays of the arguments, in their own memory.
      in_paths, out_paths: the paths of inputs and outputs; the first key of `in_paths` is the argument's position.
      finish: computes the function's result from the jaxpr's outputs.
    """

    jaxpr: Any
    values: tuple[Any, ...]
    in_paths: tuple[Path, ...]
    out_paths: tuple[Path, ...]
    finish: Callable[[Sequence[Any]], Any]


def trace(function: Callable[..., Any], *args: Any) -> FlatTrace:
    """`function(*args)` traced with every array in device memory; other leaves (strings, functions) stay as they are."""
    leaves, treedef = jax.tree.flatten_with_path(args)
    places = [index for index, (_, leaf) in enumerate(leaves) if compat.is_array(leaf)]
    results: list[tuple[list[tuple[Path, Any]], Any]] = []

    def flat(*values: Any) -> list[Any]:
        filled = [leaf for _, leaf in leaves]
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        outputs, structure = jax.tree.flatten_with_path(function(*jax.tree.unflatten(treedef, filled)))
        arrays = [out for _, out in outputs if compat.is_array(out)]
        # None marks an array: a stored tracer would keep the trace alive.
        results.append(([(path, None if compat.is_array(out) else out) for path, out in outputs], structure))
        return arrays

    values = tuple(leaves[index][1] for index in places)
    jaxpr = jax.make_jaxpr(flat)(*map(compat.on_device, values))
    outputs, structure = results[-1]

    def finish(flat_outputs: Sequence[Any]) -> Any:
        arrays = iter(flat_outputs)
        return jax.tree.unflatten(structure, [next(arrays) if out is None else out for _, out in outputs])

    in_paths = tuple(leaves[index][0] for index in places)
    return FlatTrace(jaxpr, values, in_paths, tuple(path for path, out in outputs if out is None), finish)
