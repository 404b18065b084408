"""Ties exist exactly where a policy offloads outside every loop, and do not change values."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import remat_jax as rj
from remat_jax import compat
from remat_jax.compat import data_ties
from remat_jax.core.ties import tied
from tests.small_models import Mlp, assert_same, equations, make_loss, times

OFFLOADS = ("offload_inputs", "offload: *tanh*; save: @dots")


def barriers(fn: Any, *args: Any) -> int:
    return times("optimization_barrier", fn, *args)


@pytest.mark.versions
@pytest.mark.parametrize("policy", OFFLOADS)
def test_each_unrolled_offload_is_tied_and_nothing_else_is(policy: str) -> None:
    loss, params, x = make_loss()
    gradient = jax.grad(rj.checkpoint_blocks(loss, {Mlp: policy}))
    # Per block at least: forward, at the start and at the end of the backward pass.
    assert barriers(gradient, params, x) >= 3 * 2
    assert barriers(jax.jit(gradient), params, x) == barriers(gradient, params, x)
    for untied in ("full", "dots", "everything"):
        assert barriers(jax.grad(rj.checkpoint_blocks(loss, {Mlp: untied})), params, x) == 0
    lowered = jax.jit(gradient).lower(params, x).as_text()
    assert lowered.count("optimization_barrier") >= 3 * 2


class Summed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, b: jax.Array) -> jax.Array:
        for number in range(5):
            x = nn.Dense(4, use_bias=False, param_dtype=x.dtype)(x if number == 2 else jnp.tanh(x))
            x = x + b if number == 1 else x
        return x


def test_a_matmuls_operand_may_be_a_gradient(x64: None) -> None:
    """The cotangent of the sum with `b` is the gradient of `b`, too, and is an operand of the next matmul."""
    first, second, x = Summed(), Summed(), jax.random.normal(jax.random.key(0), (8, 4))
    params = [block.init(jax.random.key(number), x, x) for number, block in enumerate((first, second))]

    def loss(params: Any) -> Any:
        h = first.apply(params[0], x, jnp.sin(x))
        return jnp.sum(second.apply(params[1], h, jnp.sin(h)) ** 2)

    assert_same(jax.jit(jax.grad(rj.checkpoint_blocks(loss, {Summed: "offload_inputs"})))(params), jax.grad(loss)(params))


@pytest.mark.parametrize("around", ["scan", "jit in scan", "vmap in scan", "checkpoint in scan", "cond in scan", "while"])
def test_nothing_is_tied_inside_a_loop(around: str) -> None:
    block = rj.remat(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), "offload: *tanh*; save: @dots")
    bodies = {
        "jit in scan": jax.jit(block),
        "vmap in scan": jax.vmap(block, (None, 0)),
        "checkpoint in scan": jax.checkpoint(block),
        "cond in scan": lambda w, x: jax.lax.cond(x[0, 0] > 0, block, lambda w, x: x, w, x),
    }

    def loss(w: Any, x: Any) -> Any:
        if around == "while":
            step = jax.grad(lambda x: jnp.sum(block(w, x)))
            return jnp.sum(jax.lax.fori_loop(0, x.shape[0], lambda _, x: x - step(x), x))
        return jnp.sum(jax.lax.scan(lambda x, _: (bodies.get(around, block)(w, x), None), x, None, length=3)[0])

    w, x = jnp.eye(3), jnp.ones((2, 3))
    traced_equations = equations(loss if around == "while" else jax.grad(loss), w, x)
    loops = [eqn for eqn, outer in traced_equations if "scan" in outer or "while" in outer]
    moved = [eqn for eqn in loops if eqn.primitive.name == "device_put"]
    # The new rematerialisation puts its own barriers into a region.
    ties = {"tied_linear"} | ({"optimization_barrier"} if not jax.config.jax_remat3 else set())
    assert moved and not any(eqn.primitive.name in ties for eqn in loops)
    # The same block outside a loop is tied.
    assert barriers(jax.grad(lambda w: jnp.sum(block(w, x))), w) >= 3


def plain(w: Any, x: Any, index: Any) -> list[Any]:
    h = jnp.sin(x @ w)
    return [h @ w, jnp.argmax(h, -1) + index, (h * 1j).astype(complex)]


@tied
def block(w: Any, x: Any, index: Any) -> list[Any]:
    return jax.checkpoint(plain)(w, x, index)


def test_tied_functions_of_any_outputs(x64: None) -> None:
    w, x, index = jnp.eye(3) + 0.1, jnp.ones((2, 3)) / 3, jnp.arange(2)

    def ways(f: Any) -> list[Any]:
        def loss(w: Any, x: Any) -> Any:
            y, which, z = f(w, x, index)
            return jnp.sum(y**2) + jnp.sum(jnp.abs(z - 2) * which[:, None])

        return [
            jax.grad(jax.jit(loss), (0, 1))(w, x),
            jax.jvp(loss, (w, x), (w, x)),
            jax.vmap(jax.grad(loss), (0, None))(jnp.stack([w, 2 * w]), x),
            jax.vmap(jax.grad(loss), (None, 1))(w, jnp.stack([x, 2 * x], 1)),
            jax.hessian(loss, 1)(w, x),
        ]

    for ours, expected in zip(*(jax.jit(ways, static_argnums=0)(f) for f in (block, plain)), strict=True):
        assert_same(ours, expected)


def test_nothing_to_differentiate_means_nothing_to_tie() -> None:
    w, x, index = jnp.eye(3), jnp.ones((2, 3)), jnp.arange(2)
    assert barriers(lambda w: block(w, x, index), w) == 0
    assert barriers(lambda w: jax.jvp(lambda s: s * jnp.sum(block(w, x, index)[0]), (1.0,), (1.0,)), w) == 0


def test_a_gradient_beside_a_value_that_is_differentiated_again(x64: None) -> None:
    """Only the second derivative is refused; host arrays have no cotangent here."""
    loss, params, x = make_loss()

    def values_only(fn: Any) -> Any:
        return jax.jit(jax.grad(lambda params: jax.value_and_grad(fn)(params, x)[0]))(params)

    assert_same(values_only(rj.checkpoint_blocks(loss, {Mlp: OFFLOADS[1]})), values_only(loss))


@jax.custom_vjp
def scaled(p: Any, y: Any) -> Any:
    return p * y, y


scaled.defvjp(lambda p, y: (scaled(p, y), (p, y)), lambda kept, g: (g[0] * kept[1], g[0] * kept[0] + g[1]))


@pytest.mark.parametrize(("policy", "times_called"), [("full", 1), ("offload: *", 2), ("offload_inputs", 1)])
def test_a_custom_vjp_that_gives_one_result_to_a_whole_batch(policy: str, times_called: int, x64: None) -> None:
    """The gradient of JAX 0.10 itself is wrong here: it counts the shared result for each row; JAX 0.12 raises an error."""

    def gradient(rule: Any, policy: str) -> Any:
        block = rj.remat(lambda w, p, c: rule(jnp.sin(p), jnp.tanh(w @ c)), policy)

        def row(w: Any, p: Any, c: Any) -> Any:
            for _ in range(times_called):
                p, y = block(w, p, c)
            return p.sum() + y.sum()

        return jax.jit(jax.grad(lambda w, p, c: jax.vmap(row, (None, 0, None))(w, p, c).sum(), (0, 1, 2)))

    w, p, c = jnp.full((4, 4), 0.1), jnp.linspace(0.1, 1, 48).reshape(3, 4, 4), jnp.full((4, 4), 0.3)
    expected = gradient(lambda p, y: (p * y, y), "off")(w, p, c)
    try:
        grads = gradient(scaled, policy)(w, p, c)
    except ValueError as error:
        assert "primal output that is shared across" in str(error)
    else:
        assert_same(grads, expected)


@pytest.mark.parametrize("policy", ["full", "offload: *tanh*"])
def test_what_does_not_read_the_batch_comes_out_once(policy: str, x64: None) -> None:
    """The `out_axes` of a `vmap` may require that."""
    x, scale = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.linspace(0.5, 1, 4)

    def gradient(block: Any) -> Any:
        def loss(x: Any, scale: Any) -> Any:
            each, still = jax.vmap(block, in_axes=(0, None), out_axes=(0, None))(x, scale)
            return each.sum() + still.sum(), still

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, scale)

    def block(x: Any, scale: Any) -> Any:
        return jnp.sin(jnp.tanh(x * scale)), jnp.cos(jnp.tanh(scale))

    grads, plain = gradient(rj.remat(block, policy)), gradient(block)
    assert grads[1].shape == (4,)
    assert_same(grads, plain)


# Ties by data, with which XLA:TPU keeps the order of unrolled blocks that offload (`compat.data_ties`).


HOST = jax.memory.Space.Host
VALUES = (
    jnp.asarray([-0.0, jnp.nan, jnp.inf, 1e-40, 3.0]),
    jnp.asarray([[True, False]]),
    jnp.asarray(3, jnp.int8),
    jnp.asarray([1 + 2j]),
    jnp.linspace(-1, 1, 12).astype(jnp.bfloat16).reshape(3, 4),
    jnp.asarray([0.1, 2.0], jnp.float8_e4m3fn),
    jnp.zeros((0, 2)),
    jax.random.key(0),
)


def bits(value: Any) -> bytes:
    return np.asarray(jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value).tobytes()


def text(function: Any, *args: Any, platform: str, devices: int = 1) -> str:
    mesh = jax.sharding.AbstractMesh((devices,), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    checks = [export.DisabledSafetyCheck.custom_call("annotate_device_placement")]
    jitted = jax.jit(function, in_shardings=place) if devices > 1 else jax.jit(function)
    return str(export.export(jitted, platforms=[platform], disabled_checks=checks)(*args).mlir_module())


def test_held_values_keep_their_bits_whatever_they_wait_for() -> None:
    held = jax.jit(lambda *values: data_ties._held(*values, *values, number=len(values)))(*VALUES)
    assert list(map(bits, held[: len(VALUES)])) == list(map(bits, VALUES))


SHAPES = [(), (5,), (1, 8), (15, 8), (64, 4), (33, 8), (5, 4, 3), (1, 40, 3), (2, 1, 1)]


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, "float32") for shape in SHAPES), ((15, 8), "bfloat16"), ((33, 8), "int8")]
)
def test_a_fetched_array_keeps_its_bits(shape: tuple[int, ...], dtype: str) -> None:
    value = jnp.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    fetched = jax.jit(lambda x: data_ties._fetched(jax.device_put(x, HOST), x, jax.device_put(x, HOST)))(value)
    assert fetched.shape == shape and bits(fetched) == bits(value)


def program(x: Any) -> Any:
    host = jax.device_put(x, HOST)
    y = jnp.sin(x)
    return compat.held([y], [host, y])[0] + compat.fetched(host, [y])


@pytest.mark.parametrize(
    "platform, devices, tied", [("tpu", 1, True), ("tpu", 2, False), ("cuda", 1, False), ("cpu", 1, False)]
)
def test_only_a_program_for_one_tpu_is_tied_by_data(platform: str, devices: int, tied: bool) -> None:
    lowered = text(program, jax.ShapeDtypeStruct((64, 8), jnp.float32), platform=platform, devices=devices)
    assert (lowered.count("stablehlo.dynamic_slice") == 3) == tied
    assert ("stablehlo.select" in lowered) == ("stablehlo.remainder" in lowered) == tied


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_a_program_with_64_bits_is_tied_too(dtype: str) -> None:
    with jax.enable_x64(True):
        lowered = text(program, jax.ShapeDtypeStruct((64, 8), dtype), platform="tpu")
        held = jax.jit(lambda x: data_ties._held(x, x, number=1)[0])(jnp.asarray([[2**40, -(2**62)]]).astype(dtype))
    assert lowered.count("stablehlo.dynamic_slice") == 3 and bits(held) == bits(np.asarray([[2**40, -(2**62)]]).astype(dtype))


def test_derivatives_and_batches() -> None:
    x = jnp.linspace(0, 1, 512).reshape(64, 8)
    plain = lambda x: jnp.sin(x) + x  # noqa: E731
    direct, expected = (jax.jit(lambda x, f=f: jax.jvp(f, (x,), (x,)))(x) for f in (program, plain))
    assert all(map(jnp.array_equal, direct, expected))
    batch = jnp.stack([x, 2 * x])
    assert jnp.array_equal(jax.jit(jax.vmap(program))(batch), jax.jit(jax.vmap(plain))(batch))
