"""The named axes of a mesh, in all forms in which they may be given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from remat_jax.errors import ArgumentError, UnsupportedError


def as_mesh(mesh: Any) -> AbstractMesh:
    """The mesh without its devices: `mesh` is a `jax.sharding.Mesh` or `AbstractMesh`, or sizes by axis name, as text or data.

    Raises:
      ArgumentError: it is none of these, or a size is no positive whole number.
      UnsupportedError: an axis is of another type than Auto.

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


def _written(text: str) -> dict[str, int]:
    """The sizes by axis name that a text such as `data=8,fsdp=8` says."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (one.strip() for one in part.partition("="))
        if not equals or not name.isidentifier() or not re.fullmatch(r"0*[1-9][0-9]{0,6}", size):
            raise ArgumentError(f"mesh={text!r}: {part.strip()!r} is no axis with its size; expected such as 'data=8,fsdp=8'")
        if name in found:
            raise ArgumentError(f"mesh={text!r} has the axis {name!r} twice; expected such as 'data=8,fsdp=8'")
        found[name] = int(size)
    return found


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def shown(mesh: AbstractMesh) -> str:
    """The axes and sizes as `as_mesh` takes them.

    >>> shown(as_mesh({"data": 8, "fsdp": 4}))
    'data=8,fsdp=4'
    """
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items())
