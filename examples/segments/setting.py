"""The sizes of the experiment, its cuts, and the fields of a table row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import pytorch


@dataclass(frozen=True)
class Setting:
    """The model, its batch, and the number of measurements.

    A batch larger than `hidden_size` makes an activation larger than a layer's gradient, so that there is something to
    save: see `pytorch.deep_mlp_cost`.

    Raises:
        ValueError: if there are too few layers to cut, or the batch is not larger than `hidden_size`.
    """

    num_layers: int = 62
    hidden_size: int = 256
    in_features: int = 256
    out_features: int = 10
    batch: int = 512
    rounds: int = 9
    depths: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    target: str | None = "h200"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_layers, *self.depths) < 4:
            raise ValueError(f"num_layers={self.num_layers}, depths={self.depths}: expected at least 4 layers to cut")
        if self.batch <= self.hidden_size + 1:
            raise ValueError(
                f"batch={self.batch}: expected more than hidden_size + 1 = {self.hidden_size + 1}; with fewer rows, gradients "
                "outweigh activations and no cut lowers the peak"
            )

    @property
    def widths(self) -> dict[str, int]:
        """The widths, as models take them."""
        return {"hidden_size": self.hidden_size, "in_features": self.in_features, "out_features": self.out_features}

    def data(self, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
        """A batch, and the weights of the outputs in the loss."""
        random = np.random.default_rng(self.seed)
        shapes = ((self.batch, self.in_features), (self.batch, self.out_features))
        x, weights = (random.normal(size=shape).astype(dtype) for shape in shapes)
        return x, weights / np.asarray(self.batch, dtype)


QUICK = Setting(num_layers=14, hidden_size=16, in_features=12, out_features=3, batch=32, rounds=1, depths=(4, 16), target=None)


def cuts(num_layers: int) -> dict[str, tuple[int, ...]]:
    """The cuts by name: a handwritten one, and those of `checkpoint_sequential`.

    >>> cuts(62)["plain"], cuts(62)["checkpoint_sequential, 3"]
    ((), (20, 40))
    """
    sqrt, best = pytorch.sqrt_segments(num_layers), pytorch.optimal_segments(num_layers)
    return {
        "plain": (),
        "checkpoint_sequential, 3": pytorch.uniform_boundaries(num_layers, 3),
        f"√L uniform, {sqrt}": pytorch.uniform_boundaries(num_layers, sqrt),
        f"best uniform, {best}": pytorch.uniform_boundaries(num_layers, best),
        f"by hand, {len(pytorch.decreasing_boundaries(num_layers)) + 1}": pytorch.decreasing_boundaries(num_layers),
    }


@dataclass(frozen=True)
class Row:
    """A form, its measurements and its closed form.

    Attributes:
        saved_bytes: kept between the passes.
        peak_bytes: PyTorch: tracked, of a step that ends with the gradients. JAX: compiled for the target, or None.
        executions: how often a layer runs forward in a step.
        matmuls: matrix multiplications of a step.
        gradient_error: the largest error of a parameter's gradient in float64, against the plain form of PyTorch.
        relative_time: the time of a step, relative to the same framework's plain form; None if the compiled program does
            not execute all matrix multiplications of the form, so that its time would mean nothing.
        closed_form: the values that saved_bytes and matmuls, and in PyTorch peak_bytes and executions, must have.
    """

    framework: str
    form: str
    saved_bytes: int
    peak_bytes: int | None
    executions: int
    matmuls: int
    gradient_error: float
    relative_time: float | None
    closed_form: dict[str, int]

    @property
    def wrong(self) -> list[str]:
        """The measurements that differ from the closed form."""
        return [name for name, value in self.closed_form.items() if getattr(self, name) != value]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)
