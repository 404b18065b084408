"""Finished training steps as people write them: blocks found, policies by layer, residuals and plans without their loss."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import examples.steps
import remat_jax as rj
from examples.steps import fsdp, gan, nnx_optimizer
from examples.steps.network import LAYERS, WIDTH, Layer, Net, parameters, rows
from remat_jax import compat
from remat_jax.cli.workloads import load_workload
from remat_jax.compat import differentiation
from remat_jax.cost.count import matmuls
from remat_jax.errors import BlockError, PlanningError, UnsupportedError
from remat_jax.planning import blocks
from remat_jax.planning.model import Model

KINDS = sorted(module.name for module in pkgutil.iter_modules(examples.steps.__path__) if module.name != "network")
BY_LAYER = f"2 x full | 1 x save: *:sin#0 | {LAYERS - 3} x off"
EACH = pytest.mark.parametrize("kind", KINDS)
X = np.asarray(rows())


def taken(kind: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An example's step and its arguments."""
    module = importlib.import_module(f"examples.steps.{kind}")
    return module.train_step, module.example_args()


def in_float64(args: Any) -> Any:
    """The arguments with float64 in place of float32, in NNX objects too."""

    def wide(leaf: Any) -> Any:
        return leaf.astype(jnp.float64) if getattr(leaf, "dtype", None) == jnp.float32 else leaf

    for arg in args:
        if isinstance(arg, nnx.Module):
            nnx.update(arg, jax.tree.map(wide, nnx.state(arg)))
    return jax.tree.map(wide, args, is_leaf=lambda leaf: isinstance(leaf, nnx.Module))


