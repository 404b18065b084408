"""The mesh of a workload, the shardings of its arguments, and one device's shard of each argument."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from remat_jax import compat
from remat_jax.errors import ArgumentError, UnsupportedError

REPLICATED, DIVIDED = "data", "fsdp"
"""The axis names with a default meaning: the batch is partitioned over `data` and `fsdp`, parameters over `fsdp` only."""


# --- meshes -----------------------------------------------------------------------------------------------------------


def as_mesh(mesh: Any) -> AbstractMesh:
    """Convert a `jax.sharding.Mesh`, an `AbstractMesh`, or sizes by axis name (a mapping or a text) to an `AbstractMesh`.

    >>> as_mesh({"data": 8, "fsdp": 4}).size, shown(as_mesh("data=8, fsdp=4"))
    (32, 'data=8,fsdp=4')
    """
    if isinstance(mesh, str):
        mesh = _written(mesh)
    if isinstance(mesh, Mapping):
        sized = [
            isinstance(name, str) and isinstance(size, int) and not isinstance(size, bool) and size > 0
            for name, size in mesh.items()
        ]
        if not sized or not all(sized):
            raise ArgumentError(f"mesh={mesh!r}: expected sizes by axis name, such as {{'data': 8, 'fsdp': 8}}")
        # Pass the axis types: their default depends on JAX's version.
        return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    abstract_mesh = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    if not isinstance(abstract_mesh, AbstractMesh) or not abstract_mesh.axis_names:
        raise ArgumentError(
            f"mesh={mesh!r}: expected a jax.sharding.Mesh or AbstractMesh with named axes, or sizes by axis name, such as "
            "{'data': 8, 'fsdp': 8}"
        )
    types = zip(abstract_mesh.axis_names, abstract_mesh.axis_types, strict=True)
    if refused := [name for name, kind in types if kind is not AxisType.Auto]:
        raise UnsupportedError(
            f"mesh: the axes {', '.join(refused)} do not have the type Auto, which lets the compiler partition the "
            "computation; make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * n, or give sizes by axis name"
        )
    return abstract_mesh


def _written(text: str) -> dict[str, int]:
    """Parse a text such as `data=8,fsdp=8` to a dict from axis name to size."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not name.isidentifier() or not re.fullmatch(r"0*[1-9][0-9]{0,6}", size):
            raise ArgumentError(
                f"mesh={text!r}: {part.strip()!r} is not an axis with its size; expected text such as 'data=8,fsdp=8'"
            )
        if name in sizes:
            raise ArgumentError(f"mesh={text!r} has the axis {name!r} twice; expected text such as 'data=8,fsdp=8'")
        sizes[name] = int(size)
    return sizes


def shown(mesh: AbstractMesh) -> str:
    """The axes and sizes as a text for `as_mesh`."""
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items())


# --- shardings --------------------------------------------------------------------------------------------------------


def on_mesh(
    mesh: Any,
    shardings: Any,
    arguments: tuple[Any, ...],
    names: tuple[str, ...],
    usual: Callable[[AbstractMesh], tuple[Any, ...]],
) -> tuple[AbstractMesh | None, tuple[Any, ...]]:
    """A workload's mesh, and its tuple of shardings, one for each of `arguments`. For a single device: (None, ()).

    Without `shardings`, they are those of the arrays, and so is the mesh if it is not given. If the arrays have none either,
    the shardings are `usual` of the mesh.
    """
    if shardings is None:
        mesh_of_arrays, shardings = _mesh_and_shardings_of(arguments, names)
        mesh = mesh_of_arrays if mesh is None else mesh
        if mesh is None:
            return None, ()
        if shardings is None:
            shardings = usual(as_mesh(mesh))
    if mesh is None:
        raise ArgumentError("shardings without mesh: give the mesh too, or neither for a single device")
    for name, argument in zip(names, arguments, strict=True):
        if any(map(compat.is_on_host, jax.tree.leaves(argument))):
            raise UnsupportedError(f"{name}: arrays in host memory are not supported on a mesh; give them in device memory")
    abstract_mesh = as_mesh(mesh)
    return abstract_mesh, argument_shardings(abstract_mesh, shardings, arguments, names)


