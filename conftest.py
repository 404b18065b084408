"""What every test needs: JAX on the CPU, and torch-only tests left out where torch is not installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

# Before JAX starts: no test but those marked `gpu` may touch a GPU, or try the CUDA plugin.
if not any("gpu" in word and "not gpu" not in word for word in sys.argv):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# What a test compiles it compiles itself: an answer kept by an earlier run would hide a compiler that fails.
os.environ["REMAT_JAX_CACHE"] = "off"

collect_ignore: list[str] = []
if importlib.util.find_spec("torch") is None:
    collect_ignore += ["torch_ref", "parity_tests", "remat_jax/porting/float64.py"]
    # Their examples compare with PyTorch.
    names = ("asserting", "capture_torch", "comparison", "localise", "semantics")
    collect_ignore += [f"remat_jax/parity/{name}.py" for name in names]


@pytest.fixture
def x64() -> Iterator[None]:
    """Run the test with JAX's 64-bit types."""
    import jax

    with jax.enable_x64(True):
        yield
