"""Optimizer state in host memory: the same training to the bit, the placement of arrays, and the order of the copies."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training import train_state
from jax.experimental import io_callback

import remat_jax as rj
from remat_jax.errors import ArgumentError, NoEffectError, UnsupportedError
from remat_jax.train.parameters import result_structs
from tests.small_models import assert_bit_equal, equations

LEARNING_RATE = 0.1
"""Ten steps of it move every parameter far more than rounding: an optimizer that does nothing would be seen."""

LAYERS = 4
OPTIMIZERS = {
    "sgd": optax.sgd(LEARNING_RATE, momentum=0.9),
    "adam": optax.adam(LEARNING_RATE),
    "adamw": optax.adamw(LEARNING_RATE),
}
MOMENTS = {"sgd": 1, "adam": 2, "adamw": 2}
ELEMENTS = LAYERS * (16 * 8 + 8)
OTHERS = {
    "schedule": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.cosine_decay_schedule(LEARNING_RATE, 9)),
    "adafactor": optax.adafactor(LEARNING_RATE, min_dim_size_to_factor=4),
    "masked": optax.masked(optax.adam(LEARNING_RATE), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
    "groups": optax.multi_transform(
        {"slow": optax.adam(0.01), "fast": optax.sgd(LEARNING_RATE, momentum=0.5)},
        lambda tree: jax.tree.map(lambda leaf: "slow" if leaf.ndim > 1 else "fast", tree),
    ),
    "every 2": optax.MultiSteps(optax.adam(LEARNING_RATE), 2),
    "compiled": optax.GradientTransformation(optax.adam(LEARNING_RATE).init, jax.jit(optax.adam(LEARNING_RATE).update)),
}


def parameters() -> Any:
    random = np.random.default_rng(0)
    shapes = {"kernel": (16, 8), "bias": (8,)}
    return {
        f"layer_{index}": {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
        for index in range(LAYERS)
    }


BATCHES = [jnp.asarray(np.random.default_rng(seed).normal(size=(4, 16)), jnp.float32) for seed in range(10)]


def loss(params: Any, x: Any) -> Any:
    return sum(jnp.mean((x @ layer["kernel"] + layer["bias"]) ** 2) for layer in params.values())


def train(tx: Any, steps: int, *, apply: bool = False) -> tuple[Any, Any]:
    def step(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        if apply:
            return tx.apply(gradients, state, params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(step, donate_argnums=(0, 1))
    params = parameters()
    state = tx.init(params)
    for x in BATCHES[:steps]:
        params, state = run(params, state, x)
    return params, state


@functools.cache
def plain(name: str) -> tuple[Any, Any]:
    return train(OPTIMIZERS[name], 10)


def on_host(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if jax.typeof(leaf).memory_space is jax.memory.Space.Host)


# --- the same training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fraction", "apply"),
    [("adam", 0, False), ("sgd", 0.5, False), ("sgd", 1.0, False), ("adam", 0.5, True), ("adamw", 1.0, True)],
)
def test_ten_steps_are_the_plain_optimizers_to_the_bit(name, fraction, apply):
    params, state = train(rj.offload_optimizer(OPTIMIZERS[name], fraction), 10, apply=apply)
    assert_bit_equal((params, state), plain(name))
    moved = [float(jnp.max(jnp.abs(new - old))) for new, old in zip(*map(jax.tree.leaves, (params, parameters())), strict=True)]
    assert min(moved) > 0.1, "a parameter has not moved"
    assert on_host(state) == fraction * 4 * MOMENTS[name] * ELEMENTS
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if not leaf.ndim} <= {"device"}


@pytest.mark.parametrize("name", OTHERS)
def test_any_optax_optimizer_works(name):
    tx = rj.offload_optimizer(OTHERS[name])
    params, state = train(tx, 2)
    assert_bit_equal((params, state), train(OTHERS[name], 2))
    assert on_host(state) == tx.placement(parameters()).host_bytes > 500
    assert on_host(state) + tx.placement(parameters()).device_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_inside_a_chain_and_with_what_an_update_may_be_told_beside():
    """`extra` reaches the optimizer, also if it is no array."""

    def scaled(updates: Any, state: Any, params: Any = None, *, scale: Any, how: str) -> Any:
        assert how == "by hand"
        state = jax.tree.map(lambda s, u: s + u * scale, state, updates)
        return state, state

    tx = optax.GradientTransformationExtraArgs(lambda params: jax.tree.map(jnp.zeros_like, params), scaled)
    chain = optax.chain(rj.offload_optimizer(tx), optax.scale(-1.0))
    state = chain.init({"w": jnp.ones(3)})
    assert on_host(state) == 12
    updates, state = jax.jit(lambda s, scale: chain.update({"w": jnp.ones(3)}, s, scale=scale, how="by hand"))(state, 2.0)
    assert updates["w"].tolist() == [-2.0] * 3 and state[0]["w"].tolist() == [2.0] * 3 and on_host(state) == 12


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_state_that_was_saved_on_either_side_goes_on():
    tx, reference = rj.offload_optimizer(optax.adam(LEARNING_RATE)), optax.adam(LEARNING_RATE)
    state, device_state = tx.init(parameters()), reference.init(parameters())
    assert_bit_equal(state, device_state)
    step = jax.jit(lambda tx, s, x: tx.update(jax.grad(loss)(parameters(), x), s, parameters()), static_argnums=0)
    _, saved = step(tx, state, BATCHES[0])
    loaded = serialization.from_bytes(device_state, serialization.to_bytes(jax.tree.map(np.asarray, saved)))
    expected = step(reference, jax.tree.map(jnp.asarray, loaded), BATCHES[1])
    result = step(tx, jax.tree.map(jnp.asarray, loaded), BATCHES[1])
    assert_bit_equal(result, expected)
    assert on_host(loaded) == 0 and on_host(result[1]) == 2 * 4 * ELEMENTS, "what was loaded to the device returns to the host"


def test_train_state_and_nnx_optimizer():
    state = train_state.TrainState.create(
        apply_fn=loss, params=parameters(), tx=rj.offload_optimizer(optax.adam(LEARNING_RATE))
    )
    state = jax.jit(lambda s, x: s.apply_gradients(grads=jax.grad(loss)(s.params, x)))(state, BATCHES[0])
    assert_bit_equal(state.params, train(optax.adam(LEARNING_RATE), 1)[0])
    assert on_host(state.opt_state) == 2 * 4 * ELEMENTS

    def trained(tx: Any) -> Any:
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: Any) -> None:
            optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model))

        for x in BATCHES[:3]:
            step(model, optimizer, x)
        return nnx.state(model), nnx.state(optimizer, nnx.optimizer.OptState)

    params, state = trained(rj.offload_optimizer(optax.adam(LEARNING_RATE)))
    expected, _ = trained(optax.adam(LEARNING_RATE))
    assert_bit_equal(params, expected)
    assert on_host(state) == 2 * 4 * (16 * 8 + 8)


def test_which_leaves_move():
    tx = rj.offload_optimizer(optax.adam(LEARNING_RATE), 0.6)
    placement = tx.placement(jax.eval_shape(parameters))
    assert placement.host_bytes == 4 * (5 * 16 * 8 + 8) <= 0.6 * 2 * 4 * ELEMENTS
    moved = [leaf.path for leaf in placement.leaves if leaf.on_host]
    kernels = [f"0/mu/layer_{index}/kernel" for index in range(LAYERS)]
    assert moved == ["0/mu/layer_0/bias", *kernels, "0/nu/layer_0/kernel"]
    assert [leaf.nbytes for leaf in placement.leaves if leaf.path == "0/count"] == [4]
    assert on_host(tx.init(parameters())) == placement.host_bytes


# --- the order of the copies ------------------------------------------------------------------------------------------


def copies(tx: Any, *, apply: bool) -> list[tuple[str, tuple[int, ...]]]:
    """The copies of a step in program order, fetched from the host or sent to it; only the shapes of kernels."""

    def step(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        return tx.apply(gradients, state, params) if apply else tx.update(gradients, state, params)

    state = result_structs(tx.init, parameters())
    moves = []
    for eqn, _ in equations(step, parameters(), state, BATCHES[0]):
        if eqn.primitive.name == "device_put" and eqn.outvars[0].aval.ndim == 2:
            to = eqn.outvars[0].aval.memory_space
            moves.append("send" if to is jax.memory.Space.Host else "fetch")
    return moves


def test_one_leaf_comes_after_the_last_has_gone():
    streamed = ["fetch", "send"] * 2 * LAYERS
    for apply in (False, True):
        assert copies(rj.offload_optimizer(optax.adam(1.0)), apply=apply) == streamed
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1.0))
    assert copies(rj.offload_optimizer(clipped), apply=True) == streamed
    assert copies(rj.offload_optimizer(OTHERS["compiled"]), apply=True) == streamed, "a jit around the update is looked into"
    together = copies(rj.offload_optimizer(optax.MultiSteps(optax.adam(1.0), 2)), apply=True)
    assert together[: 3 * LAYERS] == ["fetch"] * 3 * LAYERS, "one equation needs them all"


def test_every_fetch_waits_for_the_gradient_and_for_what_was_sent():
    tx = rj.offload_optimizer(optax.adam(1.0))
    state = result_structs(tx.init, parameters())
    traced_equations = equations(lambda p, s, x: tx.apply(jax.grad(loss)(p, x), s, p), parameters(), state, BATCHES[0])
    inside = [around for eqn, around in traced_equations if eqn.primitive.name == "optimization_barrier"]
    barriers = [eqn for eqn, _ in traced_equations if eqn.primitive.name == "cond"]  # one for each kind of platform
    assert inside and all(around[-1] == "cond" for around in inside)
    fetches = [eqn.invars[0] for eqn, _ in traced_equations if eqn.primitive.name == "device_put" and not _goes_to_host(eqn)]
    behind = {var: eqn for eqn in barriers for var in eqn.outvars}
    assert len(fetches) == 4 * LAYERS and all(var in behind for var in fetches)
    sent = {eqn.outvars[0] for eqn, _ in traced_equations if eqn.primitive.name == "device_put" and _goes_to_host(eqn)}
    waits = [any(var in sent for var in behind[var].invars) for var in fetches]
    assert waits == [False] + [True] * (4 * LAYERS - 1)


def _goes_to_host(eqn: Any) -> bool:
    return eqn.outvars[0].aval.memory_space is jax.memory.Space.Host


def fetched(step: Any, params: Any) -> list[tuple[int, ...]]:
    """The shapes of the kernels' momenta in the order in which they are fetched; `step` has one transformation of `sgd`."""
    tx = rj.offload_optimizer(optax.sgd(1.0, momentum=0.9))
    traced = equations(lambda params, state: step(tx, params, state), params, result_structs(tx.init, params))
    shapes = [eqn.outvars[0].aval.shape for eqn, _ in traced if eqn.primitive.name == "device_put"]
    return [shape for shape in shapes[::2] if len(shape) == 2]


