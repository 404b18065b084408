"""The public names: each is loaded at its first use, documented, and typed for a user's checker."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import remat_jax
from tests.public_names import undocumented

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"jax", "flax", "optax", "numpy", "scipy", "rich", "typer", "torch", "matplotlib"}
# The modules that a user's first name is loaded from: each must work as the first import.
FIRST = """
import os, sys
import jax, flax.linen, flax.nnx, optax
sys.stdout.flush()
for name in {names!r}:
    child = os.fork()
    if not child:
        import remat_jax
        status = 1
        try:
            getattr(remat_jax, name)
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        print(name)
"""


def test_importing_is_cheap_whatever_is_used_later() -> None:
    """Flax, Optax and our own modules together load more slowly than JAX; a command that needs none loads none."""
    code = "import sys, remat_jax; print(*(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.split()) & HEAVY == set() and "remat_jax" in done.stdout.split()


def test_what_checkers_see_is_what_is_loaded() -> None:
    tree = ast.parse(Path(remat_jax.__file__).read_text())
    seen = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in seen.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    assert set(homes) == set(remat_jax.__all__) and len(homes) == 29
    for name, home in homes.items():
        # A package is an attribute of its parent once it has been imported.
        assert getattr(remat_jax, name) is getattr(importlib.import_module(home), name), name


def test_any_public_name_may_be_the_first() -> None:
    homes = list(remat_jax._HOMES.values())
    code = FIRST.format(names=[names[0] for names in homes] + ["parity", "porting", "hardware"])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_is_no_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'remat_jax' has no attribute 'checkpoint_block'"):
        _ = remat_jax.checkpoint_block
    assert dir(remat_jax) == sorted({*remat_jax.__all__, "__version__"})
    assert remat_jax.__version__ == importlib.metadata.version("remat_jax")


@pytest.mark.parametrize("package", ["remat_jax", "remat_jax.parity", "remat_jax.porting"])
def test_every_public_name_has_an_example(package: str) -> None:
    assert undocumented(package) == []
