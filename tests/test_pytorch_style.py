"""`gradient_checkpoint_forward` and `checkpoint_sequential`, on bound Linen modules, NNX modules and functions."""

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
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, NoEffectError
from tests.small_models import Linear, assert_same, from_host, to_host, values

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


def losses(kind: str, flags: tuple[bool, bool]) -> Any:
    """`loss(kernels, x, extra, head)`, with the same numbers for every kind of block."""

    def loss(kernels: Any, x: Any, extra: Any, head: Any) -> Any:
        if kind == "linen":
            params = {f"block_{n}": {"up": {"kernel": up}, "down": {"kernel": down}} for n, (up, down) in enumerate(kernels)}
            x = Parent(flags).apply({"params": params}, x, extra)
        else:
            for pair in kernels:
                model = Nnx(pair) if kind == "nnx" else lambda x, extra, pair=pair: block(pair, x, extra=extra)
                x = rj.gradient_checkpoint_forward(model, *flags, {"h": x}, extra=extra)
        return jnp.sum(jnp.sin(x) @ head)

    return loss


@pytest.mark.parametrize("kind", ["linen", "nnx", "function"])
def test_each_mode_gives_the_plain_gradients_at_its_own_price(x64, kind):
    kernels = [(values(4, 8, seed=index), values(8, 4, seed=2 + index)) for index in range(2)]
    args = kernels, values(3, 4, seed=4), values(3, 8, seed=5), values(4, 1, seed=6)

    def plain(kernels, x, extra, head):
        for pair in kernels:
            x = block(pair, {"h": x}, extra=extra)
        return jnp.sum(jnp.sin(x) @ head)

    expected = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(*args)
    for mode, flags in FLAGS.items():
        grad = jax.grad(losses(kind, flags), argnums=(0, 1, 2))
        assert matmuls(grad, *args) == EXECUTIONS[mode], mode
        # Every input, and no parameter; both layers read the array of (3, 8), which stays on the device.
        assert from_host(grad, *args) == 2 * flags[1] * [(3, 4)], mode
        assert_same(jax.jit(grad)(*args), expected)


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


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        seen = self.variable("batch_stats", "mean", lambda: jnp.zeros(x.shape[-1], x.dtype))
        seen.value = seen.value + x.mean(0)
        return nn.Dropout(0.5, deterministic=False)(Linear(4)(x))


class NoisyParent(nn.Module):
    flags: tuple[bool, bool]

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = rj.gradient_checkpoint_forward(Noisy(), *self.flags, x)
        return x


def test_modes_agree_with_dropout_and_statistics_of_a_linen_parent(x64):
    x = values(3, 4)
    variables = NoisyParent(FLAGS["off"]).init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    assert set(variables["params"]) == {"Noisy_0", "Noisy_1"}

    def run(mode):
        def loss(params):
            rngs = {"dropout": jax.random.key(2)}
            out, state = NoisyParent(FLAGS[mode]).apply(variables | {"params": params}, x, mutable=["batch_stats"], rngs=rngs)
            return (out**2).sum(), state

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    plain = run("off")
    for mode in ("checkpoint", "both"):
        assert_same(run(mode), plain)


def test_dropout_of_an_nnx_module_counts_on(x64):
    def run(mode):
        model = nnx.Sequential(nnx.Linear(4, 4, param_dtype=float, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))

        def loss(model, x):
            return sum((rj.gradient_checkpoint_forward(model, *FLAGS[mode], x) ** 2).sum() for _ in range(2))

        grads = nnx.jit(nnx.grad(loss))(model, jnp.ones((3, 4)))
        assert int(model.layers[1].rngs.count[...]) == 2
        return nnx.to_pure_dict(nnx.state(grads))

    plain = run("off")
    for mode in ("checkpoint", "offload"):
        assert_same(run(mode), plain)


def taken(x, use_gradient_checkpointing=False):
    return x


class Taken(nnx.Module):
    def __call__(self, x, *, use_gradient_checkpointing_offload=False):
        return x


@pytest.mark.parametrize(
    ("model", "flags", "error", "message"),
    [
        (taken, (True, False), ArgumentError, "argument 'use_gradient_checkpointing', but .* consumes.*rename it"),
        (Taken(), (True, False), ArgumentError, "argument 'use_gradient_checkpointing_offload', but .* consumes.*rename it"),
        (jnp.sin, (1, False), ArgumentError, "use_gradient_checkpointing=1: expected True or False"),
        (Linen(), (True, False), ArgumentError, r"not bound.*model.bind\(variables\)"),
        ("block", (True, False), ArgumentError, "expected a bound Linen module, an NNX module or a function"),
        (lambda x: jnp.sin(x), (False, True), NoEffectError, "offloads nothing in <lambda>|offloads nothing in lambda"),
    ],
)
def test_errors_say_what_to_do(model, flags, error, message):
    with pytest.raises(error, match=message):
        rj.gradient_checkpoint_forward(model, *flags, jnp.ones(()))