def argument_names(batch: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of a loss's arguments in errors."""
    return ("params", *(f"batch[{index}]" for index in range(len(batch))))


def _mesh_and_shardings_of(arguments: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, Any]:
    """The mesh of the arrays on several devices (sizes by axis name), and the `PartitionSpec`s of all arrays.

    Arrays on one device get an empty spec. (None, None) if no array is on several devices.
    """

    def place(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None

    placed = filter(None, map(place, jax.tree.leaves(arguments)))
    by_shape = {tuple(sharding.mesh.shape.items()): sharding.mesh for sharding in placed}
    meshes = [dict(shape) for shape in by_shape]
    if len(meshes) > 1:
        raise ArgumentError(
            f"{names[0]} to {names[-1]} are on several meshes, {' and '.join(map(str, meshes))}: put all on one mesh, or give "
            "mesh=… and shardings=…"
        )
    if not meshes:
        return None, None
    (mesh,) = by_shape.values()
    device = mesh.abstract_mesh.abstract_device
    abstract_mesh = as_mesh(meshes[0])
    if device is not None and device.platform != "cpu":
        # A shard_map over the mesh of GPUs or TPUs must be traced under a mesh of such devices.
        abstract_mesh = abstract_mesh.update(abstract_device=device)
    return abstract_mesh, jax.tree.map(lambda leaf: sharding.spec if (sharding := place(leaf)) else PartitionSpec(), arguments)


def argument_shardings(
    mesh: AbstractMesh, shardings: Any, arguments: tuple[Any, ...], names: tuple[str, ...]
) -> tuple[Any, ...]:
    """A `NamedSharding` for each array of `arguments`, called `names` in errors; `shardings` is as for `Workload`.

    >>> x = jax.ShapeDtypeStruct((16, 4), "float32")
    >>> mesh = AbstractMesh((8,), ("data",))
    >>> argument_shardings(mesh, (None, PartitionSpec("data")), (x, x), ("params", "batch[0]"))[1].shard_shape(x.shape)
    (2, 4)
    """
    example = "(PartitionSpec('fsdp'), PartitionSpec('data'))"
    expected = f"a tuple with an entry for each of {', '.join(names)}, such as {example}"
    if not isinstance(shardings, tuple) or isinstance(shardings, PartitionSpec):
        raise ArgumentError(f"shardings={shardings!r}: expected {expected}")
    if not 1 <= len(shardings) <= len(names):
        raise ArgumentError(f"shardings: {len(shardings)} entries; expected {expected}")
    entries = itertools.zip_longest(shardings, arguments, names)
    return tuple(_of_argument(mesh, entry, tree, name) for entry, tree, name in entries)


def _of_argument(mesh: AbstractMesh, shardings: Any, tree: Any, name: str) -> Any:
    leaves, treedef = jax.tree.flatten_with_path(tree)
    arrays = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
    if callable(shardings) and not _is_spec(shardings):
        specs = [shardings(path, leaf) for path, leaf in arrays]
    else:
        try:
            # In `shardings`, None is a leaf that means replicated; in `tree`, None is an empty subtree.
            shardings = jax.tree.map(lambda spec: PartitionSpec() if spec is None else spec, shardings, is_leaf=_is_spec)
            specs = jax.tree.leaves(jax.tree_util.tree_broadcast(shardings, tree, is_leaf=_is_given), is_leaf=_is_given)
        except ValueError as error:
            raise ArgumentError(f"shardings for {name} are not a pytree prefix of it: {error}") from error
    pairs = zip(specs, arrays, strict=True)
    checked = [_checked(mesh, spec, np.shape(leaf), f"{name}/{path}" if path else name) for spec, (path, leaf) in pairs]
    return jax.tree.unflatten(treedef, checked)


def _is_spec(value: Any) -> bool:
    return value is None or _is_given(value)


def _is_given(value: Any) -> bool:
    return isinstance(value, PartitionSpec | NamedSharding)


def _checked(mesh: AbstractMesh, sharding: Any, shape: tuple[int, ...], where: str) -> NamedSharding:
    """Check `sharding` for an array of `shape` and return it as a `NamedSharding` on `mesh`. Errors call the array `where`."""
    if not _is_spec(sharding):
        raise ArgumentError(
            f"shardings: {sharding!r} for {where}: expected a PartitionSpec, a NamedSharding, or None for replicated"
        )
    if isinstance(sharding, NamedSharding) and sharding.memory_kind not in (None, "device"):
        raise UnsupportedError(
            f"shardings: {sharding} for {where} is in {sharding.memory_kind}; a workload on a mesh supports only device memory"
        )
    if isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) != dict(mesh.shape):
        raise ArgumentError(
            f"shardings: {sharding} for {where} is on a different mesh than mesh={dict(mesh.shape)}; give only its "
            "PartitionSpec"
        )
    spec = PartitionSpec() if sharding is None else sharding.spec if isinstance(sharding, NamedSharding) else sharding

    def wrong(reason: str) -> ArgumentError:
        return ArgumentError(f"shardings: {spec} for {where} {reason}")

    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise wrong("has unreduced or reduced axes, but an argument holds no partial sums: give the spec without these axes")
    if len(spec) > len(shape):
        raise wrong(f"has {len(spec)} entries, but the shape {list(shape)} has {len(shape)} dimensions")
    for dimension, entry in enumerate(spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise wrong(
                f"leaves dimension {dimension} unconstrained, but an argument has a fixed layout: give the axes that divide "
                "this dimension, or None"
            )
        axes = _axes([entry])
        lacking = [axis for axis in axes if axis not in mesh.shape]
        if lacking:
            raise wrong(f"names the axis {lacking[0]!r}, but the mesh has {', '.join(mesh.shape)}")
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dimension] % parts:
            raise wrong(
                f"divides dimension {dimension} of {list(shape)} into {parts} parts, but {shape[dimension]} is not a multiple "
                f"of {parts}; pad this dimension, or divide another"
            )
    if len(set(_axes(spec))) < len(_axes(spec)):
        raise wrong("names an axis twice; an axis can divide only one dimension")
    return NamedSharding(mesh, spec)


def _axes(entries: Iterable[Any]) -> list[str]:
    """The mesh axes in the entries of a `PartitionSpec`, as one flat list."""
    return [axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry or ())]


