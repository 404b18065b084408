"""The parity rule: it accepts rounding, and nothing else."""

from __future__ import annotations

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_jax.errors import ArgumentError
from remat_jax.memory.residuals import Residual
from remat_jax.parity import TOLERANCES, epsilon, float64_error, judge
from remat_jax.parity.memory import kept_alone


def reference() -> dict[str, np.ndarray]:
    """Gradients as they come: norms over six decades."""
    random = np.random.default_rng(0)
    return {name: random.normal(size=(6, 6)) * scale for name, scale in (("w", 1.0), ("b", 1e-3), ("tiny", 1e-6))}


def rounded(tensors: dict[str, np.ndarray], dtype: object = np.float32) -> dict[str, np.ndarray]:
    return {name: tensor.astype(dtype) for name, tensor in tensors.items()}


def failed(jax: dict, torch: dict | None = None, dtype: object = "float32", against: dict | None = None) -> list[str]:
    against = reference() if against is None else against
    return [row.name for row in judge(against, jax, rounded(against) if torch is None else torch, dtype) if not row.passed]


@pytest.mark.parametrize(("distance", "passed"), [(0.5, True), (1.0, True), (1.0 + 1e-6, False)])
def test_four_times_pytorch_s_error_is_the_limit(distance: float, passed: bool) -> None:
    exact = {"x": np.array([3.0, 4.0])}
    jax, torch = {"x": np.array([3.0, 4.0 + distance], np.float32)}, {"x": np.array([3.25, 4.0], np.float32)}
    (row,) = judge(exact, jax, torch, "float32")
    assert (row.err_torch, row.bound, row.passed) == (0.25, 1.0, passed)
    assert distance != 0.5 or (row.err_jax, row.ratio) == (0.5, 2.0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("factor", "passed"), [(3.9, True), (4.1, False)])
def test_where_pytorch_is_exact_the_floor_is_epsilon_of_the_global_norm(dtype: str, factor: float, passed: bool) -> None:
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    exact = {"big": np.array([1.0, 0.0]), "zero": np.array([0.0])}
    jax = {"big": exact["big"].astype(numpy_dtype), "zero": np.array([factor * epsilon(dtype)]).astype(numpy_dtype)}
    rows = {row.name: row for row in judge(exact, jax, rounded(exact, numpy_dtype), numpy_dtype)}
    assert rows["big"].passed and rows["zero"].passed is passed
    assert rows["zero"].ratio == pytest.approx(factor, rel=1e-2)


def test_epsilon_is_that_of_the_dtype() -> None:
    for name in ("float64", "float32", "float16"):
        assert epsilon(name) == np.finfo(name).eps
    assert epsilon(ml_dtypes.bfloat16) == float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)


def test_rounding_passes_and_a_flipped_sign_or_a_missed_transpose_fails() -> None:
    good = rounded(reference())
    assert failed(good) == []
    for name in good:
        assert failed(good | {name: -good[name]}) == [name]
    assert failed(good | {"w": good["w"].T}) == ["w"]


def test_a_scale_that_a_fixed_tolerance_would_admit_fails() -> None:
    good = rounded(reference())
    wrong = good | {"tiny": good["tiny"] * np.float32(3)}
    assert np.allclose(wrong["tiny"], good["tiny"], rtol=1e-2, atol=1e-2)
    assert failed(wrong) == ["tiny"]


@pytest.mark.parametrize("side", ["jax", "torch"])
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda t: t.pop("b"), "missing"),
        (lambda t: t.update(b=t["b"][:-1]), "shape (5, 6), expected (6, 6)"),
        (lambda t: t.update(b=t["b"].reshape(36)), "shape (36,), expected (6, 6)"),
        (lambda t: t.update(b=t["b"].astype(np.float64)), "dtype float64, expected float32"),
        (lambda t: t.update(b=np.where(np.eye(6) > 0, np.float32(np.nan), t["b"])), "not finite"),
        (lambda t: t.update(b=t["b"] + np.float32(np.inf)), "not finite"),
    ],
)
def test_what_cannot_be_compared_fails_and_says_why(side: str, spoil: object, problem: str) -> None:
    sides = {"jax": rounded(reference()), "torch": rounded(reference())}
    spoil(sides[side])
    rows = {row.name: row for row in judge(reference(), sides["jax"], sides["torch"], "float32")}
    assert [name for name, row in rows.items() if not row.passed] == ["b"]
    assert problem in rows["b"].problem
    assert {"jax": "JAX", "torch": "PyTorch"}[side] in rows["b"].problem


def test_a_tensor_that_the_reference_lacks_fails() -> None:
    extra = {"stray": np.zeros(2, np.float32)}
    assert failed(rounded(reference()) | extra) == ["stray"]
    assert failed(rounded(reference()), rounded(reference()) | extra) == ["stray"]


def test_a_reference_that_is_not_float64_or_not_finite_fails_everywhere_it_matters() -> None:
    single = rounded(reference())
    assert failed(single, single, against=single) == ["w", "b", "tiny"]
    broken = reference() | {"b": np.full((6, 6), np.nan)}
    assert failed(rounded(reference()), rounded(reference()), against=broken) == ["w", "b", "tiny"]


