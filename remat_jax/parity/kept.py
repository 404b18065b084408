"""The arrays that only one framework saves for the backward pass: the difference of their residual bytes, array by array."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class KeptAlone:
    """Equal residuals of one framework that have no counterpart in the other.

    Attributes:
        mode, framework: the mode and the framework that save the arrays.
        place: `device` or `host`.
        name: the arrays' origin: `module/path:operator` in PyTorch, a residual's name in JAX.
        shape: the shape of a single array.
        count: the number of arrays.
        bytes: the bytes of all arrays.
    """

    mode: str
    framework: str
    place: str
    name: str
    shape: tuple[int, ...]
    count: int
    bytes: int


class _Array(NamedTuple):
    place: str
    nbytes: int
    name: str
    shape: tuple[int, ...]


def kept_alone(mode: str, saved: Any, residuals: Any) -> list[KeptAlone]:
    """The unpaired arrays, largest first: `saved` is torch_ref's `SavedBytes`, `residuals` a `ResidualTable`.

    Arrays of the two frameworks are paired if they are in the same place and have equal bytes; an array stacked by a scan
    counts once per layer. The unpaired arrays therefore add up to the whole difference, to the byte. Among equal arrays,
    those of the blocks are paired first, so the residuals of norms or losses outside the blocks remain.
    """
    theirs, ours = _by_size(_of_torch(saved)), _by_size(_of_jax(residuals))
    unpaired: list[KeptAlone] = []
    for framework, side, other in (("PyTorch", theirs, ours), ("JAX", ours, theirs)):
        alone = Counter(array for key, arrays in side.items() for array in arrays[len(other.get(key, ())) :])
        unpaired += [
            KeptAlone(mode, framework, array.place, array.name, array.shape, count, count * array.nbytes)
            for array, count in alone.items()
        ]
    return sorted(unpaired, key=lambda arrays: (-arrays.bytes, arrays.framework, arrays.name))


def _by_size(arrays: Iterable[_Array]) -> dict[tuple[str, int], list[_Array]]:
    by_size: dict[tuple[str, int], list[_Array]] = defaultdict(list)
    for array in arrays:
        by_size[array.place, array.nbytes].append(array)
    return by_size


def _of_torch(saved: Any) -> Iterator[_Array]:
    for entry in saved.entries:
        if entry.place in ("device", "host"):
            # Only the middle of aten.native_layer_norm.default is informative.
            operator = entry.operator.split(".")[1] if entry.operator.count(".") > 1 else entry.operator
            yield _Array(entry.place, entry.nbytes, f"{entry.module}:{operator}", entry.shape)


def _of_jax(residuals: Any) -> Iterator[_Array]:
    """JAX's residuals one by one; those of blocks and scans, whose names are numbered, come first."""
    for row in sorted(residuals, key=lambda row: "#" not in row.name):
        if row.action == "recompute" or not math.prod(row.shape):
            continue
        layers, shape = (row.shape[0], row.shape[1:]) if row.scanned and row.shape else (1, row.shape)
        count = row.count * layers
        place = "host" if row.action == "offload" else "device"
        yield from [_Array(place, row.bytes // count, row.name, tuple(shape))] * count