def state_shardings(optimizer: Any, state: Any, trained: Any, shardings: Any) -> Any:
    """The shardings of an optimizer's state; `shardings` are those of `trained`, the trained parameters.

    A state array with the shape of its parameter is sharded like the parameter; other state arrays are replicated. For a state
    array in host memory, the sharding has the memory kind `pinned_host`.
    """
    replicated = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    places = {
        path: (leaf.shape, place)
        for (path, leaf), place in zip(jax.tree.leaves_with_path(trained), jax.tree.leaves(shardings), strict=True)
    }

    def sharding_of(path: Any, array: Any) -> Any:
        # A state array's path begins with its parameter's path. It is longer if the optimizer has a mask (optax.masked) or
        # several arrays (sm3) for one parameter. So the longest prefix that is a parameter's path is looked up.
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

    The result has the function's `__wrapped__`: by its code, `apply.effect` tells functions apart.
    """

    @functools.wraps(function, updated=())
    def traced(*args: Any, **kwargs: Any) -> Any:
        if mesh is None:
            with compat.lacking_mesh_explained():
                return function(*args, **kwargs)
        check_context(mesh.size, f"a workload on a mesh of {mesh.size} devices ({dict(mesh.shape)})")
        with jax.sharding.use_abstract_mesh(compat.with_lowered_device(mesh)):
            return function(*args, **kwargs)

    return traced


def check_context(devices: int, called: str) -> None:
    """Raise ArgumentError if the active mesh does not have `devices` devices: JAX cannot trace under a mesh of another size."""
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
    """The shape and dtype of one device's shard of `leaf`, in the same memory space as `leaf`."""
    return compat.struct(sharding.shard_shape(leaf.shape), leaf.dtype, leaf)


# --- other meshes than the workload's own ------------------------------------------------------------------------------


