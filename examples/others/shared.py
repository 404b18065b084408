"""What the examples share: packages that a model's files import and its training step does not need, and what is printed."""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import flax.nnx  # noqa: F401 - it looks for IPython, which may be a placeholder later
import jax
import jax.numpy as jnp

import remat_jax as rj

POLICIES = ("off", "full", "dots_with_no_batch_dims")


def without(*packages: str) -> None:
    """Have `import` give modules of placeholders for `packages`: readers of data, tokenizers, checkpoint services.

    A placeholder can be a base class, a decorator, a default and a part of an annotation; calling it does nothing.
    """
    sys.meta_path.insert(0, _Absent(packages))


class _Anything(abc.ABCMeta):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else super().__call__()

    def __getitem__(cls, _: Any) -> Any:
        return cls


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = any(name == one or name.startswith(f"{one}.") for one in self.packages)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def show(
    job: Callable[[], rj.Workload], small: Callable[[], rj.Workload] | None, budget: str | None, target: str = "h200"
) -> None:
    """Print what policies take of `job`, the plan within `budget`, and one step of `small` without and with a policy."""
    for policy in POLICIES:
        report = rj.measure(job(), policy, target)
        seconds = "" if report.seconds is None else f", {report.seconds * 1e3:.0f} ms"
        print(f"{report.policy}: {report.device_bytes / 2**30:.1f} GiB{seconds}", flush=True)
    if budget is not None:
        _show_plan(rj.plan(job(), budget, target), budget)
    for policy in ("off", "full") if small is not None else ():
        print(f"a step of a small one under {policy}: {step(small(), policy)}", flush=True)


def _show_plan(plan: rj.Plan, budget: str) -> None:
    runs = " and ".join(str(part.layers) for part in plan.parts)
    print(f"plan within {budget}: {plan.device_bytes / 2**30:.1f} GiB, in runs of {runs} layers", flush=True)


def step(job: rj.Workload, policy: Any) -> str:
    """Run one training step on random parameters: the loss, and the norm of what the parameters changed by."""
    made = job.step(policy)
    keys = iter(jax.random.split(jax.random.key(0), 10_000))

    def array(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.ones(leaf.shape, leaf.dtype)
        return 0.02 * jax.random.normal(next(keys), leaf.shape, leaf.dtype)

    trained, state, *rest = made.arguments
    trained, rest = jax.tree.map(array, (trained, rest))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    new, _, loss = jax.jit(made.function)(trained, state, *rest)
    changed = sum(jnp.sum((a - b).astype(jnp.float32) ** 2) for a, b in zip(*map(jax.tree.leaves, (new, trained)), strict=True))
    return f"loss {float(loss):.6f}, parameters changed by {float(changed) ** 0.5:.6f}"