def test_parameters_follow_the_backward_pass():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2, name="a_last")(nn.remat(nn.Dense)(3, name="z_first")(nn.Dense(4, name="input")(x)))

    def step(tx: Any, params: Any, state: Any) -> Any:
        return tx.update(jax.grad(lambda p: Model().apply(p, BATCHES[0]).sum())(params), state, params)

    params = Model().init(jax.random.key(0), BATCHES[0])
    assert fetched(step, params) == [(3, 2), (4, 3), (16, 4)], "by name it would be z, input, a"


# --- effects ----------------------------------------------------------------------------------------------------------


def watched(log: list[Any], ordered: bool) -> optax.GradientTransformation:
    """Notes what it computes, with and without results, alone, in a call and in a loop."""

    def note(tag: str) -> Any:
        return lambda value: log.append((tag, float(np.sum(value))))

    def value(x: Any) -> Any:
        log.append(("value", float(x)))
        return np.float32(2)

    def init(params: Any) -> Any:
        jax.debug.callback(note("init"), params["w"], ordered=ordered)
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        io_callback(note("gradient"), None, updates["w"], ordered=ordered)
        state = jax.tree.map(lambda m, g: 0.5 * m + g, state, updates)
        factor = io_callback(value, jax.ShapeDtypeStruct((), jnp.float32), state["w"].sum(), ordered=ordered)
        io_callback(value, jax.ShapeDtypeStruct((), jnp.float32), state["b"].sum(), ordered=ordered)  # its result is unused

        @jax.jit
        def call(w: Any, b: Any) -> Any:
            jax.debug.callback(note("call"), b, ordered=ordered)
            return jax.lax.fori_loop(0, 2, lambda _, w: jax.debug.callback(note("loop"), w, ordered=ordered) or w + 1, w), 2 * b

        w, b = call(updates["w"], updates["b"])
        return {"w": factor * w, "b": b}, state

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(("compiled", "ordered", "fraction"), [(True, False, 1.0), (True, False, 0.9), (False, True, 1.0)])
def test_effects_run_once_each_and_in_the_plain_optimizers_order(compiled, ordered, fraction):
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}

    def run(wrap: Any) -> tuple[list[Any], Any]:
        log: list[Any] = []
        tx = wrap(watched(log, ordered))
        init, update = (jax.jit(tx.init), jax.jit(tx.update)) if compiled else (tx.init, tx.update)
        results = update(params, init(params), params)
        jax.block_until_ready(results)
        jax.effects_barrier()
        return log, results

    (expected_log, expected), (log, results) = run(lambda tx: tx), run(lambda tx: rj.offload_optimizer(tx, fraction))
    assert len(log) == 7 and log == expected_log
    assert_bit_equal(results, expected)