def usual_shardings(mesh: AbstractMesh, params: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Default shardings: the batch over `data` and `fsdp`, each parameter over `fsdp` along its largest divisible dimension.

    Two kinds of arrays are replicated: parameters without a divisible dimension, and batch arrays whose first dimension differs
    from that of the first batch array. PyTorch's hybrid sharding and MaxText use the two axis names in this way.

    >>> x = jax.ShapeDtypeStruct((16, 4), "float32")
    >>> tuple(map(tuple, usual_shardings(as_mesh("data=2,fsdp=4"), x, (x,))))
    (('fsdp', None), (('data', 'fsdp'),))
    """
    unnamed = [name for name in mesh.axis_names if name not in (REPLICATED, DIVIDED)]
    if unnamed:
        raise ArgumentError(
            f"mesh={shown(mesh)}: the workload does not say which arrays are partitioned over {', '.join(unnamed)}. Only the "
            f"names {REPLICATED!r} and {DIVIDED!r} imply this; for other axes write Workload(…, mesh={{…}}, shardings=(…))"
        )
    parts = mesh.shape.get(DIVIDED, 1)
    # An old-style random key, uint32[2], has no batch dimension.
    arrays = [leaf for leaf in jax.tree.leaves(batch) if leaf.shape and (leaf.shape, leaf.dtype) != ((2,), "uint32")]
    rows = arrays[0].shape[0] if arrays else 0
    if not rows or rows % mesh.size:
        raise ArgumentError(
            f"mesh={shown(mesh)} divides the batch into {mesh.size} parts, but its first array has {rows} rows: give a batch "
            f"with a multiple of {mesh.size} rows, or another mesh"
        )

    def of_parameter(leaf: Any) -> PartitionSpec:
        dividing = [axis for axis, size in enumerate(leaf.shape) if parts > 1 and size % parts == 0]
        largest = max(dividing, key=lambda axis: leaf.shape[axis], default=None)
        return PartitionSpec(*(DIVIDED if axis == largest else None for axis in range(len(leaf.shape)) if largest is not None))

    def of_batch(leaf: Any) -> PartitionSpec:
        return PartitionSpec(mesh.axis_names) if leaf.shape and leaf.shape[0] == rows else PartitionSpec()

    return jax.tree.map(of_parameter, params), *jax.tree.map(of_batch, batch)


def shardings_of_loss(mesh: AbstractMesh, shardings: Any, params: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The given `shardings`, checked; `usual_shardings` if they are None."""
    if shardings is None:
        return usual_shardings(mesh, params, batch)
    return argument_shardings(mesh, shardings, (params, *batch), argument_names(batch))


def usual_shardings_of_step(
    mesh: AbstractMesh, arguments: tuple[Any, ...], trained: set[tuple[int, ...]], names: tuple[str, ...]
) -> tuple[Any, ...]:
    """`usual_shardings` for the arguments of a training step; `trained` are the shapes of the arrays that it trains.

    The arguments up to the last with an array of such a shape are parameters and state; the later ones are the batch.

    >>> w, x = jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((16, 4), "float32")
    >>> usual_shardings_of_step(as_mesh("fsdp=4"), ((w, w), x), {w.shape}, ("args[0]", "args[1]"))
    ((P(None, 'fsdp'), P(None, 'fsdp')), P('fsdp',))
    """
    states = [any(leaf.shape in trained for leaf in jax.tree.leaves(argument)) for argument in arguments]
    first = max((place + 1 for place, is_state in enumerate(states) if is_state), default=0)
    params, batch = arguments[:first], arguments[first:]
    of_params, *of_batch = usual_shardings(mesh, params, batch)
    parted = [any(jax.tree.leaves(specs, is_leaf=_is_given)) for specs in of_batch]
    for name, argument, is_parted in zip(names[first:], batch, parted, strict=True):
        if not is_parted and any(leaf.ndim > 1 for leaf in jax.tree.leaves(argument)):
            raise ArgumentError(
                f"mesh={shown(mesh)}: it is unknown how {name} is partitioned, which has not as many rows as "
                f"{names[first + parted.index(True)]}; give the shardings, as in Workload.from_step(step, *args, mesh=…, "
                "shardings=(PartitionSpec('fsdp'), …))"
            )
    return *of_params, *of_batch


def specs_for(mesh: AbstractMesh, shardings: tuple[Any, ...], original: AbstractMesh) -> tuple[Any, ...]:
    """The `PartitionSpec`s of `shardings` (on the mesh `original`) if they can be used on `mesh`; else ArgumentError."""
    named = {axis for sharding in jax.tree.leaves(shardings) for axis in _axes(sharding.spec)}
    lacking = [axis for axis in original.axis_names if axis in named and axis not in mesh.axis_names]
    if lacking:
        raise ArgumentError(
            f"mesh={shown(mesh)}: the workload's shardings also use {', '.join(map(repr, lacking))}; give each of the "
            f"workload's axes ({', '.join(original.axis_names)}) a size, 1 if it divides nothing"
        )
    idle = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in named and axis not in original.axis_names]
    if idle:
        raise ArgumentError(
            f"mesh={shown(mesh)}: no array is partitioned over {', '.join(map(repr, idle))}; the workload's axes are "
            f"{', '.join(original.axis_names)}"
        )
    return jax.tree.map(lambda sharding: sharding.spec, shardings)
