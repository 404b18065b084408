"""Shared by the examples: placeholders for packages that a training step does not need, and the printed report."""

from __future__ import annotations

import abc
import argparse
import importlib.abc
import importlib.machinery
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.nnx  # noqa: F401 - it looks for IPython, which may be a placeholder later
import jax
import jax.numpy as jnp

import remat_jax as rj

POLICIES = ("off", "full", "dots_with_no_batch_dims")


def without(*packages: str) -> None:
    """Let `import` return placeholder modules for `packages`: readers of data, tokenizers, checkpoint services.

    A placeholder can be a base class, a decorator, a default and a part of an annotation; calling it does nothing.
    """
    sys.meta_path.insert(0, _Absent(packages))


def package(name: str) -> None:
    """Let `import` find the modules of a package whose own `__init__` is not run."""
    made = types.ModuleType(name)
    made.__path__ = [str(Path(folder) / name) for folder in sys.path if (Path(folder) / name).is_dir()]
    sys.modules.setdefault(name, made)


def masks_may_be_numbers() -> None:
    """Let `jnp.mean` take a mask of numbers, as haliax gives it; JAX takes only booleans now."""
    mean = jnp.mean
    jnp.mean = lambda *args, where=None, **options: mean(*args, where=None if where is None else where != 0, **options)


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
        """Do nothing."""


def show(job: Callable[[], rj.Workload], small: Callable[[], rj.Workload], budget: str) -> rj.Plan:
    """Print the cost of policies for `job`, the plan within `budget`, and a training step of `small` under some policies.

    The command line takes another target (`--target cpu`), another budget, and `--small`: `small` in the place of `job`.

    Returns:
      The plan under which `small` ran, on this machine.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="h200")
    parser.add_argument("--budget", default=budget, help="budget of the plan; default: %(default)s")
    parser.add_argument("--small", action="store_true", help="the small model in the place of the published one")
    options = parser.parse_args()
    measured = small if options.small else job
    for policy in POLICIES:
        report = rj.measure(measured(), policy, options.target)
        print(f"{report.policy}: {amounts(report.device_bytes, report.seconds)}", flush=True)
    plan = show_plan(measured(), options.budget, options.target)
    if not options.small or options.target != "cpu":
        full, kept = (rj.measure(small(), policy, "cpu").device_bytes for policy in ("full", "everything"))
        plan = rj.plan(small(), (full + kept) // 2, "cpu")
    show_steps(small, plan)
    return plan


def amounts(size: int, seconds: float | None, how: str = "") -> str:
    """Device memory, and the time of a step if it is known; `how` marks the time."""
    shown = f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
    return shown if seconds is None else f"{shown}, {how}{seconds * 1e3:.{0 if seconds >= 0.01 else 2}f} ms"


def show_plan(job: rj.Workload, budget: str, target: str) -> rj.Plan:
    """Make and print the plan of `job`: the time to find it, its needs, and other policies."""
    begin, first_fit = time.perf_counter(), 0.0

    def progress(what: str, _done: int, _of: int) -> None:
        nonlocal first_fit
        if "best so far" in what and not first_fit:
            first_fit = time.perf_counter() - begin

    plan = rj.plan(job, budget, target, progress=progress)
    seconds = time.perf_counter() - begin
    print(f"plan within {budget}: {amounts(plan.device_bytes, plan.seconds, 'estimated ')}, {runs(plan)}")
    print(f"  found in {seconds:.0f} s, the first answer that fits after {first_fit or seconds:.0f} s")
    best = plan.best_named
    print(f"  best named policy that fits: {'none' if best is None else f'{best.name}, {beside(best)}'}")
    for point in plan.named:
        if point.name == "as written":
            print(f"  as written: {beside(point)}")
    sys.stdout.flush()
    return plan


def beside(point: Any) -> str:
    """What another policy needs, with its time by the plan's estimate."""
    return "not compiled" if point.device_bytes is None else amounts(point.device_bytes, point.seconds, "estimated ")


def runs(plan: rj.Plan) -> str:
    """The numbers of consecutive layers under one policy, block by block.

    >>> part = lambda block, layers: types.SimpleNamespace(block=block, layers=layers)
    >>> runs(types.SimpleNamespace(parts=(part("Layer", 24), part("Layer", 7), part("Layer", 1), part("Head", 1))))
    'Layer in runs of 24, 7 and 1, Head in one run of 1'
    """
    counts: dict[str, list[str]] = {}
    for part in plan.parts:
        counts.setdefault(part.block, []).append(str(part.layers))
    return ", ".join(f"{block} in {listed(layers)}" for block, layers in counts.items())


def listed(layers: list[str]) -> str:
    """The lengths of runs in words."""
    return f"one run of {layers[0]}" if len(layers) == 1 else f"runs of {', '.join(layers[:-1])} and {layers[-1]}"


def show_steps(small: Callable[[], rj.Workload], plan: rj.Plan) -> None:
    """Run one training step of a small model on this machine: as written, under `full`, and under its plan."""
    for name, policy in (("as written", "off"), ("under full", "full")):
        print(f"a step of a small one {name}: {step(small(), policy)}", flush=True)
    planned = small()
    planned = planned.with_loss(plan.apply(planned.own_loss or planned.loss))
    print(f"a step of a small one under its plan, {runs(plan)}: {step(planned, 'off')}", flush=True)


def step(job: rj.Workload, policy: Any) -> str:
    """Run one training step on random parameters; returns the loss, and the norm of the parameters' change."""
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