def test_a_traced_flag_is_refused_and_a_model_may_be_an_argument_by_position():
    with pytest.raises(ArgumentError, match="expected True or False, known while tracing"):
        jax.jit(lambda flag: rj.gradient_checkpoint_forward(jnp.sin, True, flag, jnp.ones(2)))(True)
    assert rj.gradient_checkpoint_forward(lambda model, x: model(x), True, False, jnp.sin, jnp.ones(2)).shape == (2,)


LAYERS = 5


def kernels() -> Any:
    return list(values(LAYERS, 4, 4)), values(3, 4, seed=1)


class Layer(nnx.Module):
    def __init__(self, kernel: Any) -> None:
        self.kernel = nnx.Param(kernel)

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(x @ self.kernel[...])


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return jnp.tanh(Linear(4)(x))


class Stack(nn.Module):
    segments: int
    policy: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layers = [Dense(name=f"layer_{index}") for index in range(LAYERS)]
        return rj.checkpoint_sequential(layers, self.segments, x, policy=self.policy)


def sequential_loss(kind: str, segments: int, policy: str = "full") -> Any:
    def loss(weights: Any, x: Any) -> Any:
        if kind == "linen":
            params = {f"layer_{index}": {"Linear_0": {"kernel": w}} for index, w in enumerate(weights)}
            return Stack(segments, policy).apply({"params": params}, x).sum()
        layers = [lambda x, w=w: jnp.tanh(x @ w) for w in weights]
        modules = {"nnx": LAYERS, "mixed": 1, "function": 0}[kind]
        layers[:modules] = map(Layer, weights[:modules])
        return rj.checkpoint_sequential(layers, segments, x, policy=policy).sum()

    return loss


@pytest.mark.parametrize("kind", ["function", "nnx", "mixed", "linen"])
def test_all_but_the_last_segment_run_again(x64, kind):
    weights, x = kernels()
    plain = lambda weights, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x).sum()  # noqa: E731
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(weights, x)
    # size = 5 // segments; the layers of all segments but the last are recomputed.
    for segments, again in {1: 0, 2: 2, 3: 2, 4: 3, 5: 4}.items():
        grad = jax.value_and_grad(sequential_loss(kind, segments), argnums=(0, 1))  # the value needs the last segment once
        assert matmuls(grad, weights, x) == 3 * LAYERS + again, segments
        if segments in (2, 5):
            assert_same(jax.jit(grad)(weights, x)[1], expected)


def test_another_policy_for_the_segments():
    for policy, count in {"off": 15, "dots": 15, "full": 17}.items():
        assert matmuls(jax.grad(sequential_loss("nnx", 2, policy), argnums=(0, 1)), *kernels()) == count, policy


def test_a_sequential_is_a_list_of_its_layers_and_inputs_may_be_pytrees(x64):
    weights, x = kernels()
    model = nnx.Sequential(*map(Layer, weights))
    for layers in (model, nnx.List(model.layers)):
        assert_same(rj.checkpoint_sequential(layers, 2, x), model(x))
    pair = rj.checkpoint_sequential([lambda xy: (xy[1], xy[0] + 1)] * 4, 2, (jnp.zeros(3), jnp.ones(3)))
    np.testing.assert_array_equal(pair, [[2.0] * 3, [3.0] * 3])


class Counts(nnx.Module):
    def __init__(self):
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.seen[...] = self.seen[...] + x.sum()
        return 2 * x


def test_state_that_layers_write_in_a_segment_is_written_back():
    layers = [Counts() for _ in range(4)]
    rj.checkpoint_sequential(layers, 2, jnp.ones(3))
    assert [float(layer.seen[...]) for layer in layers] == [3.0, 6.0, 12.0, 24.0]


@pytest.mark.parametrize(
    ("functions", "segments", "message"),
    [
        *(
            ([jnp.sin] * 2, n, f"segments={n!r}: expected an integer from 1 to the number of functions, 2")
            for n in (0, 3, True)
        ),
        ([jnp.sin] * 2, 1.0, "segments=1.0: expected an integer"),
        ([], 1, "expected at least one function"),
        (jnp.sin, 1, "expected a list of functions or modules"),
        (Layer(jnp.ones((3, 3))), 1, "expected a list of functions or modules"),
        ([Linear(4), Linear(4)], 2, "not bound"),
    ],
)
def test_wrong_arguments_are_named(functions, segments, message):
    with pytest.raises(ArgumentError, match=message):
        rj.checkpoint_sequential(functions, segments, jnp.ones(3))
