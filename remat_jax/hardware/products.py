"""The share of a GPU's product rate that a matrix product reaches by its shape: tiles, rounds of the cores, split sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""The tiles, in rows and columns of the result, among which cuBLAS and CUTLASS choose; a core computes one tile at a time."""
SPLITS = (1, 2, 4, 8)
"""The numbers of parts into which a sum may be split over several cores."""
FILL = 192
"""The terms of the sum that filling and draining a tile's pipeline costs; assumed: three stages of 64."""
REUSE = 16.0
"""How fast a tile's rate grows with its operations per loaded number; assumed: 64 × 64 reaches four fifths."""
REFERENCE = 8192
"""The rates of targets are those of square products of this size."""


@dataclass(frozen=True)
class Product:
    """`batch` products of matrices (m, k) and (k, n) in one kernel.

    >>> Product("bfloat16", 1, 2, 3, 5).flops
    60
    """

    dtype: str
    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each term."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def size(self) -> float:
        """The side of one square product with as many operations."""
        return math.pow(self.flops / 2, 1 / 3)


@lru_cache(maxsize=4096)
def reached_share(batch: int, m: int, n: int, k: int, cores: int) -> float:
    """The share of a large product's rate that a product of this shape reaches on `cores` multiprocessors, at most 1.

    A tile is computed whole even if a part of it exceeds the result. Each core computes one tile per round: 133 tiles on 132
    cores take two rounds.

    >>> reached_share(1, 8192, 8192, 8192, 132)
    1.0
    >>> round(reached_share(1, 128, 4096, 4096, 132), 2)  # a token batch: 32 tiles, each in four parts
    0.82
    """
    return min(1.0, _used(batch, m, n, k, cores) / _used(1, REFERENCE, REFERENCE, REFERENCE, cores))


@lru_cache(maxsize=4096)
def _used(batch: int, m: int, n: int, k: int, cores: int) -> float:
    """The share of the cores' time spent on terms of the sum, for the best tile and split."""

    def used(rows: int, columns: int, split: int) -> float:
        rounds = math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) * split / cores)
        terms = rows * columns * (math.ceil(k / split) + FILL)
        reuse = rows * columns / (rows + columns)
        return batch * m * n * k / (rounds * cores * terms / (reuse / (reuse + REUSE)))

    return max(used(*tile, split) for tile in TILES for split in SPLITS if split == 1 or k >= split * FILL)