def test_two_candidates_that_agree_on_something_else_than_the_reference_fail() -> None:
    negated = rounded({name: -tensor for name, tensor in reference().items()})
    rows = judge(reference(), negated, negated, "float32")
    assert rows[0].ratio == 1.0 and not rows[0].passed and "more than a rounding error" in rows[0].problem


@pytest.mark.parametrize("wild", [1e200, -1e308])
def test_errors_too_large_to_square_fail(wild: float) -> None:
    exact, far = {"x": np.full(2, 1.0)}, {"x": np.full(2, wild)}
    assert failed(far, far, "float64", exact) == ["x"]
    assert float64_error(exact, far) == (pytest.approx(abs(wild)), "x")
    assert failed({"x": np.full(2, -1e308)}, exact, "float64", {"x": np.full(2, 1e308)}) == ["x"]


def test_a_reference_whose_norm_is_not_finite_admits_nothing() -> None:
    exact, wrong = {"x": np.full(4, 1.7e308)}, {"x": np.full(4, 1e308)}
    assert failed(wrong, exact, "float64", exact) == ["x"]
    assert float64_error(exact, wrong) == (math.inf, "x")


def test_an_empty_comparison_and_an_unknown_dtype_are_errors() -> None:
    for check in (lambda: judge({}, {}, {}, "float32"), lambda: float64_error({}, {})):
        with pytest.raises(ArgumentError, match="no tensor.*proves nothing"):
            check()
    with pytest.raises(ArgumentError, match="'int32'.*float64, float32, float16, bfloat16"):
        judge(reference(), {}, {}, np.int32)


@pytest.mark.parametrize("name", ["w", "b"])
def test_float64_error_is_relative_to_the_tensor(name: str) -> None:
    exact = {"w": np.full(4, 1.0), "b": np.full(4, 0.01)}
    assert float64_error(exact, exact) == (0.0, "w")
    assert float64_error(exact, exact | {name: exact[name] * (1 + 1e-9)}) == (pytest.approx(1e-9, rel=1e-5), name)


def test_float64_error_of_a_tensor_that_cancels_is_relative_to_the_floor() -> None:
    exact = {"w": np.array([1.0, 0.0]), "cancels": np.array([0.0])}
    assert float64_error(exact, exact | {"cancels": np.array([1e-16])}) == (pytest.approx(1e-13), "cancels")
    assert float64_error({"x": np.zeros(1)}, {"x": np.full(1, 1e-300)}) == (math.inf, "x")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t.pop("b"),
        lambda t: t.update(stray=t.pop("b")),
        lambda t: t.update(b=t["b"].astype(np.float32)),
        lambda t: t.update(b=t["b"].ravel()),
        lambda t: t.update(b=t["b"] * np.nan),
    ],
)
def test_float64_error_is_infinite_where_nothing_can_be_compared(spoil: object) -> None:
    candidate = reference()
    spoil(candidate)
    assert float64_error(reference(), candidate) == (math.inf, "b")
    assert float64_error(candidate, reference())[0] == math.inf


@settings(deadline=None)
@given(st.floats(1e-30, 1e30), st.integers(0, 2**32 - 1))
def test_the_rule_does_not_depend_on_the_unit(scale: float, seed: int) -> None:
    scale = 2.0 ** round(math.log2(scale))
    random = np.random.default_rng(seed)
    exact = {"x": random.normal(size=8), "y": random.normal(size=3) * 1e-4}
    jax = {name: x + random.normal(size=x.shape) * 1e-15 for name, x in exact.items()}
    torch = {name: x + random.normal(size=x.shape) * 1e-15 for name, x in exact.items()}

    def times(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: x * scale for name, x in tensors.items()}

    once, scaled = judge(exact, jax, torch, "float64"), judge(times(exact), times(jax), times(torch), "float64")
    assert [row.ratio for row in scaled] == pytest.approx([row.ratio for row in once], rel=1e-12)
    assert [row.passed for row in scaled] == [row.passed for row in once]


def test_every_tolerance_has_its_reason_and_the_table_is_read_only() -> None:
    assert TOLERANCES["error_ratio"].value == 4.0 and TOLERANCES["float64"].value == 1e-12
    assert all(len(entry.reason) > 20 for entry in TOLERANCES.values())
    with pytest.raises(TypeError):
        TOLERANCES["float64"] = TOLERANCES["loss"]  # type: ignore[index]
    assert TOLERANCES["float64_floor"].value >= 4 * epsilon("float64") / TOLERANCES["float64"].value


def test_an_array_of_no_bytes_is_kept_by_nobody() -> None:
    """A scan of no rounds stacks its residuals 0 times."""
    rows = [
        Residual("layers:sin", (0, 3), "float32", 0, "save", "", scanned=True),
        Residual("x", (3,), "float32", 12, "save", ""),
    ]
    [array] = kept_alone("off", SimpleNamespace(entries=[]), rows)
    assert (array.name, array.count, array.bytes) == ("x", 1, 12)
