"""What only one framework keeps between the passes: the difference of their residual bytes, array by array."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class KeptAlone:
    """Arrays that one framework keeps and the other has no counterpart of.

    Attributes:
        mode, framework: whose they are, and in which mode.
        place: `device` or `host`.
        name: what made them: `module/path:operator` of PyTorch, a residual's name of JAX.
        shape: of one of them.
        count: how many there are.
        bytes: of all together.
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
    """Tell apart what both keep and what only one does: `saved` is torch_ref's `SavedBytes`, `residuals` a `ResidualTable`.

    An array of one framework stands for one of the other that lies in the same place and has as many bytes; arrays that a
    scan stacks are one for each layer. So what remains on either side adds up to the whole difference, to the byte. Of
    several alike, those of the blocks are paired first: what a norm or a loss keeps outside is what remains. Largest first.
    """
    theirs, ours = _by_size(_of_torch(saved)), _by_size(_of_jax(residuals))
    found: list[KeptAlone] = []
    for framework, side, other in (("PyTorch", theirs, ours), ("JAX", ours, theirs)):
        alone = Counter(array for key, arrays in side.items() for array in arrays[len(other.get(key, ())) :])
        found += [
            KeptAlone(mode, framework, array.place, array.name, array.shape, count, count * array.nbytes)
            for array, count in alone.items()
        ]
    return sorted(found, key=lambda one: (-one.bytes, one.framework, one.name))


def _by_size(arrays: Iterable[_Array]) -> dict[tuple[str, int], list[_Array]]:
    found: dict[tuple[str, int], list[_Array]] = defaultdict(list)
    for array in arrays:
        found[array.place, array.nbytes].append(array)
    return found


def _of_torch(saved: Any) -> Iterator[_Array]:
    for entry in saved.entries:
        if entry.place in ("device", "host"):
            # aten.native_layer_norm.default: neither the library nor the overload says anything.
            operator = entry.operator.split(".")[1] if entry.operator.count(".") > 1 else entry.operator
            yield _Array(entry.place, entry.nbytes, f"{entry.module}:{operator}", entry.shape)


def _of_jax(residuals: Any) -> Iterator[_Array]:
    """One by one, those with a name of a block or a scan first: what is made outside has no number."""
    for row in sorted(residuals, key=lambda row: "#" not in row.name):
        if row.action == "recompute" or not math.prod(row.shape):
            continue
        layers, shape = (row.shape[0], row.shape[1:]) if row.scanned and row.shape else (1, row.shape)
        count = row.count * layers
        place = "host" if row.action == "offload" else "device"
        yield from [_Array(place, row.bytes // count, row.name, tuple(shape))] * count