def results(step: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """All arrays after the step: its results, and what it wrote to NNX objects among its arguments."""
    # The step may donate its arguments, and writes to objects.
    objects = [
        nnx.clone(arg)
        if isinstance(arg, nnx.Module)
        else jax.tree.map(lambda leaf: jnp.copy(leaf) if hasattr(leaf, "dtype") else leaf, arg)
        for arg in args
    ]
    out = step(*objects)
    written = [nnx.state(each) for each in objects if isinstance(each, nnx.Module)]
    return [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves((out, written))
        if hasattr(leaf, "dtype")
    ]


@EACH
def test_a_step_without_a_word_of_ours_has_its_blocks_found(kind: str) -> None:
    path = Path(examples.steps.__path__[0]) / f"{kind}.py"
    assert "remat" not in path.read_text(encoding="utf-8")
    job = load_workload(f"{path}:train_step")
    assert [getattr(block, "__name__", block) for block in job.blocks] == ["scans" if kind == "plain_scan" else "Layer"]
    assert job.found is not None and sum(each.calls for each in job.found.taken) == LAYERS * (2 if kind == "gan" else 1)
    assert f"Blocks found: {job.found.taken[0].name} ({job.found.taken[0].calls} calls)" in job.found.text


@EACH
def test_a_step_computes_the_same_under_policies(kind: str) -> None:
    with jax.enable_x64(True):
        step, args = taken(kind)
        args = args if kind == "multi_steps" else in_float64(args)  # its counts of steps choose between dtypes
        job, tolerance = rj.Workload.from_step(step, *args), 2e-6 if kind == "multi_steps" else 1e-12
        plain = results(step, args)
        of_gan = f"{LAYERS} x off | {BY_LAYER}" if kind == "gan" else BY_LAYER
        for policy in ("full", of_gan):
            policed = results(rj.checkpoint_blocks(step, dict.fromkeys(job.blocks, policy)), args)
            assert len(plain) == len(policed) > 1
            for one, other in zip(plain, policed, strict=True):
                np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@EACH
def test_the_residuals_of_a_step_are_those_of_its_loss(kind: str) -> None:
    """Under `full` each layer keeps its input alone. By layer, the third keeps its sine too and the fourth everything."""
    step, args = taken(kind)
    job = rj.Workload.from_step(step, *args)
    by_layer = f"{LAYERS} x off | {BY_LAYER}" if kind == "gan" else BY_LAYER
    rows = {policy: rj.residuals(job, policy).rows for policy in ("full", by_layer)}
    kept = {policy: [row.name for row in rows[policy] if row.action == "save"] for policy in rows}
    assert not any(name.endswith("sin#0") for name in kept["full"])
    assert sum(name.endswith("sin#0") for name in kept[by_layer]) in (1, 2)
    assert job.gradients == (4 if kind == "accumulation" else 1)
    assert job.inner_loss(None).outputs == 1, "aux is no part of the loss"
    assert sum(call.rounds for call in blocks.calls(job)) == LAYERS * (2 if kind == "gan" else 1)


def test_the_other_step_of_a_gan() -> None:
    job = rj.Workload.from_step(gan.generator_step, *gan.generator_args())
    assert job.blocks == (Layer,) and sum(call.rounds for call in blocks.calls(job)) == 2 * LAYERS


def test_what_a_steps_own_jit_donates_is_measured_as_donated() -> None:
    params = parameters(Net())

    def step(params: Any, x: jax.Array, power: int) -> Any:
        grads = jax.grad(lambda params: (Net().apply({"params": params}, x) ** power).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    plain, donating = (jax.jit(step, static_argnums=2, donate_argnums=places) for places in ((), 0))
    of_equinox = eqx.filter_jit(lambda params, x: step(params, x, 2), donate="all")
    jobs = [rj.Workload.from_step(each, params, X, 2) for each in (plain, donating)]
    jobs.append(rj.Workload.from_step(of_equinox, params, X))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert [rj.measure(job, "full", "cpu").alias_bytes for job in jobs] == [0, size, size]
    args = (params, X, 2)
    for one, other in zip(results(plain, args), results(rj.checkpoint_blocks(donating, {Layer: BY_LAYER}), args), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


class Trainer:
    """A step that is a method, with what is static by position, by name, and by keyword alone."""

    @functools.partial(jax.jit, static_argnums=0, static_argnames=("word",), donate_argnames=("params",))
    def step(self, params: Any, x: jax.Array, power: int = 2, *, word: str = "up") -> Any:
        grads = jax.grad(lambda params: (Net().apply({"params": params}, x) ** power).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * len(word) * g, params, grads)


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
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)


def test_compiler_options_of_a_step_are_no_part_of_its_measurement_and_stay_in_the_plan() -> None:
    step = jax.jit(jax.grad(of_squares), compiler_options={"xla_cpu_enable_fast_math": False})
    params = parameters(Net())
    with pytest.warns(rj.RematWarning, match="the compiler options of its jit, {'xla_cpu_enable_fast_math': False}, are not"):
        job = rj.Workload.from_step(step, params, X)
    assert rj.measure(job, "full", "cpu").device_bytes > 0
    planned = rj.plan(job, "1GiB", "cpu").apply(step)
    assert compat.compiler_options(planned) == {"xla_cpu_enable_fast_math": False}
    for one, other in zip(results(step, (params, X)), results(planned, (params, X)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["accumulation", "nnx_optimizer", "equinox_filter_jit"])
def test_a_plan_gives_the_step_back_under_its_own_jit(kind: str) -> None:
    step, args = taken(kind)
    plan = rj.plan(step, args, budget="1GiB", target="cpu")
    planned = plan.apply(step)
    assert type(planned) is type(step) and type(planned).__name__ != "function"
    assert "Blocks found: Layer (4 calls)" in " ".join(plan.notes)
    for one, other in zip(results(step, args), results(planned, args), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
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
    for one, other in zip(
        *(results(step, (state, X)) for step in (train_step, rj.checkpoint_blocks(train_step, dict(made.policies)))),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    planned = jax.eval_shape(made.apply(train_step), state, x)
    assert jax.tree.structure(planned) == jax.tree.structure(jax.eval_shape(train_step, state, x))
    with pytest.raises(PlanningError, match=r"planned for x float32\[4096, 6\], called with float32\[8, 6\]"):
        made.apply(train_step)(state, X)
    with pytest.raises(UnsupportedError, match="allow=\\['head_in_chunks'\\]: workload='train_step' is a finished step"):
        rj.plan(finished, "2MiB", "cpu", allow=["head_in_chunks"])


def twice(params: Any, x: jax.Array) -> Any:
    """A step that takes two gradients through its blocks."""
    losses = [lambda params, power=power: (Net().apply({"params": params}, x) ** power).mean() for power in (2, 4)]
    return [jax.grad(loss)(params) for loss in losses]


def forward(params: Any, x: jax.Array) -> Any:
    """A step that trains nothing."""
    return Net().apply({"params": params}, x)


@pytest.mark.parametrize(
    ("step", "block", "error", "message"),
    [
        (twice, Layer, UnsupportedError, "step='twice' takes 2 gradients through its blocks; expected one: give the workload"),
        (forward, Layer, UnsupportedError, "step='forward' takes no gradient through its blocks; expected one: check that"),
        (twice, nn.Conv, BlockError, "block=Conv: this class was never called"),
    ],
)
def test_a_step_without_one_gradient_is_refused(step: Any, block: Any, error: Any, message: str) -> None:
    job = rj.Workload.from_step(step, parameters(Net()), X, blocks=block)
    for use in (lambda: rj.residuals(job, "full"), lambda: rj.plan(job, "1GiB", "cpu")):
        with pytest.raises(error, match=message):
            use()


def test_an_error_of_a_step_says_with_what_it_was_traced() -> None:
    def reads(params: Any, x: jax.Array) -> Any:
        return jax.grad(of_squares)(params, x * float(x[0, 0]))

    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        rj.plan(reads, (parameters(Net()), X), "1GiB", "cpu")
    assert "remat_jax traced the step 'reads', as jax.jit would, with arrays of these types" in " ".join(error.value.__notes__)
    assert "float32[8, 6]" in error.value.__notes__[-1]


def test_a_step_with_two_gradients_is_measured_and_takes_policies_by_layer() -> None:
    """Each gradient counts its layers anew."""
    job = rj.Workload.from_step(twice, parameters(Net()), X, blocks=Layer)
    assert rj.measure(job, BY_LAYER, "cpu").residual_device_bytes is None
    with pytest.raises(BlockError, match="has policies for 8 layers, but the block is called 4 times"):
        rj.measure(job, "8 x full", "cpu")


def test_jax_differentiates_as_before_afterwards() -> None:
    """Its functions are replaced only while a step is traced."""
    before = {name: getattr(differentiation._ad, name) for name in differentiation._ENTRIES}
    step, args = taken("flax_tutorial")
    rj.checkpoint_blocks(step, {Layer: BY_LAYER})(*args)
    assert {name: getattr(differentiation._ad, name) for name in before} == before


def of_squares(params: Any, x: jax.Array) -> jax.Array:
    return (Net().apply({"params": params}, x) ** 2).mean()


def vmapped(params: Any, x: jax.Array) -> Any:
    """A gradient for each example, as in DP-SGD."""
    return jax.vmap(jax.grad(lambda params, row: of_squares(params, row[None])), (None, 0))(params, x)


def sharded(params: Any, x: jax.Array) -> Any:
    """Each device takes the gradient of its rows."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    mean = jax.shard_map(
        lambda params, x: jax.lax.pmean(jax.grad(of_squares)(params, x), "d"),
        mesh=mesh,
        in_specs=(spec(), spec("d")),
        out_specs=spec(),
        check_vma=False,
    )
    return mean(params, x)


def penalised(params: Any, x: jax.Array) -> Any:
    """A gradient penalty: the blocks are differentiated inside another gradient."""
    return jax.grad(lambda params: (jax.grad(lambda x: of_squares(params, x))(x) ** 2).sum())(params)


def writing(params: Any, x: jax.Array) -> Any:
    """The loss writes to a mutable array."""

    def loss(params: Any) -> jax.Array:
        kept = jax.new_ref(jnp.zeros(()))
        kept[...] = of_squares(params, x)
        return kept[...]

    return jax.grad(loss)(params)


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (vmapped, "inside a vmap"),
        (sharded, "inside a vmap"),
        (penalised, "inside another"),
        (writing, "of a function that uses a mutable array"),
    ],
)
def test_a_gradient_of_parts_takes_policies_but_is_not_listed(step: Any, where: str) -> None:
    params = parameters(Net())
    by_layer = rj.checkpoint_blocks(step, {Layer: BY_LAYER})
    for one, other in zip(results(step, (params, X)), results(by_layer, (params, X)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
    job = rj.Workload.from_step(step, params, X, blocks=Layer)
    assert rj.measure(job, "full", "cpu").residual_device_bytes is None
    with pytest.raises(UnsupportedError, match=f"takes the gradient of its blocks {where}"):
        rj.residuals(job, "full")


def test_unrolled_micro_batches_count() -> None:
    def step(params: Any, x: jax.Array) -> Any:
        return [jax.grad(of_squares)(params, rows) for rows in x.reshape(4, 2, WIDTH)]

    assert rj.Workload.from_step(step, parameters(Net()), X, blocks=Layer).gradients == 4


def test_blocks_outside_of_a_gradient_that_jax_has_traced_before() -> None:
    """Later calls reuse the trace of the inner `jit`, in which the gradient is."""

    @jax.jit
    def step(params: Any, x: jax.Array) -> Any:
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(of_squares)(params, x))
        return new, of_squares(new, x), of_squares(new, 2 * x)

    params = parameters(Net())
    policed = rj.checkpoint_blocks(step, {Layer: BY_LAYER})
    once, *more = (results(policed, (params, X)) for _ in range(3))
    assert all(bool((one == other).all()) for again in more for one, other in zip(once, again, strict=True))
    job = rj.Workload.from_step(step, params, X, blocks=Layer)
    counts = {matmuls(job.step(policy).function, params, X) for policy in ("off", BY_LAYER, BY_LAYER)}
    assert len(counts) == 2


def test_a_step_under_two_policies() -> None:
    step, args = taken("flax_tutorial")
    both = rj.checkpoint_blocks(rj.checkpoint_blocks(step, {nn.Dense: "full"}), {Layer: BY_LAYER})
    for one, other in zip(results(step, args), results(both, args), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)


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
