"""Ways to plant a fault in the Flax model of a comparison from outside, without changing the model's code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch

Call = Callable[..., Any]
Case = dict[str, Any]
"""The arguments of `compare`."""
Plant = Callable[[Case], Case]
Change = Callable[[Call, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Replaces a module's method; called with the method, the module and the arguments."""


def plain(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def at(path: str, change: Change) -> Plant:
    """Calls to the module at a path go through `change`."""

    running: list[nn.Module] = []  # a class that calls its base's `__call__` is called once

    def intercept(method: Call, args: Any, kwargs: Any, context: Any) -> Any:
        if running or "/".join(context.module.path) != path or context.method_name != "__call__":
            return method(*args, **kwargs)
        running.append(context.module)
        try:
            return change(method, context.module, args, kwargs)
        finally:
            running.pop()

    def plant(case: Case) -> Case:
        right = case.get("flax_call", plain)

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            with nn.intercept_methods(intercept):
                return right(model, *args, **kwargs)

        return {**case, "flax_call": call}

    return plant


def given(**changes: Any) -> Plant:
    """Other arguments of `compare`."""
    return lambda case: {**case, **changes}


def mapped(*rules: str) -> Plant:
    """Rules that override those of the weight map."""
    return lambda case: {**case, "rules": "\n".join((*rules, str(case["rules"])))}


def output(change: Call) -> Change:
    """The module's output goes through `change`."""
    return lambda method, module, args, kwargs: change(method(*args, **kwargs))


def arguments(change: Call) -> Change:
    """The module's positional arguments go through `change`."""
    return lambda method, module, args, kwargs: method(*change(*args), **kwargs)


def fields(**values: Any) -> Change:
    """The module has other hyperparameters while it is called."""

    def change(method: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        before = {name: getattr(module, name) for name in values}
        try:
            for name, value in values.items():
                object.__setattr__(module, name, value)
            return method(*args, **kwargs)
        finally:
            for name, value in before.items():
                object.__setattr__(module, name, value)

    return change


def inside(owner: Any, name: str, change: Callable[[Call], Call]) -> Change:
    """While the module is called, a function that its code uses is replaced."""

    def changed(method: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        with mock.patch.object(owner, name, change(getattr(owner, name))):
            return method(*args, **kwargs)

    return changed


def detached(method: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The module's arguments have no gradient."""
    args, kwargs = jax.tree.map(lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x, (args, kwargs))
    return method(*args, **kwargs)


def skipped(method: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The module returns its input."""
    method(*args, **kwargs)
    return args[0] if args else kwargs["x"]


def without_bias_gradient(method: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The module's bias is a constant to the backward pass."""
    made = method(*args, **kwargs)
    bias = module.variables["params"]["bias"]
    return made - bias + jax.lax.stop_gradient(bias)


def scaled_cotangent(factor: float) -> Call:
    """The identity, the cotangent times `factor`."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent * factor,))
    return identity


FLIPPED, DOUBLED = output(scaled_cotangent(-1.0)), output(scaled_cotangent(2.0))


def swapped_queries_and_keys(fused: jax.Array) -> jax.Array:
    query, key, value = jnp.split(fused, 3, axis=-1)
    return jnp.concatenate([key, query, value], axis=-1)


def noise(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.integers(1, 9, shape, np.int32)


def noise_of_the_host(torch_path: str, path: str) -> Plant:
    """A module's output times noise from a generator on the host, which a step seeds: a recomputation draws again.

    In PyTorch the noise is always the first that a step draws, also in a recomputation.
    """
    random = np.random.default_rng(0)

    def host(x: jax.Array, begins: bool = False) -> jax.Array:
        def made(_: Any) -> np.ndarray:
            nonlocal random
            random = np.random.default_rng(0) if begins else random
            return np.zeros(x.shape, np.int32) if begins else noise(random, x.shape)

        # Integers: a callback may run on a thread without 64-bit types, where JAX would narrow its result.
        return jax.pure_callback(made, jax.ShapeDtypeStruct(x.shape, np.int32), jax.lax.stop_gradient(x)).astype(x.dtype)

    def plant(case: Case) -> Case:
        noisy = copy.deepcopy(case["torch_module"])
        noisy.get_submodule(torch_path).register_forward_hook(lambda module, args, x: x * drawn_first(x))
        case = at(path, output(lambda x: x * host(x)))(case)
        right = case["flax_call"]

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            seeded = [x + host(x, True) for x in args], {name: x + host(x, True) for name, x in kwargs.items()}
            return right(model, *seeded[0], **seeded[1])

        return {**case, "torch_module": noisy, "flax_call": call, "modes": ("off", "checkpoint")}

    def drawn_first(x: torch.Tensor) -> torch.Tensor:
        channels_last = x.moveaxis(1, -1) if x.ndim == 4 else x
        drawn = torch.tensor(noise(np.random.default_rng(0), channels_last.shape)).to(x)
        return drawn.moveaxis(-1, 1) if x.ndim == 4 else drawn

    return plant
