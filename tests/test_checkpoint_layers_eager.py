"""Policies by layer in calls outside `jit`: nothing compiles twice, and no stale values return."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax import compat
from remat_jax.apply.per_layer import kept_programs
from tests.small_models import Linear, Mlp, NnxCounted, assert_bit_equal, assert_same, in_a_scan, make_loss, to_host, values

MIXED = "1 x full | 2 x dots"
_compiled: list[str] = []


def _heard(event: str, _: float, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_heard)


def compiled(call: Callable[[], Any]) -> int:
    """The number of programs that XLA compiles during a call."""
    before = len(_compiled)
    jax.block_until_ready(call())
    return len(_compiled) - before


class Gated(nn.Module):
    """A derivative rule (`relu`), a softmax, dropout, and a `jit`."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = jax.jit(lambda x: jnp.where(x > 0, x, -x))(jax.nn.relu(Linear(3)(x)))
        return x + nn.Dropout(0.5, deterministic=False)(Linear(x.shape[-1])(jax.nn.softmax(y)))


class Model(nn.Module):
    """A layer, then two in a scan."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return in_a_scan(Gated(), Gated()(x), 2)


def test_a_second_call_compiles_nothing() -> None:
    x, seeds = values(2, 3, 4), list(jnp.arange(3))
    params = jax.jit(Model().init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def loss(params: Any, x: Any, seed: Any) -> Any:
        return jnp.sum(jnp.sin(Model().apply(params, x, rngs={"dropout": jax.random.key(seed)})))

    fn, xs = rj.checkpoint_blocks(loss, {Gated: MIXED}), [x, 2 * x, 3 * x]

    def call(at: int) -> Any:
        return jax.value_and_grad(fn)(params, xs[at], seeds[at])

    assert compiled(lambda: call(0)) > 0
    assert compiled(lambda: call(1)) == 0
    # Other values and other random numbers are other programs.
    assert_same(call(2), jax.jit(jax.value_and_grad(loss))(params, xs[2], seeds[2]), 1e-5)
    assert float(fn(params, x, seeds[0])) != float(fn(params, x, seeds[1]))
    kept_programs._programs = ()
    assert compiled(lambda: call(0)) > 0, "what is kept is why"


def test_what_the_function_reads_from_outside_is_never_that_of_an_earlier_call() -> None:
    loss, params, x = make_loss(layers=3, scanned=True)
    outside = {"scale": 1.0, "shift": jnp.float32(0), "sign": "plus", "calls": 0}

    def reads(params: Any, x: Any) -> Any:
        outside["calls"] += 1
        value = outside["scale"] * loss(params, x) + outside["shift"]
        return -value if outside["sign"] == "minus" else value

    fn = rj.checkpoint_blocks(reads, {Mlp: MIXED})
    first = float(fn(params, x))
    for change, wanted in (
        ({"scale": 2.0}, 2 * first),
        ({"scale": -0.0, "shift": jnp.float32(7)}, 7),
        ({"scale": 1.0, "shift": jnp.float32(0), "sign": "minus"}, -first),
        ({"sign": "plus"}, first),
    ):
        outside.update(change)
        assert float(fn(params, x)) == pytest.approx(wanted, rel=1e-6)
    assert outside["calls"] == 5
    scaled, signs = rj.checkpoint_blocks(lambda p, x: outside["scale"] * jnp.exp(loss(p, x)), {Mlp: MIXED}), []
    for scale in (0.0, -0.0):
        outside["scale"] = scale
        signs.append(np.signbit(scaled(params, x)))
    assert signs == [False, True], "a zero is not its negative"


def test_another_policy_type_or_setting_is_another_program() -> None:
    loss, params, x = make_loss(layers=3, scanned=True)
    for function, policies in ((loss, MIXED), (loss, "2 x full | 1 x dots"), (jax.jit(loss), MIXED)):
        fn = rj.checkpoint_blocks(function, {Mlp: policies})
        assert [compiled(lambda fn=fn: jax.value_and_grad(fn)(params, x)) > 0 for _ in range(2)] == [True, False]
    with jax.default_matmul_precision("highest"):
        assert compiled(lambda: fn(params, x)) > 0
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x))
    assert fn(*half).dtype == jnp.bfloat16
    with jax.enable_x64(True):
        double = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), (params, x))
        assert_same(fn(*double), loss(*double))


class Held:
    """An object with weak references."""


def test_no_argument_is_kept_alive_and_programs_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, params, x = make_loss(layers=3, scanned=True)
    big, held, argument = jnp.ones((50, 50)), Held(), jnp.ones((40, 40))
    gone = [weakref.ref(kept) for kept in (big, held, argument)]

    def closes(params: Any, x: Any, argument: Any, *, held: Any, big: Any = big) -> Any:
        return loss(params, x) + jnp.sum(jax.jit(lambda: big)()) + jnp.sum(argument)

    fn = rj.checkpoint_blocks(closes, {Mlp: MIXED})
    jax.grad(fn)(params, x, argument, held=held)
    del closes, fn, big, argument, held
    jax.clear_caches()
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    monkeypatch.setattr(kept_programs, "_MOST", 2)
    for size in range(1, 4):
        rj.checkpoint_blocks(loss, {Mlp: "3 x full"})(params, jnp.ones((1, size, 4)))
    assert len(kept_programs._programs) == 2


def identity(kind: str, array: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function that closes over `array`, in one of four places in its program."""

    def reported(value: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: array.shape, value)
        return value * 1.0

    if kind == "callback":
        return reported
    same: Any = (jax.custom_vjp if kind == "custom_vjp" else jax.custom_jvp)(lambda primal: primal * 1.0)
    if kind == "custom_vjp":
        same.defvjp(lambda primal: (primal, None), lambda _, cotangent: (cotangent * array[0],))
    elif kind == "custom_jvp":
        same.defjvp(lambda primals, tangents: (primals[0] * 1.0, tangents[0] * array[0]))
    else:
        same.defjvp(lambda primals, tangents: (reported(primals[0]), tangents[0] * 1.0))
    return same


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp", "callback", "callback in a rule"])
def test_what_a_function_in_the_program_closes_over_is_not_kept_alive(kind: str) -> None:
    loss, params, x = make_loss(layers=3)

    def run(array: jax.Array) -> weakref.ref[jax.Array]:
        same = identity(kind, array)
        jax.block_until_ready(jax.grad(rj.checkpoint_blocks(lambda params, x: same(loss(params, x)), {Mlp: MIXED}))(params, x))
        return weakref.ref(array)

    before = len(kept_programs._programs)
    alive = [run(jnp.arange(4.0) + number) for number in range(2)]
    jax.clear_caches()
    gc.collect()
    assert len(kept_programs._programs) <= before and [reference() for reference in alive] == [None, None]


