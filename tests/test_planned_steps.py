"""Plans of finished training steps: those of their losses, given back under the step's own `jit`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import remat_jax as rj
from examples.steps import fsdp, nnx_optimizer
from examples.steps.network import WIDTH, Layer, Net, parameters
from remat_jax import compat
from remat_jax.errors import PlanningError, UnsupportedError
from remat_jax.planning import loop
from remat_jax.planning.model import Model
from tests.small_models import assert_same
from tests.step_kinds import X, assert_same_results, of_squares, results, taken


@pytest.fixture(autouse=True)
def few_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which plan it is does not matter here."""
    monkeypatch.setattr(loop, "MOST_COMPILED", 2)


class Trainer:
    """A step that is a method, with static arguments by name, of which one is bound and one is keyword-only."""

    @functools.partial(jax.jit, static_argnames=("self", "word"), donate_argnames=("params",))
    def step(self, params: Any, x: jax.Array, power: int = 2, *, word: str = "up") -> Any:
        grads = jax.grad(lambda params: (Net().apply({"params": params}, x) ** power).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * len(word) * g, params, grads)


def test_a_wrapper_of_a_jitted_step_has_its_static_and_donated_arguments() -> None:
    called: list[int] = []

    @functools.wraps(Trainer.step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        called.append(len(args))
        return Trainer.step(*args, **kwargs)

    params = parameters(Net())
    job = rj.Workload.from_step(counted, Trainer(), params, X)
    assert rj.measure(job, "full", "cpu").alias_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    planned = rj.plan(job, "1GiB", "cpu").apply(counted)
    called.clear()
    for _ in range(2):
        jax.block_until_ready(planned(Trainer(), jax.tree.map(jnp.copy, params), X))
    assert called == [3, 3]

    @functools.wraps(Trainer.step)
    def other(params: Any, x: jax.Array) -> Any:  # other arguments: nothing is known of them
        return Trainer.step(Trainer(), params, x)

    assert compat.jit_of(other)[:2] == ((), ()) and compat.jit_of(counted)[:2] == ((1,), (0,))


@pytest.mark.parametrize("step", [Trainer().step, functools.partial(Trainer.step, Trainer())])
def test_methods_and_partials_of_jitted_steps_are_jitted_steps(step: Any) -> None:
    params = parameters(Net())
    job = rj.Workload.from_step(step, params, X)
    assert rj.measure(job, "full", "cpu").alias_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    planned = rj.plan(step, (params, X), budget="1GiB", target="cpu").apply(step)
    assert type(planned) is type(jax.jit(abs))
    for options in ({}, {"word": "upward"}):
        given = jax.tree.map(jnp.copy, params)
        got, expected = planned(given, X, **options), step(jax.tree.map(jnp.copy, params), X, **options)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert_same(got, expected, 2e-6)


def test_shardings_of_a_partial_are_those_of_its_remaining_arguments() -> None:
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)), jax.sharding.PartitionSpec
    of_rows = jax.sharding.NamedSharding(mesh, spec("data"))

    def update(rate: jax.Array, params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(of_squares)(params, x))

    params, x = parameters(Net()), jax.device_put(X, of_rows)
    step = functools.partial(jax.jit(update, in_shardings=(None, None, of_rows)), jnp.float32(0.1))
    again = compat.jitted_like(functools.partial(update, 0.1), step, {})
    assert_same_results(step, again, (params, x))


def test_compiler_options_of_a_step_are_no_part_of_its_measurement_and_stay_in_the_plan() -> None:
    step = jax.jit(jax.grad(of_squares), compiler_options={"xla_cpu_enable_fast_math": False})
    params = parameters(Net())
    with pytest.warns(rj.RematWarning, match="the compiler options of its jit, {'xla_cpu_enable_fast_math': False}, are not"):
        job = rj.Workload.from_step(step, params, X)
    assert rj.measure(job, "full", "cpu").device_bytes > 0
    planned = rj.plan(job, "1GiB", "cpu").apply(step)
    assert compat.compiler_options(planned) == {"xla_cpu_enable_fast_math": False}
    assert_same_results(step, planned, (params, X))


