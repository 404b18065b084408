"""Everything that the losses depend on: the model, its data and its optimizer, but not the mesh or the policy."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from remat_jax.errors import ArgumentError

from .. import text

DTYPES = ("float32", "bfloat16", "float64")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The model, its data and its optimizer. Two runs of one setting have the same losses, on any mesh and under any policy.

    Attributes:
      layers, width, heads: the sizes of the decoder.
      scan: whether its layers are stacked and run in one `scan`.
      length, batch: a batch is `batch` windows of `length` bytes, of all devices together.
      dtype: the dtype of the computation; with bfloat16 the parameters and the optimizer's state stay in float32.
      learning_rate: of AdamW.
      seed: of the initial parameters and of the data.

    Raises:
      ArgumentError: a size that is not positive, heads that do not share the width, an unknown dtype.

    >>> Setting(layers=2).layers
    2
    """

    layers: int = 8
    width: int = 256
    heads: int = 8
    scan: bool = False
    length: int = 256
    batch: int = 32
    dtype: str = "float32"
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "length", "batch"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"--{name} {getattr(self, name)}: expected at least 1")
        if self.width % (2 * self.heads):
            raise ArgumentError(
                f"--width {self.width} with --heads {self.heads}: expected an even number of features for each head; make the "
                f"width a multiple of {2 * self.heads}"
            )
        if self.dtype not in DTYPES:
            raise ArgumentError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}")
        if not self.learning_rate > 0:
            raise ArgumentError(f"--learning-rate {self.learning_rate}: expected a positive number")
        if self.seed < 0:
            raise ArgumentError(f"--seed {self.seed}: expected 0 or more")

    @property
    def param_dtype(self) -> str:
        """The dtype of the parameters."""
        return "float64" if self.dtype == "float64" else "float32"

    def told(self) -> dict[str, Any]:
        """The setting as plain data, with a digest of the text: another Python may have another standard library."""
        return dataclasses.asdict(self) | {"text": hashlib.sha256(text.corpus().tobytes()).hexdigest()[:16]}


def differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The differences between two settings, a phrase each.

    >>> differences({"layers": 2, "seed": 0}, {"layers": 3, "seed": 0})
    ['layers: 2 here, 3 there']
    """
    names = [*mine, *(name for name in other if name not in mine)]
    return [f"{n}: {mine.get(n)} here, {other.get(n)} there" for n in names if mine.get(n) != other.get(n)]
