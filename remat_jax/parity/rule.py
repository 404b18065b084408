"""The parity rule: a port's error, measured against float64, may be at most a few times the original's error.

A fixed tolerance cannot judge gradients: their norms span many decades, and `rtol=atol=1e-2` accepts most tensors with
the sign flipped. So both frameworks are measured against the same computation in float64, tensor by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat_jax.errors import ArgumentError
from remat_jax.parity.tolerances import TOLERANCES, dtype_name, epsilon

Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """The verdict on one tensor.

    `ratio` is err_jax / max(err_torch, ε·g), with ε and g as in `judge`. A row passes if its ratio is at most 4 and its
    `problem` is empty. `problem` is the reason why the tensor cannot be judged: it is missing, of the wrong shape or dtype,
    or not finite, or PyTorch's error is too large.

    >>> row = Row("kernel", err_jax=2e-7, err_torch=1e-7, bound=4e-7, ratio=2.0, passed=True)
    >>> row.passed is (row.err_jax <= row.bound)
    True
    """

    name: str
    err_jax: float
    err_torch: float
    bound: float
    ratio: float
    passed: bool
    problem: str = ""


def judge(reference64: Tensors, candidate_jax: Tensors, candidate_torch: Tensors, dtype: Any) -> list[Row]:
    """Judge every tensor by the parity rule: err_jax ≤ 4 · max(err_torch, ε(dtype) · g).

    err = ‖x − x₆₄‖ (Euclidean, summed in float64), and g is the norm of all tensors of `reference64` together. Judge one kind
    of quantity at a time (all gradients, or all outputs). All arguments are name → array; the candidates' arrays are in
    `dtype`. Every name gets a row. A tensor fails if it is missing, unexpected, of a different shape or dtype, or not finite on
    any side. It also fails if PyTorch's error exceeds 0.1 · g: such an error is not rounding, and a bound derived
    from it would accept anything.

    Raises:
        ArgumentError: `reference64` is empty (nothing would be compared), or `dtype` has no ε in `TOLERANCES`.

    >>> reference = {"w": np.array([1.0, 2.0])}
    >>> torch = {"w": np.array([1.0, 2.0000002], np.float32)}
    >>> [row.passed for row in judge(reference, {"w": np.array([1.0, 2.0], np.float32)}, torch, "float32")]
    [True]
    >>> [row.passed for row in judge(reference, {"w": np.array([1.0, -2.0], np.float32)}, torch, "float32")]
    [False]
    """
    epsilon(dtype)  # an unknown dtype is the caller's error, not a failed row
    whole = global_norm(reference64)
    return [
        _row(name, reference64, candidate_jax, candidate_torch, dtype_name(dtype), whole)
        for name in _names(reference64, candidate_jax, candidate_torch)
    ]


def _row(name: str, reference: Tensors, jax: Tensors, torch: Tensors, dtype: str, whole: float) -> Row:
    incomparable = problem_of(name, dtype, reference, JAX=jax, PyTorch=torch)
    not_finite = "" if math.isfinite(whole) else "the reference's global norm is not finite"
    problem = "; ".join(filter(None, (incomparable, not_finite)))
    if problem:
        return Row(name, math.inf, math.inf, 0.0, math.inf, passed=False, problem=problem)
    err_jax, err_torch = _distance(reference[name], jax[name]), _distance(reference[name], torch[name])
    meaningful = TOLERANCES["meaningful_error"].value * whole
    if not err_torch <= meaningful:
        problem = f"PyTorch is {err_torch:.2g} from the reference, more than {meaningful:.2g}: more than a rounding error"
    bound = TOLERANCES["error_ratio"].value * max(err_torch, epsilon(dtype) * whole)
    ratio = relative_error(err_jax, err_torch, epsilon(dtype) * whole)
    return Row(name, err_jax, err_torch, bound, ratio, passed=not problem and err_jax <= bound, problem=problem)


def float64_error(reference: Tensors, candidate: Tensors) -> tuple[float, str]:
    """Return the largest relative error of a float64 candidate, and its tensor's name.

    A tensor's error is ‖candidate − reference‖ / max(‖reference‖, 1e-3 · g), where g is the norm of all tensors of `reference`
    together; the limit is `TOLERANCES["float64"]`. A tensor that is missing, unexpected, of a different shape, not float64 or
    not finite has an infinite error.

    Raises:
        ArgumentError: `reference` is empty: nothing would be compared.

    >>> float64_error({"w": np.array([3.0, 4.0])}, {"w": np.array([3.0, 4.5])})
    (0.1, 'w')
    >>> float64_error({"w": np.array([3.0, 4.0])}, {})
    (inf, 'w')
    """
    errors = float64_errors(reference, candidate)
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def float64_errors(reference: Tensors, candidate: Tensors) -> dict[str, float]:
    """Return name → error as in `float64_error`, for every tensor of either side.

    >>> float64_errors({"w": np.array([3.0, 4.0]), "b": np.ones(1)}, {"w": np.array([3.0, 4.5]), "b": np.ones(1)})
    {'w': 0.1, 'b': 0.0}
    """
    floor = TOLERANCES["float64_floor"].value * global_norm(reference)
    errors = {}
    for name in _names(reference, candidate):
        if not math.isfinite(floor) or problem_of(name, "float64", reference, JAX=candidate):
            errors[name] = math.inf
            continue
        errors[name] = relative_error(_distance(reference[name], candidate[name]), norm(reference[name]), floor)
    return errors


def relative_error(error: float, reference: float, floor: float = 0.0) -> float:
    """The error relative to the norm of the reference, or to `floor` if the norm is smaller."""
    scale = max(reference, floor)
    return 0.0 if error == 0 else error / scale if scale else math.inf


def problem_of(name: str, dtype: str, reference: Tensors, **candidates: Tensors) -> str:
    """Return why the candidates' tensor `name` in `dtype` cannot be compared with the reference; "" if it can."""
    problems = [_problem("the reference", reference, name, "float64", reference)]
    problems += [_problem(side, tensors, name, dtype, reference) for side, tensors in candidates.items()]
    return "; ".join(filter(None, problems))


