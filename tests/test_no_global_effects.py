"""Importing this package changes nothing in JAX, Flax and Optax; the first policy replaces a few functions of JAX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTING = """
import sys
import remat_jax
for name in remat_jax.__all__:
    getattr(remat_jax, name)
print(*(name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax")))
"""
COMPARING = """
import importlib, sys, types
modules = [importlib.import_module(name) for name in sys.argv[1:]]

def values():
    # Each attribute of a module, and of a class or an object in it, and each item of a dictionary in it.
    found = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            found[module.__name__, name] = value
            if isinstance(value, dict) and name != "__builtins__":
                found.update(((module.__name__, name, "[]", key), each) for key, each in list(value.items()))
            elif isinstance(value, type) or type(value).__module__.startswith(("jax", "flax", "optax")):
                members = list(getattr(value, "__dict__", {}).items())
                found.update(((module.__name__, name, ".", key), each) for key, each in members)
    return found

def different(after):
    changed = [place for place, value in before.items() if place not in after or after[place] is not value]
    # New items of dictionaries are rules for primitives of this package.
    return changed + [place for place in after if place not in before and "[]" not in place]

before = values()
assert ("jax._src.ad_checkpoint", "remat_p", ".", "name") in before and len(before) > 50_000
import remat_jax
for name in remat_jax.__all__:
    getattr(remat_jax, name)
assert different(values()) == [], different(values())

def ours():
    # The attributes and items that are functions of this package.
    functions = {place: value for place, value in values().items() if isinstance(value, types.FunctionType)}
    return {
        str(place[-1])
        for place, value in functions.items()
        if value.__code__.co_filename.startswith(remat_jax.__path__[0]) and (place in before or "[]" not in place)
    }

import jax, jax.numpy as jnp, flax.linen as nn
class Layer(nn.Module):
    def __call__(self, x):
        return jnp.sin(x)
assert ours() == set()
# The first policy is one of JAX, on complex numbers, which JAX itself does not save.
first = remat_jax.remat(lambda x: jnp.sin(jnp.exp(1j * x)), jax.checkpoint_policies.everything_saveable)
assert abs(jax.grad(lambda x: first(x).real)(0.0)) < 1e-6
model = nn.remat(Layer)()
jax.grad(remat_jax.checkpoint_blocks(lambda x: model.apply({}, x), {Layer: "full"}))(1.0)
rules = {"custom_lin", "call_hi_primitive_linearized"}
assert ours() == {"bind", "__call__", *rules}, ours()
"""


def test_importing_changes_nothing_and_the_first_policy_installs_hooks() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", IMPORTING], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    command = [sys.executable, "-W", "ignore", "-c", COMPARING, *listed.stdout.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
