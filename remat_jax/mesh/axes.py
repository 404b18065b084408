"""The axes of a mesh by name, and the default shardings of a workload without shardings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from remat_jax.errors import ArgumentError, UnsupportedError


def as_mesh(mesh: Any) -> AbstractMesh:
    """The mesh without its devices: `mesh` is a `jax.sharding.Mesh` or `AbstractMesh`, or sizes by axis name, as text or data.

    Raises:
      ArgumentError: `mesh` is none of these, or a size is not a positive integer.
      UnsupportedError: an axis is not of type Auto.

    >>> as_mesh({"data": 8, "fsdp": 4}).size
    32
    >>> as_mesh("data=8, fsdp=4").axis_names
    ('data', 'fsdp')
    """
    if isinstance(mesh, str):
        mesh = _written(mesh)
    if isinstance(mesh, Mapping):
        wrong = {name: size for name, size in mesh.items() if not isinstance(name, str) or not _is_size(size)}
        if wrong or not mesh:
            raise ArgumentError(f"mesh={mesh!r}: expected sizes by axis name, such as {{'data': 8, 'fsdp': 8}}")
        # The default axis type depends on JAX's version.
        return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    named = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    if not isinstance(named, AbstractMesh) or not named.axis_names:
        raise ArgumentError(
            f"mesh={mesh!r}: expected a jax.sharding.Mesh or AbstractMesh with named axes, or sizes by axis name, such as "
            "{'data': 8, 'fsdp': 8}"
        )
    names = [name for name, kind in zip(named.axis_names, named.axis_types, strict=True) if kind is not AxisType.Auto]
    if names:
        raise UnsupportedError(
            f"mesh: the axes {', '.join(names)} do not have the type Auto, which lets the compiler partition the computation; "
            "make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * n, or give sizes by axis name"
        )
    return named


def _written(text: str) -> dict[str, int]:
    """The sizes by axis name in a text such as `data=8,fsdp=8`."""
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


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def shown(mesh: AbstractMesh) -> str:
    """The axes and sizes as a text for `as_mesh`.

    >>> shown(as_mesh({"data": 8, "fsdp": 4}))
    'data=8,fsdp=4'
    """
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items())


REPLICATED, DIVIDED = "data", "fsdp"
"""The axis names with a default meaning: the batch is divided over both axes, parameters over the second."""


def usual_shardings(mesh: AbstractMesh, params: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Default shardings: the batch over `data` and `fsdp`, each parameter's largest dimension that divides over `fsdp`.

    The batch size is the first dimension of the batch's first array. Arrays of the batch with a different first dimension, and
    parameters that no dimension divides, are replicated. PyTorch's hybrid sharding and MaxText use the two names in this way.

    Raises:
      ArgumentError: an axis has another name, or the batch does not divide.

    >>> from remat_jax.mesh import as_mesh
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
    parts = dict(mesh.shape).get(DIVIDED, 1)
    # An old-style random key, uint32[2], is not an array of rows.
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


def specs_for(mesh: AbstractMesh, shardings: tuple[Any, ...], known: AbstractMesh) -> tuple[Any, ...]:
    """The specs of `shardings`, which are over the mesh `known`, for use over `mesh`.

    Raises:
      ArgumentError: `mesh` lacks an axis of the specs, or has an axis that is neither in the specs nor in `known`: the devices
        along that axis would do the same work.
    """
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    entries = [entry for sharding in jax.tree.leaves(shardings) for entry in sharding.spec if entry is not None]
    named = {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry)}
    lacking = [axis for axis in known.axis_names if axis in named and axis not in mesh.axis_names]
    if lacking:
        raise ArgumentError(
            f"mesh={shown(mesh)}: the workload's shardings also use {', '.join(map(repr, lacking))}; give each of the "
            f"workload's axes ({', '.join(known.axis_names)}) a size, 1 if it divides nothing"
        )
    idle = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in named and axis not in known.axis_names]
    if idle:
        raise ArgumentError(
            f"mesh={shown(mesh)}: no array is partitioned over {', '.join(map(repr, idle))}; the workload's axes are "
            f"{', '.join(known.axis_names)}"
        )
    return specs
