"""A function of pytrees as a jaxpr of flat arrays, with the path of every array."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_jax import compat

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Traced:
    """What tracing gives.

    Attributes:
      jaxpr: closed; its inputs and outputs are the arrays of the arguments and the result, all of them in device memory.
      values: the arrays of the arguments, where they are.
      in_paths, out_paths: their paths; the first key of `in_paths` is the argument's position.
      finish: the function's result, given the jaxpr's outputs.
    """

    jaxpr: Any
    values: tuple[Any, ...]
    in_paths: tuple[Path, ...]
    out_paths: tuple[Path, ...]
    finish: Callable[[Sequence[Any]], Any]


def trace(function: Callable[..., Any], *args: Any) -> Traced:
    """`function(*args)` traced with every array in device memory; what is no array (strings, functions) stays as it is."""
    leaves, treedef = jax.tree.flatten_with_path(args)
    places = [index for index, (_, leaf) in enumerate(leaves) if compat.is_array(leaf)]
    results: list[tuple[list[tuple[Path, Any]], Any]] = []

    def flat(*values: Any) -> list[Any]:
        filled = [leaf for _, leaf in leaves]
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        outputs, structure = jax.tree.flatten_with_path(function(*jax.tree.unflatten(treedef, filled)))
        arrays = [out for _, out in outputs if compat.is_array(out)]
        # None stands for an array: the trace must not be kept alive.
        results.append(([(path, None if compat.is_array(out) else out) for path, out in outputs], structure))
        return arrays

    values = tuple(leaves[index][1] for index in places)
    jaxpr = jax.make_jaxpr(flat)(*map(compat.on_device, values))
    outputs, structure = results[-1]

    def finish(found: Sequence[Any]) -> Any:
        arrays = iter(found)
        return jax.tree.unflatten(structure, [next(arrays) if out is None else out for _, out in outputs])

    in_paths = tuple(leaves[index][0] for index in places)
    return Traced(jaxpr, values, in_paths, tuple(path for path, out in outputs if out is None), finish)
