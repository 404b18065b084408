"""Compile options for the steps of a comparison."""

from __future__ import annotations

from typing import Any

from remat_jax import compat


def compile_options(dtype: str) -> dict[str, Any]:
    """XLA options: quick compilation for float64, where rounding does not matter; otherwise none, as in the user's runs."""
    return compat.quick_compile_options() if dtype == "float64" else {}
