"""The tolerances of the parity checks, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from remat_jax.errors import ArgumentError


@dataclass(frozen=True)
class Tolerance:
    """A tolerance and the reason for its value.

    >>> TOLERANCES["error_ratio"].value
    4.0
    """

    value: float
    reason: str


LOSS_STEPS = 20
"""The number of training steps for which `TOLERANCES["loss"]` holds."""

TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        "error_ratio": Tolerance(
            4.0,
            "the factor by which JAX's rounding error may exceed PyTorch's. Two correct implementations differ in the order "
            "of their sums; ratios up to 1.6 are seen on transformers; a wrong sign, scale or transpose gives thousands in "
            "float32.",
        ),
        "float64": Tolerance(
            1e-12,
            "relative error of a correct port in float64, norm-wise per tensor. Rounding gives about 1e-15 on a few "
            "layers and grows with depth and contraction length; a hidden down-cast to float32 gives 1e-8.",
        ),
        "float64_step": Tolerance(
            1e-10,
            "relative error, in float64, of an optimizer's update of a parameter, and of the losses of a short training "
            "run: Adam divides each gradient by its own size plus epsilon, which magnifies the rounding of a gradient that "
            "cancels, up to 1/epsilon = 1e4 times at the epsilon of `Optimizer`.",
        ),
        "float64_floor": Tolerance(
            1e-3,
            "the part of the global norm below which a tensor's own norm does not measure its error: a gradient that cancels "
            "to 0 still has rounding of ε·g. 4·ε(float64)/1e-12 = 9e-4, so the float64 check never asks for more than the "
            "parity rule grants.",
        ),
        "meaningful_error": Tolerance(
            0.1,
            "the part of the global norm that PyTorch's own error may not exceed. TF32 gives 1e-3 and bfloat16 about 1e-2, so "
            "a larger error is no rounding error, and a bound made from it would accept anything.",
        ),
        "loss": Tolerance(
            1e-5,
            f"relative difference of two training losses in float32 over {LOSS_STEPS} steps: ε(float32) = 1.2e-7, and each "
            "step's rounding enters the next step through the optimizer.",
        ),
        "epsilon_float64": Tolerance(2.0**-52, "distance from 1 to the next float64."),
        "epsilon_float32": Tolerance(2.0**-23, "distance from 1 to the next float32."),
        "epsilon_float16": Tolerance(2.0**-10, "distance from 1 to the next float16."),
        "epsilon_bfloat16": Tolerance(2.0**-7, "distance from 1 to the next bfloat16."),
    }
)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as its name, a NumPy dtype or a scalar type."""
    return dtype if isinstance(dtype, str) else np.dtype(dtype).name


def epsilon(dtype: Any) -> float:
    """Return ε of a floating dtype: the distance from 1 to the next larger number.

    Raises:
        ArgumentError: `dtype` has no ε in `TOLERANCES`.

    >>> epsilon("bfloat16"), epsilon(np.float32) == 2.0**-23
    (0.0078125, True)
    """
    name = dtype_name(dtype)
    entry = TOLERANCES.get(f"epsilon_{name}")
    if entry is None:
        dtypes = ", ".join(key.removeprefix("epsilon_") for key in TOLERANCES if key.startswith("epsilon_"))
        raise ArgumentError(f"dtype={name!r} has no ε in the table of tolerances: choose one of {dtypes}")
    return entry.value