@pytest.mark.parametrize("kind", ["nnx_optimizer", "equinox_filter_jit"])
def test_a_plan_gives_the_step_back_under_its_own_jit(kind: str) -> None:
    step, args = taken(kind)
    plan = rj.plan(step, args, budget="1GiB", target="cpu")
    planned = plan.apply(step)
    assert type(planned) is type(step) and type(planned).__name__ != "function"
    assert "Blocks found: Layer (4 calls)" in " ".join(plan.notes)
    assert_same_results(step, planned, args)
    with pytest.raises(Exception, match="no_such_option"):
        results(dataclasses.replace(plan, compiler_options={"no_such_option": "1"}).apply(step), args)


def test_a_plan_of_a_step_is_the_plan_of_its_loss() -> None:
    model = Net()
    state = TrainState.create(apply_fn=model.apply, params=parameters(model), tx=optax.adam(1e-2))
    x = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)

    def train_step(state: TrainState, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda params: (model.apply({"params": params}, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (model.apply({"params": params}, x) ** 2).mean()

    finished = rj.Workload.from_step(jax.jit(train_step), state, x, blocks=Layer, donate_argnums=0)
    of_loss = rj.Workload(loss, state.params, (x,), Layer, optimizer=state.tx)
    made, expected = (rj.plan(job, "3.9MiB", "cpu") for job in (finished, of_loss))
    assert not made.is_off and dict(made.policies) == dict(expected.policies)
    assert made.recompute_flops == expected.recompute_flops
    assert 0 <= made.predicted_bytes - expected.predicted_bytes <= 64
    # A TrainState counts its steps too.
    assert 0 <= made.device_bytes - expected.device_bytes <= 64
    assert rj.measure(finished, dict(made.policies), "cpu").device_bytes == made.device_bytes
    assert_same_results(*map(jax.jit, (train_step, rj.checkpoint_blocks(train_step, dict(made.policies)))), (state, X))
    planned = jax.eval_shape(made.apply(train_step), state, x)
    assert jax.tree.structure(planned) == jax.tree.structure(jax.eval_shape(train_step, state, x))
    with pytest.raises(PlanningError, match=r"planned for x float32\[4096, 6\], called with float32\[8, 6\]"):
        made.apply(train_step)(state, X)
    with pytest.raises(UnsupportedError, match="allow=\\['head_in_chunks'\\]: workload='train_step' is a finished step"):
        rj.plan(finished, "2MiB", "cpu", allow=["head_in_chunks"])


def test_a_plan_of_a_step_on_a_mesh_is_the_plan_of_its_loss() -> None:
    spec = jax.sharding.PartitionSpec
    x, params = jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32), parameters(fsdp.model)
    state = jax.eval_shape(fsdp.tx.init, params)
    places = (lambda _, leaf: spec("fsdp") if len(leaf.shape) == 3 else spec(),) * 2

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (fsdp.model.apply({"params": params}, x) ** 2).mean()

    mesh = {"fsdp": 2}
    finished = rj.Workload.from_step(
        fsdp.train_step, params, state, x, donate_argnums=(0, 1), mesh=mesh, shardings=(*places, spec("fsdp"))
    )
    of_loss = rj.Workload(loss, params, (x,), optimizer=fsdp.tx, mesh=mesh, shardings=(places[0], spec("fsdp")))
    assert finished.blocks == of_loss.blocks == (Layer,)
    made, expected = (rj.plan(job, "4MB", "2xcpu") for job in (finished, of_loss))
    assert not made.is_off and dict(made.policies) == dict(expected.policies)
    assert made.device_bytes == expected.device_bytes


def test_a_plan_names_the_arrays_of_an_nnx_step_by_their_arguments() -> None:
    args = nnx_optimizer.example_args()
    model = Model.of(rj.Workload.from_step(nnx_optimizer.train_step, *args))
    with pytest.raises(PlanningError, match=r"planned for x float32\[8, 6\], called with float32\[4, 6\]"):
        model.check_call(nnx_optimizer.train_step, (*args[:-1], X[:4]), {}, "the plan")
