"""The three modes of `gradient_checkpoint_forward`, on bound Linen modules, NNX modules and functions."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax import compat
from remat_jax.core.walk import inner_jaxprs
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, NoEffectError

FLAGS = {"off": (False, False), "checkpoint": (True, False), "offload": (False, True), "both": (True, True)}
EXECUTIONS = {"off": 13, "checkpoint": 15, "offload": 15, "both": 15}
"""Two blocks of two matmuls: 4 forward, 4 for the kernels, 4 for the inputs, one for the head; 1 recomputed per block."""


def block(kernels: Any, x: Any, *, extra: Any) -> Any:
    up, down = kernels
    return x["h"] + (jnp.tanh(x["h"] @ up) * extra) @ down


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, extra: Any) -> Any:
        dense = functools.partial(nn.Dense, use_bias=False, param_dtype=x["h"].dtype)
        return x["h"] + dense(4, name="down")(jnp.tanh(dense(8, name="up")(x["h"])) * extra)


class Parent(nn.Module):
    flags: tuple[bool, bool]

    @nn.compact
    def __call__(self, x: Any, extra: Any) -> Any:
        for index in range(2):
            x = rj.gradient_checkpoint_forward(Linen(name=f"block_{index}"), *self.flags, {"h": x}, extra=extra)
        return x


class Nnx(nnx.Module):
    def __init__(self, kernels: Any) -> None:
        self.up, self.down = map(nnx.Param, kernels)

    def __call__(self, x: Any, *, extra: Any) -> Any:
        return block((self.up[...], self.down[...]), x, extra=extra)


def values() -> tuple[Any, Any, Any, Any]:
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    keys = jax.random.split(jax.random.key(0), 7)
    kernels = [
        (jax.random.normal(keys[2 * index], (4, 8), dtype), jax.random.normal(keys[2 * index + 1], (8, 4), dtype))
        for index in range(2)
    ]
    x, extra, head = (
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys[4:], [(3, 4), (3, 8), (4, 1)], strict=True)
    )
    return kernels, x, extra, head


def losses(kind: str, flags: tuple[bool, bool]) -> Any:
    """`loss(kernels, x, extra, head)`, with the same numbers for every kind of block."""

    def loss(kernels: Any, x: Any, extra: Any, head: Any) -> Any:
        if kind == "linen":
            params = {
                f"block_{index}": {"up": {"kernel": up}, "down": {"kernel": down}} for index, (up, down) in enumerate(kernels)
            }
            x = Parent(flags).apply({"params": params}, x, extra)
        else:
            for pair in kernels:
                model = Nnx(pair) if kind == "nnx" else lambda x, extra, pair=pair: block(pair, x, extra=extra)
                x = rj.gradient_checkpoint_forward(model, *flags, {"h": x}, extra=extra)
        return jnp.sum(jnp.sin(x) @ head)

    return loss


@pytest.mark.parametrize("kind", ["linen", "nnx", "function"])
def test_each_mode_gives_the_plain_gradients_at_its_own_price(x64, kind):
    kernels, x, extra, head = values()

    def plain(kernels, x, extra, head):
        for pair in kernels:
            x = block(pair, {"h": x}, extra=extra)
        return jnp.sum(jnp.sin(x) @ head)

    expected = jax.grad(plain, argnums=(0, 1, 2))(kernels, x, extra, head)
    for mode, flags in FLAGS.items():
        grad = jax.grad(losses(kind, flags), argnums=(0, 1, 2))
        for got, want in zip(jax.tree.leaves(grad(kernels, x, extra, head)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        assert matmuls(grad, kernels, x, extra, head) == EXECUTIONS[mode], mode


def moved_to_host(fn: Any, *args: Any, back: bool = False) -> list[tuple[int, ...]]:
    """The shapes of arrays that the traced `fn` sends to host memory, or fetches with `back`."""

    def walk(jaxpr: Any) -> list[tuple[int, ...]]:
        shapes = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "device_put":
                on_host = ["host" in str(getattr(var.aval, "memory_space", "")).lower() for var in eqn.outvars]
                shapes += [var.aval.shape for var, there in zip(eqn.outvars, on_host, strict=True) if there != back]
            for value in inner_jaxprs(eqn).values():
                for inner in value if isinstance(value, tuple) else (value,):
                    shapes += walk(compat.closed(inner).jaxpr)
        return shapes

    return walk(compat.dce(jax.make_jaxpr(fn)(*args)).jaxpr)


@pytest.mark.parametrize("kind", ["linen", "nnx", "function"])
def test_offload_fetches_every_input_from_the_host_and_no_parameter(kind):
    arguments = values()
    # Both layers read the array of (3, 8), which stays on the device.
    for mode, expected in {"checkpoint": [], "offload": 2 * [(3, 4)], "both": 2 * [(3, 4)]}.items():
        fn = jax.grad(losses(kind, FLAGS[mode]), argnums=(0, 1, 2))
        assert moved_to_host(fn, *arguments, back=True) == expected, mode


def test_positional_keyword_and_nested_arguments_are_all_offloaded():
    x = jnp.ones((2, 3))

    def f(a, *, b, c):
        return jnp.sin(a * b) * jnp.cos(c[0]["deep"] * a) + c[1]

    def run(x):
        return rj.gradient_checkpoint_forward(f, False, True, x, b=2 * x, c=[{"deep": 3 * x}, 7]).sum()

    assert moved_to_host(jax.grad(run), x) == 3 * [(2, 3)]


def test_python_values_reach_the_block_as_they_are():
    seen = []

    def f(x, flag, *, name=None, scale=2.0):
        seen.append((flag, name, scale))
        return x * scale if flag else x

    assert float(rj.gradient_checkpoint_forward(f, True, False, jnp.ones(()), True, name="a", scale=3.0)) == 3.0
    assert seen == [(True, "a", 3.0)]


def test_modes_agree_with_dropout_and_statistics_of_a_linen_parent(x64):
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen = self.variable("batch_stats", "mean", lambda: jnp.zeros(x.shape[-1], x.dtype))
            seen.value = seen.value + x.mean(0)
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(4, param_dtype=x.dtype)(x))

    class Model(nn.Module):
        flags: tuple[bool, bool]

        @nn.compact
        def __call__(self, x):
            return rj.gradient_checkpoint_forward(Noisy(), *self.flags, rj.gradient_checkpoint_forward(Noisy(), *self.flags, x))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)))
    variables = Model((False, False)).init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    assert set(variables["params"]) == {"Noisy_0", "Noisy_1"}

    def run(flags):
        def loss(params):
            out, state = Model(flags).apply(
                {**variables, "params": params}, x, mutable=["batch_stats"], rngs={"dropout": jax.random.key(2)}
            )
            return (out**2).sum(), state

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    plain = run((False, False))
    for flags in FLAGS.values():
        for got, want in zip(jax.tree.leaves(run(flags)), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_dropout_of_an_nnx_module_counts_on():
    def run(flags):
        model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))

        def loss(model, x):
            return sum((rj.gradient_checkpoint_forward(model, *flags, x) ** 2).sum() for _ in range(2))

        grads = nnx.grad(loss)(model, jnp.ones((3, 4)))
        return int(model.layers[1].rngs.count[...]), jax.tree.leaves(grads)

    counts, plain = run((False, False))
    for flags in FLAGS.values():
        count, grads = run(flags)
        assert count == counts == 2
        for got, want in zip(grads, plain, strict=True):
            np.testing.assert_array_equal(got, want)


def test_errors_say_what_to_do():
    x = jnp.ones((2, 4))

    def taken(x, use_gradient_checkpointing=False):
        return x

    class Taken(nnx.Module):
        def __call__(self, x, *, use_gradient_checkpointing_offload=False):
            return x

    for model, name in ((taken, "use_gradient_checkpointing"), (Taken(), "use_gradient_checkpointing_offload")):
        with pytest.raises(ArgumentError, match=rf"argument '{name}', but gradient_checkpoint_forward consumes.*rename it"):
            rj.gradient_checkpoint_forward(model, True, False, x)
    # Passed by position it reaches the block, and nothing is lost.
    assert rj.gradient_checkpoint_forward(lambda model, x: model(x), True, False, jnp.sin, x).shape == (2, 4)
    with pytest.raises(ArgumentError, match="use_gradient_checkpointing=1: expected True or False"):
        rj.gradient_checkpoint_forward(jnp.sin, 1, False, x)
    with pytest.raises(ArgumentError, match="expected True or False, known while tracing"):
        jax.jit(lambda flag: rj.gradient_checkpoint_forward(jnp.sin, True, flag, x))(True)
    with pytest.raises(ArgumentError, match=r"not bound.*model.bind\(variables\)"):
        rj.gradient_checkpoint_forward(Linen(), True, False, {"h": x}, extra=1.0)
    with pytest.raises(ArgumentError, match="expected a bound Linen module, an NNX module or a function"):
        rj.gradient_checkpoint_forward("block", True, False, x)
    with pytest.raises(NoEffectError, match="offloads nothing in <lambda>|offloads nothing in lambda"):
        rj.gradient_checkpoint_forward(lambda x: jnp.sin(x), False, True, jnp.ones(()))
