"""The share of a GPU's best matmul rate that a matmul of a given shape reaches, by a model of tiles, waves and split-k."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""The tile sizes of cuBLAS and CUTLASS, in rows and columns of the result. A multiprocessor computes one tile at a time."""
SPLITS = (1, 2, 4, 8)
"""The split-k factors: the numbers of multiprocessors among which a tile's sum over k may be split."""
FILL = 192
"""An assumption: filling and draining a tile's pipeline costs as much as 192 more terms of the sum over k (3 stages of 64)."""
REUSE = 16.0
"""An assumption: a tile with r multiply-adds for each number that it loads reaches the share r / (r + REUSE) of the rate.

So a tile of 64 × 64 has 4/5 of the rate of a tile of 256 × 128.
"""
REFERENCE = 8192
"""A target's rate is that of a square matmul of this size."""


@dataclass(frozen=True)
class Product:
    """`batch` matmuls of shapes (m, k) and (k, n) in one kernel.

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
        """The number of operations: a multiplication and an addition for each term."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def size(self) -> float:
        """The side of a square matmul with the same number of operations."""
        return math.pow(self.flops / 2, 1 / 3)


@lru_cache(maxsize=4096)
def reached_share(batch: int, m: int, n: int, k: int, cores: int) -> float:
    """The share of a large matmul's rate that a matmul of this shape reaches on `cores` multiprocessors, at most 1.

    A tile that extends beyond the result is computed whole. Each core computes one tile per wave: 133 tiles on 132 cores take
    two waves.

    >>> reached_share(1, 8192, 8192, 8192, 132)
    1.0
    >>> round(reached_share(1, 128, 4096, 4096, 132), 2)  # a token batch: 32 tiles, each in four parts
    0.82
    """
    return min(1.0, _used(batch, m, n, k, cores) / _used(1, REFERENCE, REFERENCE, REFERENCE, cores))


@lru_cache(maxsize=4096)
def _used(batch: int, m: int, n: int, k: int, cores: int) -> float:
    """The share of the cores' peak rate that a matmul of this shape reaches with the best tile and split-k factor."""

    def used(rows: int, columns: int, split: int) -> float:
        rounds = math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) * split / cores)
        terms = rows * columns * (math.ceil(k / split) + FILL)
        reuse = rows * columns / (rows + columns)
        return batch * m * n * k / (rounds * cores * terms / (reuse / (reuse + REUSE)))

    return max(used(*tile, split) for tile in TILES for split in SPLITS if split == 1 or k >= split * FILL)
