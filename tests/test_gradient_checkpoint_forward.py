"""The three modes of `gradient_checkpoint_forward`, on bound Linen modules, NNX modules and functions."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, NoEffectError
from tests.small_models import Linear, assert_same, to_host, values

FLAGS = {"off": (False, False), "checkpoint": (True, False), "offload": (False, True), "both": (True, True)}
EXECUTIONS = {"off": 13, "checkpoint": 15, "offload": 15, "both": 15}
"""Two blocks of two matmuls: 4 forward, 4 for the kernels, 4 for the inputs, one for the head; 1 recomputed per block."""


def block(kernels: Any, x: Any, *, extra: Any) -> Any:
    up, down = kernels
    return x["h"] + (jnp.tanh(x["h"] @ up) * extra) @ down


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, extra: Any) -> Any:
        return x["h"] + Linear(4, name="down")(jnp.tanh(Linear(8, name="up")(x["h"])) * extra)


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


def arguments() -> tuple[Any, Any, Any, Any]:
    kernels = [(values(4, 8, seed=index), values(8, 4, seed=2 + index)) for index in range(2)]
    return kernels, values(3, 4, seed=4), values(3, 8, seed=5), values(4, 1, seed=6)


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
    args = arguments()

    def plain(kernels, x, extra, head):
        for pair in kernels:
            x = block(pair, {"h": x}, extra=extra)
        return jnp.sum(jnp.sin(x) @ head)

    expected = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(*args)
    for mode, flags in FLAGS.items():
        grad = jax.grad(losses(kind, flags), argnums=(0, 1, 2))
        assert matmuls(grad, *args) == EXECUTIONS[mode], mode
        assert_same(jax.jit(grad)(*args), expected)


@pytest.mark.parametrize("kind", ["linen", "nnx", "function"])
def test_offload_moves_every_input_and_no_parameter(kind):
    # Both layers read the array of (3, 8), which stays on the device.
    for mode, expected in {"checkpoint": [], "offload": 2 * [(3, 4)], "both": 2 * [(3, 4)]}.items():
        assert to_host(jax.grad(losses(kind, FLAGS[mode]), argnums=(0, 1, 2)), *arguments()) == expected, mode


def test_positional_keyword_and_nested_arguments_are_all_offloaded():
    def f(a, *, b, c):
        return jnp.sin(a * b) * jnp.cos(c[0]["deep"] * a) + c[1]

    def run(x):
        return rj.gradient_checkpoint_forward(f, False, True, x, b=2 * x, c=[{"deep": 3 * x}, 7]).sum()

    assert to_host(jax.grad(run), jnp.ones((2, 3))) == 3 * [(2, 3)]


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
            return nn.Dropout(0.5, deterministic=False)(Linear(4)(x))

    class Model(nn.Module):
        flags: tuple[bool, bool]

        @nn.compact
        def __call__(self, x):
            return rj.gradient_checkpoint_forward(Noisy(), *self.flags, rj.gradient_checkpoint_forward(Noisy(), *self.flags, x))

    x = values(3, 4)
    variables = Model((False, False)).init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    assert set(variables["params"]) == {"Noisy_0", "Noisy_1"}

    def run(flags):
        def loss(params):
            out, state = Model(flags).apply(
                {**variables, "params": params}, x, mutable=["batch_stats"], rngs={"dropout": jax.random.key(2)}
            )
            return (out**2).sum(), state

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    plain = run(FLAGS["off"])
    for mode in ("checkpoint", "offload", "both"):
        assert_same(run(FLAGS[mode]), plain)


def test_dropout_of_an_nnx_module_counts_on(x64):
    def run(flags):
        model = nnx.Sequential(nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))

        def loss(model, x):
            return sum((rj.gradient_checkpoint_forward(model, *flags, x) ** 2).sum() for _ in range(2))

        grads = nnx.jit(nnx.grad(loss))(model, jnp.ones((3, 4)))
        assert int(model.layers[1].rngs.count[...]) == 2
        return nnx.to_pure_dict(nnx.state(grads))

    plain = run(FLAGS["off"])
    for mode in ("checkpoint", "offload"):
        assert_same(run(FLAGS[mode]), plain)


def test_arguments_with_the_names_of_the_flags_are_refused_unless_given_by_position():
    def taken(x, use_gradient_checkpointing=False):
        return x

    class Taken(nnx.Module):
        def __call__(self, x, *, use_gradient_checkpointing_offload=False):
            return x

    x = jnp.ones((2, 4))
    for model, name in ((taken, "use_gradient_checkpointing"), (Taken(), "use_gradient_checkpointing_offload")):
        with pytest.raises(ArgumentError, match=rf"argument '{name}', but gradient_checkpoint_forward consumes.*rename it"):
            rj.gradient_checkpoint_forward(model, True, False, x)
    assert rj.gradient_checkpoint_forward(lambda model, x: model(x), True, False, jnp.sin, x).shape == (2, 4)


@pytest.mark.parametrize(
    ("model", "flags", "error", "message"),
    [
        (jnp.sin, (1, False), ArgumentError, "use_gradient_checkpointing=1: expected True or False"),
        (Linen(), (True, False), ArgumentError, r"not bound.*model.bind\(variables\)"),
        ("block", (True, False), ArgumentError, "expected a bound Linen module, an NNX module or a function"),
        (lambda x: jnp.sin(x), (False, True), NoEffectError, "offloads nothing in <lambda>|offloads nothing in lambda"),
    ],
)
def test_errors_say_what_to_do(model, flags, error, message):
    with pytest.raises(error, match=message):
        rj.gradient_checkpoint_forward(model, *flags, jnp.ones(()))


def test_a_traced_flag_is_refused():
    with pytest.raises(ArgumentError, match="expected True or False, known while tracing"):
        jax.jit(lambda flag: rj.gradient_checkpoint_forward(jnp.sin, True, flag, jnp.ones(2)))(True)
