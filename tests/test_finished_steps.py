"""Finished training steps as people write them: blocks found, policies by layer and residuals without their loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import examples.steps
import remat_jax as rj
from examples.steps import gan
from examples.steps.network import LAYERS, WIDTH, Layer, Net, parameters
from remat_jax import compat
from remat_jax.cli.workloads import load_workload
from remat_jax.compat import differentiation
from remat_jax.cost.count import count, matmuls
from remat_jax.errors import BlockError, UnsupportedError
from remat_jax.planning import blocks
from tests.step_kinds import BY_LAYER, EACH, X, assert_same_results, by_layer, in_float64, of_squares, results, taken


@functools.cache
def job_of(kind: str) -> rj.Workload:
    return load_workload(f"{Path(examples.steps.__path__[0]) / kind}.py:train_step")


@EACH
def test_a_step_without_a_word_of_ours_has_its_blocks_found(kind: str) -> None:
    assert "remat" not in inspect.getsource(inspect.getmodule(inspect.unwrap(taken(kind)[0])))
    job, calls = job_of(kind), LAYERS * (2 if kind == "gan" else 1)
    assert [getattr(block, "__name__", block) for block in job.blocks] == ["scans" if kind == "plain_scan" else "Layer"]
    assert job.found is not None and sum(each.calls for each in job.found.taken) == calls
    assert f"Blocks found: {job.found.taken[0].name} ({job.found.taken[0].calls} calls)" in job.found.text
    assert job.gradients == (4 if kind == "accumulation" else 1)
    assert job.inner_loss(None).outputs == 1, "aux is no part of the loss"
    assert sum(call.rounds for call in blocks.calls(job)) == calls


@EACH
def test_the_residuals_of_a_step_are_those_of_its_loss(kind: str) -> None:
    """By layer, the third keeps its sine too and the fourth everything; under `full` no layer keeps its sine."""
    saved = [row.name for row in rj.residuals(job_of(kind), by_layer(kind)).rows if row.action == "save"]
    assert sum(name.endswith("sin#0") for name in saved) in (1, 2)
    if kind in ("accumulation", "nnx_part", "plain_scan"):
        assert not any(row.name.endswith("sin#0") for row in rj.residuals(job_of(kind), "full").rows if row.action == "save")


@EACH
def test_a_step_computes_the_same_under_policies(kind: str) -> None:
    step, args = taken(kind)
    policies, tolerance = dict.fromkeys(job_of(kind).blocks, by_layer(kind)), 2e-6 if kind == "multi_steps" else 1e-12
    with jax.enable_x64(True):
        args = args if kind == "multi_steps" else in_float64(args)  # its counts of steps choose between dtypes
        assert_same_results(step, rj.checkpoint_blocks(step, policies), args, tolerance)


# One for each way in which a step takes its gradient or holds its blocks.
@pytest.mark.parametrize(
    "kind", ["accumulation", "equinox_filter_jit", "gan", "haiku_keys", "multi_steps", "nnx_part", "plain_scan", "value_head"]
)
def test_a_step_compiles_to_the_bytes_of_the_same_policies_around_its_loss(kind: str) -> None:
    """The peer puts `checkpoint_blocks` around each function that the step gives to JAX to differentiate."""
    step, args = taken(kind)
    policies = dict.fromkeys(job_of(kind).blocks, by_layer(kind))
    given = inspect.unwrap(step)

    @functools.wraps(given, updated=())
    def by_hand(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("grad", "value_and_grad", "vjp"):
                patch.setattr(jax, name, functools.partial(_around, getattr(jax, name), policies))
            return given(*args)

    peer = compat.jitted_like(by_hand, step, {})
    ours, theirs = (traced(each, args) for each in (rj.checkpoint_blocks(step, policies), peer))
    assert products(ours) == products(theirs) > products(traced(step, args))
    assert sizes(ours) == sizes(theirs)


def _around(differentiate: Callable[..., Any], policies: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return differentiate(rj.checkpoint_blocks(fn, policies), *args, **kwargs)


def traced(step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    job = rj.Workload.from_step(step, *args).step("off")
    return jax.jit(job.function).trace(*job.arguments)


def products(step: Any) -> int:
    return count(step.jaxpr, lambda eqn: eqn.primitive.name == "dot_general")


def sizes(step: Any) -> tuple[int, int, int]:
    """The bytes of a step's arguments, of its outputs, and of everything else at the peak."""
    memory = step.lower().compile().memory_analysis()
    return memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes


@pytest.mark.parametrize("kind", ["lora", "nnx_part"])
def test_op_by_op_a_step_is_bit_equal(kind: str) -> None:
    step, args = taken(kind)
    policies, step = dict.fromkeys(job_of(kind).blocks, by_layer(kind)), inspect.unwrap(step)
    with jax.disable_jit():
        assert_same_results(step, rj.checkpoint_blocks(step, policies), args, 0)


def test_steps_that_run_their_blocks_several_times_are_counted() -> None:
    def micro_batches(params: Any, x: jax.Array) -> Any:
        return [jax.grad(of_squares)(params, rows) for rows in x.reshape(4, 2, WIDTH)]

    assert rj.Workload.from_step(micro_batches, parameters(Net()), X, blocks=Layer).gradients == 4
    job = rj.Workload.from_step(gan.generator_step, *gan.generator_args())
    assert job.blocks == (Layer,) and sum(call.rounds for call in blocks.calls(job)) == 2 * LAYERS


def test_what_a_steps_own_jit_donates_is_measured_as_donated() -> None:
    params = parameters(Net())

    def step(params: Any, x: jax.Array, power: int) -> Any:
        grads = jax.grad(lambda params: (Net().apply({"params": params}, x) ** power).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    plain, donating = (jax.jit(step, static_argnums=2, donate_argnums=places) for places in ((), 0))
    of_equinox = eqx.filter_jit(lambda params, x: step(params, x, 2), donate="all")
    jobs = [rj.Workload.from_step(*each) for each in ((plain, params, X, 2), (donating, params, X, 2), (of_equinox, params, X))]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert [rj.measure(job, "full", "cpu").alias_bytes for job in jobs] == [0, size, size]


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
    before = vars(differentiation._ad).copy()
    results(rj.checkpoint_blocks(lambda params: jax.grad(of_squares)(params, X), {Layer: BY_LAYER}), (parameters(Net()),))
    assert vars(differentiation._ad) == before


def vmapped(params: Any, x: jax.Array) -> Any:
    """A gradient for each example, as in DP-SGD."""
    return jax.vmap(jax.grad(lambda params, row: of_squares(params, row[None])), (None, 0))(params, x)


def sharded(params: Any, x: jax.Array) -> Any:
    """Each device takes the gradient of its rows."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("d")
    mean = lambda params, x: jax.lax.pmean(jax.grad(of_squares)(params, x), "d")  # noqa: E731
    return jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(params, x)


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


WHERE = {vmapped: "a vmap", sharded: "a vmap", penalised: "another", writing: "of a function that uses a mutable array"}


@pytest.mark.parametrize("step", WHERE)
def test_a_gradient_of_parts_takes_policies_but_is_not_listed(step: Any) -> None:
    params = parameters(Net())
    assert_same_results(step, rj.checkpoint_blocks(step, {Layer: BY_LAYER}), (params, X))
    job = rj.Workload.from_step(step, params, X, blocks=Layer)
    with pytest.raises(UnsupportedError, match=f"takes the gradient of its blocks (inside )?{WHERE[step]}"):
        rj.residuals(job, "full")


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
    assert_same_results(step, both, args)
