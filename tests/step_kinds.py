"""The steps of `examples/steps` for tests, and all arrays after a step."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import examples.steps
from examples.steps.network import LAYERS, Net, rows

KINDS = sorted(module.name for module in pkgutil.iter_modules(examples.steps.__path__) if module.name != "network")
BY_LAYER = f"2 x full | 1 x save: *:sin#0 | {LAYERS - 3} x off"
EACH = pytest.mark.parametrize("kind", KINDS)
X = np.asarray(rows())


def by_layer(kind: str) -> str:
    """Policies by layer for an example's step. A GAN's critic runs after its generator, which is not trained."""
    return f"{LAYERS} x off | {BY_LAYER}" if kind == "gan" else BY_LAYER


@functools.cache
def taken(kind: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An example's step and its arguments. Call the step by `results`, which leaves the arguments as they are."""
    module = importlib.import_module(f"examples.steps.{kind}")
    return module.train_step, module.example_args()


def in_float64(args: Any) -> Any:
    """The arguments with float64 in place of float32, in NNX objects too."""

    def wide(leaf: Any) -> Any:
        return leaf.astype(jnp.float64) if getattr(leaf, "dtype", None) == jnp.float32 else leaf

    def wide_object(arg: Any) -> Any:
        arg = nnx.clone(arg)
        nnx.update(arg, jax.tree.map(wide, nnx.state(arg)))
        return arg

    return tuple(wide_object(arg) if isinstance(arg, nnx.Module) else jax.tree.map(wide, arg) for arg in args)


def results(step: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """All arrays after the step: its results, and what it wrote to NNX objects among its arguments."""
    # The step may donate its arguments, and writes to objects.
    objects = [
        nnx.clone(arg)
        if isinstance(arg, nnx.Module)
        else jax.tree.map(lambda leaf: jnp.copy(leaf) if hasattr(leaf, "dtype") else leaf, arg)
        for arg in args
    ]
    out = step(*objects)
    written = [nnx.state(each) for each in objects if isinstance(each, nnx.Module)]
    return [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves((out, written))
        if hasattr(leaf, "dtype")
    ]


def of_squares(params: Any, x: jax.Array) -> jax.Array:
    return (Net().apply({"params": params}, x) ** 2).mean()


def assert_same_results(step: Callable[..., Any], policed: Callable[..., Any], args: Any, tolerance: float = 2e-6) -> None:
    plain, under_policies = results(step, args), results(policed, args)
    assert len(plain) == len(under_policies) > 1
    for one, other in zip(plain, under_policies, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=min(tolerance, 1e-6))