def test_nnx_state_moves_on_from_call_to_call() -> None:
    models = [nnx.List([NnxCounted(nnx.Rngs(index), 0.5) for index in range(2)]) for _ in range(2)]

    def loss(model: Any, x: Any) -> Any:
        for layer in model:
            x = layer(x)
        return jnp.sum(x**2)

    fn, x = rj.checkpoint_blocks(loss, {NnxCounted: "1 x full | 1 x dots"}), values(2, 4)
    losses = []
    for _ in range(2):
        grads = [nnx.grad(function)(model, x) for function, model in zip((fn, loss), models, strict=True)]
        assert_same(*(nnx.state(grad) for grad in grads), 1e-5)
        losses.append(float(fn(models[0], x)))
        assert losses[-1] == pytest.approx(float(loss(models[1], x)), rel=1e-6)
    assert len(set(losses)) == 2, "every call draws numbers of its own"
    assert [float(layer.calls[...]) for layer in models[0]] == [4.0] * 2
    assert_bit_equal(*(nnx.state(model, nnx.RngCount) for model in models))
    # A model that is closed over and only read is read in its present state.
    read = models[0][0].down.bias
    reads = rj.checkpoint_blocks(lambda model, x: loss(model, x) * 0 + jnp.sum(read[...]), {NnxCounted: "2 x full"})
    before = float(reads(models[1], x))
    read[...] += 1
    assert float(reads(models[1], x)) - before == pytest.approx(4.0)


