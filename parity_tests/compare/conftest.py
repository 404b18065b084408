"""Comparisons in tests compile without XLA's optimisations: optimising would take longer than it saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from remat_jax.parity import compiling, flax_side


@pytest.fixture(autouse=True, scope="package")
def quick_code() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(flax_side, "compile_options", lambda dtype: compiling.compile_options("float64"))
    yield
    patch.undo()