def test_ordered_effects_under_jit_are_refused_before_jaxs_compiler_fails():
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    tx = rj.offload_optimizer(watched([], True))
    for function, args in ((tx.init, (params,)), (tx.update, (params, params, params))):
        with pytest.raises(UnsupportedError, match="tx: .* a callback .* ordered=True.* give ordered=False"):
            jax.jit(function)(*args)


# --- compilations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["eager", "jit"])
def test_a_donated_step_of_committed_parameters_is_compiled_once(init):
    """The first step commits its results, so JAX compiles a second step if the parameters were not committed before."""
    tx = rj.offload_optimizer(optax.adam(LEARNING_RATE), 0.5)

    def step(params: Any, state: Any, x: Any) -> Any:
        return tx.apply(jax.grad(loss)(params, x), state, params)

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = jax.device_put(parameters(), jax.devices()[0])
    state = (tx.init if init == "eager" else jax.jit(tx.init))(params)
    for x in BATCHES[:3]:
        params, state = compiled(params, state, x)
    assert compiled._cache_size() == 1


# --- wrong use --------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named():
    for fraction in (-0.1, 1.5, "half", True, float("nan")):
        with pytest.raises(ArgumentError, match=r"fraction=.*expected a number from 0 \(nothing moves\) to 1"):
            rj.offload_optimizer(optax.adam(1e-3), fraction)
    with pytest.raises(ArgumentError, match="tx='adam': expected an optax optimizer, such as optax.adam"):
        rj.offload_optimizer("adam")


def test_nothing_to_move_is_an_error_and_not_a_silent_no_op():
    for tx in (optax.sgd(0.1), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)):
        with pytest.raises(NoEffectError, match="fraction=1.0: no optimizer state would move.*plain SGD has no state"):
            rj.offload_optimizer(tx).init(parameters())
    with pytest.raises(NoEffectError, match=r"its smallest leaf is 0.00735 of the state; give at least that"):
        rj.offload_optimizer(optax.adam(0.1), 0.001).placement(parameters())
    assert on_host(rj.offload_optimizer(optax.sgd(0.1), 0).init(parameters())) == 0
