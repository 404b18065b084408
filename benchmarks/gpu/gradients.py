"""Compares the gradients of two rows on the host, tensor by tensor and layer by layer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.job import Job, load_arrays, save_arrays
from remat_jax.parity import TOLERANCES


def compare_and_keep(job: Job, gradients: dict[str, np.ndarray]) -> dict[str, Any]:
    """Save and compare a row's gradients, if its job asks for it, and return the row's fields about gradients.

    Gradients agree if the norm of all differences, relative to the norm of all gradients, is explained by rounding. In bfloat16
    two orders of summation differ by about 1e-2. If a layer gets another layer's gradient, as from the miscompiled scanned
    offload of JAX 0.10.2 and 0.11.0 on GPUs (openxla/xla#46231), the relative norm is about 1. A single tensor, or bfloat16 in
    another framework, may differ more and still be right.
    """
    fields: dict[str, Any] = {}
    if job.reference and (path := Path(job.folder, job.reference)).exists():
        worst, name, whole = compare(load_arrays(path, job.size.dtype), gradients)
        fields = {"gradient_error": worst, "gradient_worst": name, "gradient_global_error": whole}
        fields["gradients_agree"] = whole <= TOLERANCES["meaningful_error"].value
    if job.keep_gradients:
        save_arrays(Path(job.folder, job.keep_gradients), gradients)
    return fields


def compare(reference: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> tuple[float, str, float]:
    """The largest ‖found − reference‖ / max(‖reference‖, floor · g) of any tensor, that tensor's name, and ‖all differences‖ /
    g.

    g is the norm of the whole reference; the floor is that of the float64 parity check. A tensor that is missing, misshapen or
    not finite has an infinite error.

    >>> compare({"w": np.array([3.0, 4.0])}, {"w": np.array([3.0, 4.5])})
    (0.1, 'w', 0.1)
    """
    errors = [(math.inf, name) for name in reference.keys() ^ found.keys()]
    norms: dict[str, float] = {}
    distances: dict[str, float] = {}
    for name, array in reference.items():
        expected = _computable(array)
        norms[name] = float(np.linalg.norm(expected))
        if name in found and found[name].shape == array.shape:
            distances[name] = float(np.linalg.norm(_computable(found[name]) - expected))
        elif name in found:
            errors.append((math.inf, name))
    norm = math.hypot(*norms.values())
    floor = TOLERANCES["float64_floor"].value * norm
    for name, distance in distances.items():
        error = distance / max(norms[name], floor) if distance else 0.0
        errors.append((error if math.isfinite(error) else math.inf, name))
    worst, name = max(errors)
    return worst, name, math.hypot(*distances.values()) / norm if math.isfinite(worst) and norm else worst


def _computable(array: np.ndarray) -> np.ndarray:
    # Not float64 for narrow dtypes: at a billion parameters it would take longer than the measured steps.
    return array.ravel() if array.dtype == np.float64 else array.ravel().astype(np.float32)
