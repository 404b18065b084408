"""A workload over several devices: how its arguments lie on a mesh, and what of them each device holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from remat_jax.errors import ArgumentError, UnsupportedError


def as_mesh(mesh: Any) -> AbstractMesh:
    """The mesh without its devices: `mesh` is a `jax.sharding.Mesh` or `AbstractMesh`, or sizes by axis name.

    Raises:
      ArgumentError: it is none of these, or a size is no positive whole number.
      UnsupportedError: an axis is of another type than Auto.

    >>> as_mesh({"data": 8, "fsdp": 4}).size
    32
    """
    if isinstance(mesh, Mapping):
        wrong = {name: size for name, size in mesh.items() if not isinstance(name, str) or not _is_size(size)}
        if wrong or not mesh:
            raise ArgumentError(f"mesh={mesh!r}: expected sizes by axis name, such as {{'data': 8, 'fsdp': 8}}")
        # What they are by default depends on JAX's version.
        return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    found = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    if not isinstance(found, AbstractMesh) or not found.axis_names:
        raise ArgumentError(
            f"mesh={mesh!r}: expected a jax.sharding.Mesh or AbstractMesh with named axes, or sizes by axis name, such as "
            "{'data': 8, 'fsdp': 8}"
        )
    others = [name for name, kind in zip(found.axis_names, found.axis_types, strict=True) if kind is not AxisType.Auto]
    if others:
        raise UnsupportedError(
            f"mesh: the axes {', '.join(others)} are not of type Auto, under which the compiler divides what is computed; make "
            "the mesh with axis_types=(jax.sharding.AxisType.Auto,) * n, or give sizes by axis name"
        )
    return found


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def argument_shardings(mesh: AbstractMesh, shardings: Any, params: Any, batch: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A `NamedSharding` for each array of `params` and of `batch`.

    Args:
      shardings: `(for params, for batch[0], …)`, each one `PartitionSpec`, `NamedSharding` or None (replicated) for a whole
        argument, a pytree prefix of them, or a function of the path and the leaf that gives one. What is left out at the end is
        replicated.

    Raises:
      ArgumentError: another form, an axis that the mesh lacks, a dimension that does not divide.

    >>> x = jax.ShapeDtypeStruct((16, 4), "float32")
    >>> mesh = as_mesh({"data": 8})
    >>> argument_shardings(mesh, (None, PartitionSpec("data")), x, (x,))[1][0].shard_shape(x.shape)
    (2, 4)
    """
    expected = "a tuple: for params, then for each argument of batch, such as (PartitionSpec('fsdp'), PartitionSpec('data'))"
    if not isinstance(shardings, tuple) or isinstance(shardings, PartitionSpec):
        raise ArgumentError(f"shardings={shardings!r}: expected {expected}")
    if not 1 <= len(shardings) <= 1 + len(batch):
        raise ArgumentError(
            f"shardings: {len(shardings)} entries for params and {len(batch)} arguments of batch; expected {expected}"
        )
    given = (*shardings, *[None] * (1 + len(batch) - len(shardings)))
    names = ("params", *(f"batch[{index}]" for index in range(len(batch))))
    found = [_of_argument(mesh, one, tree, name) for one, tree, name in zip(given, (params, *batch), names, strict=True)]
    return found[0], tuple(found[1:])


def _of_argument(mesh: AbstractMesh, given: Any, tree: Any, name: str) -> Any:
    leaves, treedef = jax.tree.flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if callable(given) and not _is_spec(given):
        specs = [given(path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    else:
        try:
            # None is a spec in what is given, and no leaf in the argument.
            given = jax.tree.map(lambda one: PartitionSpec() if one is None else one, given, is_leaf=_is_spec)
            specs = jax.tree.leaves(jax.tree_util.tree_broadcast(given, tree, is_leaf=_is_given), is_leaf=_is_given)
        except ValueError as error:
            raise ArgumentError(f"shardings for {name} are no pytree prefix of it: {error}") from error
    return jax.tree.unflatten(
        treedef,
        [
            _checked(mesh, spec, leaf.shape, f"{name}/{path}" if path else name)
            for spec, path, (_, leaf) in zip(specs, paths, leaves, strict=True)
        ],
    )


def _is_spec(value: Any) -> bool:
    return value is None or _is_given(value)


def _is_given(value: Any) -> bool:
    return isinstance(value, PartitionSpec | NamedSharding)


def _checked(mesh: AbstractMesh, given: Any, shape: tuple[int, ...], where: str) -> NamedSharding:
    """`given` as a sharding over `mesh` of an array of `shape`."""
    if not _is_spec(given):
        raise ArgumentError(
            f"shardings: {given!r} for {where}: expected a PartitionSpec, a NamedSharding, or None for replicated"
        )
    if isinstance(given, NamedSharding) and given.memory_kind not in (None, "device"):
        raise UnsupportedError(
            f"shardings: {given} for {where} is in {given.memory_kind}; on a mesh only device memory is served"
        )
    if isinstance(given, NamedSharding) and dict(given.mesh.shape) != dict(mesh.shape):
        raise ArgumentError(
            f"shardings: {given} for {where} is over another mesh than mesh={dict(mesh.shape)}; give its PartitionSpec"
        )
    spec = PartitionSpec() if given is None else given.spec if isinstance(given, NamedSharding) else given
    if len(spec) > len(shape):
        raise ArgumentError(
            f"shardings: {spec} for {where} has {len(spec)} entries, and its shape {list(shape)} {len(shape)} dimensions"
        )
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    for dimension, entry in enumerate(spec):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        lacking = [axis for axis in axes if axis not in sizes]
        if lacking:
            raise ArgumentError(
                f"shardings: {spec} for {where} names the axis {lacking[0]!r}, and the mesh has {', '.join(sizes)}"
            )
        parts = math.prod(sizes[axis] for axis in axes)
        if shape[dimension] % parts:
            raise ArgumentError(
                f"shardings: {spec} for {where} divides dimension {dimension} of {list(shape)} into {parts} parts, and "
                f"{shape[dimension]} is no multiple of that; divide another dimension, or pad it"
            )
    named = [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
    if len(set(named)) < len(named):
        raise ArgumentError(f"shardings: {spec} for {where} names an axis twice; each divides one dimension")
    return NamedSharding(mesh, spec)


def state_shardings(optimizer: Any, state: Any, trained: Any, shardings: Any) -> Any:
    """The shardings of an optimizer's state: an array like a parameter lies as that parameter does, the rest is everywhere.

    `optax.tree_map_params` says which array of the state belongs to which parameter.
    """
    everywhere = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    places = {
        path: (leaf.shape, place)
        for (path, leaf), place in zip(jax.tree.leaves_with_path(trained), jax.tree.leaves(shardings), strict=True)
    }

    def one(path: Any, array: Any) -> Any:
        # A wrapper may mask a parameter (optax.masked), or have several arrays for one (sm3).
        starts = (path[:length] for length in range(len(path), -1, -1))
        shape, place = next((places[start] for start in starts if start in places), (None, everywhere))
        return place if array.shape == shape else everywhere

    return optax.tree_map_params(
        optimizer,
        lambda part: jax.tree.map_with_path(one, part),
        state,
        transform_non_params=lambda _: everywhere,
        is_leaf=lambda _: True,
    )


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
    """What one device holds of `leaf`, as a shape."""
    return jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)
