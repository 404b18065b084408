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
import numpy as np
import pytest

import examples.steps
import remat_jax as rj
from examples.steps import gan
from examples.steps.network import LAYERS, WIDTH, Layer, Net, parameters
from remat_jax import compat
from remat_jax.cli.workloads import load_workload
from remat_jax.compat import differentiation
from remat_jax.cost.count import matmuls
from remat_jax.errors import BlockError, UnsupportedError
from remat_jax.planning import blocks
from tests.step_kinds import BY_LAYER, EACH, X, by_layer, in_float64, of_squares, results, taken


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
        for policy in ("full", by_layer(kind)):
            policed = results(rj.checkpoint_blocks(step, dict.fromkeys(job.blocks, policy)), args)
            assert len(plain) == len(policed) > 1
            for one, other in zip(plain, policed, strict=True):
                np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@EACH
def test_the_residuals_of_a_step_are_those_of_its_loss(kind: str) -> None:
    """Under `full` each layer keeps its input alone. By layer, the third keeps its sine too and the fourth everything."""
    step, args = taken(kind)
    job = rj.Workload.from_step(step, *args)
    mixed = by_layer(kind)
    rows = {policy: rj.residuals(job, policy).rows for policy in ("full", mixed)}
    kept = {policy: [row.name for row in rows[policy] if row.action == "save"] for policy in rows}
    assert not any(name.endswith("sin#0") for name in kept["full"])
    assert sum(name.endswith("sin#0") for name in kept[mixed]) in (1, 2)
    assert job.gradients == (4 if kind == "accumulation" else 1)
    assert job.inner_loss(None).outputs == 1, "aux is no part of the loss"
    assert sum(call.rounds for call in blocks.calls(job)) == LAYERS * (2 if kind == "gan" else 1)


@EACH
def test_a_step_compiles_to_the_bytes_of_the_same_policies_around_its_loss(kind: str) -> None:
    """The peer puts `checkpoint_blocks` around each function that the step gives to JAX to differentiate."""
    step, args = taken(kind)
    policies = dict.fromkeys(rj.Workload.from_step(step, *args).blocks, by_layer(kind))
    given = inspect.unwrap(step)

    @functools.wraps(given, updated=())
    def by_hand(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("grad", "value_and_grad", "vjp"):
                patch.setattr(jax, name, functools.partial(_around, getattr(jax, name), policies))
            return given(*args)

    peer = compat.jitted_like(by_hand, step, {})
    ours, theirs, plain = (compiled(each, args) for each in (rj.checkpoint_blocks(step, policies), peer, step))
    assert ours == theirs and ours[-1] > plain[-1]


def _around(differentiate: Callable[..., Any], policies: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return differentiate(rj.checkpoint_blocks(fn, policies), *args, **kwargs)


def compiled(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, int, int, int]:
    """The bytes of a compiled step's arguments, of its outputs, and of everything else at the peak; its matmuls."""
    job = rj.Workload.from_step(step, *args).step("off")
    memory = jax.jit(job.function).lower(*job.arguments).compile().memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    return *sizes, matmuls(job.function, *job.arguments)


@pytest.mark.parametrize("kind", ["gan", "lora", "nnx_part", "several_losses"])
def test_op_by_op_a_step_is_bit_equal(kind: str) -> None:
    step, args = taken(kind)
    blocks, step = rj.Workload.from_step(step, *args).blocks, inspect.unwrap(step)
    for policy in ("full", by_layer(kind)):
        with jax.disable_jit():
            plain, policed = results(step, args), results(rj.checkpoint_blocks(step, dict.fromkeys(blocks, policy)), args)
        for one, other in zip(plain, policed, strict=True):
            np.testing.assert_array_equal(one, other)


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
    before = {name: getattr(differentiation._ad, name) for name in ("linearize", "jvp")}
    step, args = taken("flax_tutorial")
    rj.checkpoint_blocks(step, {Layer: BY_LAYER})(*args)
    assert {name: getattr(differentiation._ad, name) for name in before} == before


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
    mixed = rj.checkpoint_blocks(step, {Layer: BY_LAYER})
    for one, other in zip(results(step, (params, X)), results(mixed, (params, X)), strict=True):
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