def _problem(side: str, tensors: Tensors, name: str, dtype: str, reference: Tensors) -> str:
    if name not in tensors:
        return f"missing in {side}"
    array = np.asarray(tensors[name])
    if array.dtype.name != dtype:
        return f"{side} has dtype {array.dtype.name}, expected {dtype}"
    if name in reference and array.shape != np.shape(reference[name]):
        return f"{side} has shape {array.shape}, expected {np.shape(reference[name])}"
    return "" if np.isfinite(array.astype(np.float64)).all() else f"not finite in {side}"


def global_norm(tensors: Tensors) -> float:
    """Return the Euclidean norm of all tensors together, summed in float64; raises ArgumentError if there are no tensors.

    >>> global_norm({"a": np.array([3.0]), "b": np.array([[4.0]])})
    5.0
    """
    if not tensors:
        raise ArgumentError("the reference holds no tensor, expected at least one: an empty comparison proves nothing")
    return math.hypot(*(norm(x) for x in tensors.values()))


def norm(tensor: Any) -> float:
    """Return the Euclidean norm of one tensor, summed in float64.

    >>> norm(np.array([3.0, 4.0]))
    5.0
    """
    x = np.asarray(tensor).astype(np.float64)
    # Dividing by the largest magnitude prevents overflow and underflow of squares.
    largest = float(np.max(np.abs(x), initial=0.0))
    return largest * float(np.linalg.norm(np.ravel(x) / largest)) if 0 < largest < math.inf else largest


def _names(*sides: Tensors) -> Iterable[str]:
    return dict.fromkeys(name for side in sides for name in side)


def _distance(reference: Any, candidate: Any) -> float:
    with np.errstate(over="ignore"):  # an infinite distance fails as it should
        return norm(np.asarray(candidate).astype(np.float64) - np.asarray(reference))
