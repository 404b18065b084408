"""The shardings of a step's arguments on a mesh: parameters, batch, optimizer state; tracing under that mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from remat_jax import compat
from remat_jax.errors import ArgumentError, UnsupportedError
from remat_jax.mesh.axes import as_mesh


def on_mesh(mesh: Any, shardings: Any, params: Any, batch: tuple[Any, ...]) -> tuple[AbstractMesh | None, tuple[Any, ...]]:
    """The mesh of a workload, and the shardings of its parameters and batch; None and () for a single device.

    Without `mesh` and `shardings` they are those of the arrays.

    Raises:
      ArgumentError: one of the two is missing, they do not fit the arrays, or the arrays are on several meshes.
      UnsupportedError: an array is in host memory.
    """
    if mesh is None and shardings is None:
        mesh, shardings = _mesh_and_shardings_of(params, batch)
    if mesh is None and shardings is None:
        return None, ()
    if mesh is None or shardings is None:
        given, lacking = ("shardings", "mesh") if mesh is None else ("mesh", "shardings")
        raise ArgumentError(f"{given} without {lacking}: they belong together; give both, or neither for a single device")
    if any(compat.is_on_host(leaf) for leaf in jax.tree.leaves((params, batch))):
        raise UnsupportedError("params or batch: arrays in host memory on a mesh are not served; give them in device memory")
    abstract_mesh = as_mesh(mesh)
    of_params, of_batch = argument_shardings(abstract_mesh, shardings, params, batch)
    return abstract_mesh, (of_params, *of_batch)


def _mesh_and_shardings_of(params: Any, batch: tuple[Any, ...]) -> tuple[Any, Any]:
    """The axes by name and the specs of arrays that are on a mesh of several devices; (None, None) without such arrays."""

    def place(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None

    placed = [one for leaf in jax.tree.leaves((params, batch)) if (one := place(leaf)) is not None]
    sizes = list({tuple(one.mesh.shape.items()): None for one in placed})
    if len(sizes) > 1:
        raise ArgumentError(
            f"params and batch are on several meshes, {' and '.join(str(dict(one)) for one in sizes)}: put them on one, or "
            "give mesh=… and shardings=…"
        )
    if not sizes:
        return None, None
    return dict(sizes[0]), jax.tree.map(lambda leaf: one.spec if (one := place(leaf)) else PartitionSpec(), (params, *batch))


def argument_shardings(mesh: AbstractMesh, shardings: Any, params: Any, batch: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A `NamedSharding` for each array of `params` and of `batch`.

    Args:
      shardings: `(for params, for batch[0], …)`. Each entry is a `PartitionSpec`, `NamedSharding` or None (replicated) for a
        whole argument, a pytree prefix of these, or a function of the path and the leaf that returns one. Arguments without an
        entry are replicated.

    Raises:
      ArgumentError: `shardings` has another form, the mesh lacks an axis, or an axis does not divide a dimension.

    >>> x = jax.ShapeDtypeStruct((16, 4), "float32")
    >>> mesh = AbstractMesh((8,), ("data",))
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
    placed = [_of_argument(mesh, entry, tree, name) for entry, tree, name in zip(given, (params, *batch), names, strict=True)]
    return placed[0], tuple(placed[1:])


def _of_argument(mesh: AbstractMesh, given: Any, tree: Any, name: str) -> Any:
    leaves, treedef = jax.tree.flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if callable(given) and not _is_spec(given):
        specs = [given(path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    else:
        try:
            # In `given` None is a spec; in the argument it is not a leaf.
            given = jax.tree.map(lambda spec: PartitionSpec() if spec is None else spec, given, is_leaf=_is_spec)
            specs = jax.tree.leaves(jax.tree_util.tree_broadcast(given, tree, is_leaf=_is_given), is_leaf=_is_given)
        except ValueError as error:
            raise ArgumentError(f"shardings for {name} are not a pytree prefix of it: {error}") from error
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
    """`given` as a sharding over `mesh` for an array of `shape`."""
    if not _is_spec(given):
        raise ArgumentError(
            f"shardings: {given!r} for {where}: expected a PartitionSpec, a NamedSharding, or None for replicated"
        )
    if isinstance(given, NamedSharding) and given.memory_kind not in (None, "device"):
        raise UnsupportedError(
            f"shardings: {given} for {where} is in {given.memory_kind}; a workload on a mesh supports only device memory"
        )
    if isinstance(given, NamedSharding) and dict(given.mesh.shape) != dict(mesh.shape):
        raise ArgumentError(
            f"shardings: {given} for {where} has another mesh than mesh={dict(mesh.shape)}; give its PartitionSpec"
        )
    spec = PartitionSpec() if given is None else given.spec if isinstance(given, NamedSharding) else given
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise ArgumentError(
            f"shardings: {spec} for {where} has unreduced or reduced axes, but an argument holds no partial sums: give the "
            "spec without these axes"
        )
    if len(spec) > len(shape):
        raise ArgumentError(
            f"shardings: {spec} for {where} has {len(spec)} entries, but the shape {list(shape)} has {len(shape)} dimensions"
        )
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    for dimension, entry in enumerate(spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ArgumentError(
                f"shardings: {spec} for {where} leaves dimension {dimension} unconstrained, but an argument has a fixed "
                "layout: give the axes that divide it, or None"
            )
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        lacking = [axis for axis in axes if axis not in sizes]
        if lacking:
            raise ArgumentError(
                f"shardings: {spec} for {where} names the axis {lacking[0]!r}, but the mesh has {', '.join(sizes)}"
            )
        parts = math.prod(sizes[axis] for axis in axes)
        if shape[dimension] % parts:
            raise ArgumentError(
                f"shardings: {spec} for {where} divides dimension {dimension} of {list(shape)} into {parts} parts, but "
                f"{shape[dimension]} is not a multiple of {parts}; divide another dimension, or pad it"
            )
    named = [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
    if len(set(named)) < len(named):
        raise ArgumentError(f"shardings: {spec} for {where} names an axis twice; an axis can divide only one dimension")
    return NamedSharding(mesh, spec)


def state_shardings(optimizer: Any, state: Any, trained: Any, shardings: Any) -> Any:
    """The shardings of an optimizer's state: its parameter's sharding for an array of the same shape, else replicated.

    `optax.tree_map_params` maps each array of the state to its parameter. Arrays in host memory have the same sharding there.
    """
    replicated = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    places = {
        path: (leaf.shape, place)
        for (path, leaf), place in zip(jax.tree.leaves_with_path(trained), jax.tree.leaves(shardings), strict=True)
    }

    def sharding_of(path: Any, array: Any) -> Any:
        # Match prefixes: a wrapper may mask a parameter (optax.masked) or have several arrays for one parameter (sm3).
        prefixes = (path[:length] for length in range(len(path), -1, -1))
        shape, place = next((places[start] for start in prefixes if start in places), (None, replicated))
        return in_its_memory(array, place if array.shape == shape else replicated)

    def in_its_memory(array: Any, place: NamedSharding) -> NamedSharding:
        return place.with_memory_kind("pinned_host") if compat.is_on_host(array) else place

    return optax.tree_map_params(
        optimizer,
        lambda part: jax.tree.map_with_path(sharding_of, part),
        state,
        transform_non_params=lambda array: in_its_memory(array, replicated),
        is_leaf=lambda _: True,
    )


def under(mesh: AbstractMesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` traced under `mesh`, so that a bare `PartitionSpec` in its constraints refers to this mesh.

    Raises:
      ArgumentError: on a call under a mesh of a different size.
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
    """Refuse a surrounding `jax.set_mesh` whose size is not `devices`: JAX cannot replace it by a mesh of a different size.

    Raises:
      ArgumentError: with both sizes; the message describes the request as `called`.
    """
    active = jax.sharding.get_abstract_mesh()
    if not active.empty and active.size != devices:
        raise ArgumentError(
            f"jax.set_mesh: a mesh of {active.size} devices ({dict(active.shape)}) is active, and {called} cannot be traced "
            "under it: make this call outside jax.set_mesh; Workload(…, mesh=…) needs no active mesh"
        )


def pinned(tree: Any, shardings: Any) -> Any:
    """Constrain every array of `tree` to its sharding in `shardings`, a pytree of the same structure."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def local_struct(leaf: Any, sharding: NamedSharding) -> Any:
    """One device's shard of `leaf`, as a shape in the memory of `leaf`."""
    shape = sharding.shard_shape(leaf.shape)
    if compat.is_on_host(leaf):
        return jax.core.ShapedArray(shape, leaf.dtype, memory_space=jax.memory.Space.Host)
    return jax.ShapeDtypeStruct(shape, leaf.dtype)
