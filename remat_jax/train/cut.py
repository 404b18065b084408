"""Cutting arrays into equal parts along an axis, so that an array that is sharded along the axis stays sharded."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax.errors import ArgumentError


def cut(leaf: Any, n: int, axis: int = 0) -> Any:
    """`leaf` with a new axis of the `n` parts after `axis`: part i has the positions i, i + n, i + 2n, …

    A new axis before `axis` would take over its sharding: each device would have whole parts, and all devices would compute
    every part.

    >>> cut(jnp.arange(6), 2).tolist()  # the columns are the parts
    [[0, 1], [2, 3], [4, 5]]
    """
    leaf = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    shape = leaf.shape
    return leaf.reshape(*shape[:axis], shape[axis] // n, n, *shape[axis + 1 :])


def check_divides(n: int, length: int, what: str) -> None:
    """Raise ArgumentError unless `n` divides `length`, the length of `what`."""
    if length == 0 or length % n:
        divisors = [count for count in range(1, length + 1) if length % count == 0]
        near = sorted({*[count for count in divisors if count < n][-1:], *[count for count in divisors if count > n][:1]})
        nearest = f"; the nearest divisors: {' and '.join(map(str, near))}" if near else ""
        raise ArgumentError(f"n={n} does not divide {what}{nearest}")


def check_devices(leaf: Any, n: int, axis: int, part: str, positions: str) -> None:
    """Raise ArgumentError if the `positions` of one part of `leaf` do not divide over the devices of `axis`.

    On mesh axes of type Explicit JAX's own error is about a reshape. Other shardings are unknown while tracing.
    """
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    if sharding is None:
        return
    entry = next(iter(sharding.spec[axis:]), None)
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    devices = math.prod(sharding.mesh.shape[name] for name in names)
    length = leaf.shape[axis]
    if length // n % devices:
        fitting = [count for count in range(1, length + 1) if length % (count * devices) == 0]
        raise ArgumentError(
            f"n={n}: {part} has {length // n} {positions}, which do not divide over the {devices} devices of {entry!r}; n can "
            f"be {', '.join(map(str, fitting))}, or take a larger batch"
        )