def test_kept_programs_offload_and_are_differentiated_twice_and_mapped() -> None:
    loss, params, x = make_loss(layers=3, scanned=True)
    fn = rj.checkpoint_blocks(loss, {Mlp: "1 x full | 2 x offload_inputs"})
    for way in (
        lambda fn: jax.vmap(jax.grad(fn), (None, 0))(params, jnp.stack([x, x / 2])),
        lambda fn: jax.jvp(jax.grad(fn), (params, x), (params, x / 2))[1],
        lambda fn: jax.grad(fn)(params, x),
    ):
        assert_same(way(fn), jax.jit(way, static_argnums=0)(loss), 1e-5)
    kept = compat.jaxpr_function(kept_programs._programs[-1].resolved)
    sent = to_host(jax.grad(lambda *args: kept(*args)[0]), *jax.tree.leaves((params, x)))
    assert sent and sent == to_host(jax.grad(fn), params, x)


@dataclasses.dataclass(eq=False)
class Times:
    """Equal to another object field by field, but not the same."""

    field: float = 1.0

    def __post_init__(self) -> None:
        self.factor = 1.0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.float32(x * self.factor)


def test_a_callback_is_that_of_this_call() -> None:
    loss, params, x = make_loss(layers=3)
    factor = 1.0

    def called_back(params: Any, x: jax.Array) -> Any:
        times = Times()
        times.factor = factor
        return jax.pure_callback(times, jax.ShapeDtypeStruct((), jnp.float32), loss(params, x))

    fn = rj.checkpoint_blocks(called_back, {Mlp: MIXED})
    once = float(fn(params, x))
    factor = 2.0
    assert float(fn(params, x)) == pytest.approx(2 * once)


def test_a_rule_that_another_rule_calls_is_that_of_this_call() -> None:
    loss, params, x = make_loss(layers=3)
    slopes = [1.0]

    def ruled(params: Any, x: jax.Array) -> jax.Array:
        inner, outer = (jax.custom_jvp(lambda value: jnp.exp(value)) for _ in range(2))
        inner.defjvp(lambda primals, tangents: (inner(*primals), slopes[-1] * tangents[0]))
        outer.defjvp(lambda primals, tangents: (outer(*primals), tangents[0] * inner(*primals)))
        return outer(1e-3 * loss(params, x))

    def second(fn: Callable[..., Any]) -> float:
        gradient = jax.grad(fn, argnums=1)
        return float(jnp.sum(jax.jvp(lambda x: gradient(params, x), (x,), (x,))[1]))

    fn = rj.checkpoint_blocks(ruled, {Mlp: MIXED})
    derivatives = []
    for slope in (1.0, 5.0):
        slopes.append(slope)
        derivatives.append(second(fn))
        assert derivatives[-1] == pytest.approx(second(ruled), rel=1e-4)
    assert derivatives[0] != pytest.approx(derivatives[1], rel=1e-2)


def test_a_rule_that_raises_is_not_asked_where_nobody_differentiates() -> None:
    loss, params, x = make_loss(layers=3)

    def raising(primals: Any, tangents: Any) -> Any:
        raise TypeError("it has no derivative")

    def without_derivative(params: Any, x: jax.Array) -> Any:
        same = jax.custom_jvp(lambda value: value)
        same.defjvp(raising)
        return same(loss(params, x))

    fn = rj.checkpoint_blocks(without_derivative, {Mlp: MIXED})
    assert float(fn(params, x)) == float(fn(params, x)) == pytest.approx(float(loss(params, x)), rel=1e-6)
