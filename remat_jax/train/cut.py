"""Arrays cut into equal parts along an axis, so that an array that is divided over devices along it stays divided."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax.errors import ArgumentError


def cut(leaf: Any, n: int, axis: int = 0) -> Any:
    """`leaf` with an axis of the `n` parts behind `axis`: part i has the positions i, i + n, i + 2n, …

    In front of `axis` the new axis would take its sharding: each device would have whole parts, and all of them would compute
    every part.

    >>> cut(jnp.arange(6), 2).tolist()  # the columns are the parts
    [[0, 1], [2, 3], [4, 5]]
    """
    leaf = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    shape = leaf.shape
    return leaf.reshape(*shape[:axis], shape[axis] // n, n, *shape[axis + 1 :])


def check_divides(n: int, length: int, what: str) -> None:
    """Raise ArgumentError unless `n` divides `length`, which is that of `what`."""
    if length == 0 or length % n:
        divisors = [one for one in range(1, length + 1) if length % one == 0]
        near = sorted({*[one for one in divisors if one < n][-1:], *[one for one in divisors if one > n][:1]})
        nearest = f"; the nearest that do: {' and '.join(map(str, near))}" if near else ""
        raise ArgumentError(f"n={n} does not divide {what}{nearest}")


def check_devices(leaf: Any, n: int, axis: int, part: str, positions: str) -> None:
    """Raise ArgumentError if the `positions` of one part of `leaf` do not divide over the devices that `axis` is divided over.

    On mesh axes of type Explicit JAX refuses that in words about a reshape; of others nothing is known while tracing.
    """
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    if sharding is None:
        return
    entry = next(iter(sharding.spec[axis:]), None)
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    devices = math.prod(sharding.mesh.shape[name] for name in names)
    length = leaf.shape[axis]
    if length // n % devices:
        fitting = [one for one in range(1, length + 1) if length % (one * devices) == 0]
        raise ArgumentError(
            f"n={n}: {part} has {length // n} {positions}, which do not divide over the {devices} devices of {entry!r}; n can "
            f"be {', '.join(map(str, fitting))}, or take a larger batch"
        )
