"""`plan.train_step`: the step that one would write by hand, in one call."""

from __future__ import annotations

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import ArgumentError, PlanningError
from remat_jax.warning import RematWarning
from tests import plan_models, test_nnx
from tests.plan_by_hand import plan_of
from tests.small_models import Mlp as LinenBlock
from tests.small_models import assert_bit_equal, assert_same, make_loss, values
from tests.workloads import needs_gpu_compiler

ADAM = optax.adam(1e-2, eps=1e-3)


def linen():
    loss, params, x = make_loss()
    return loss, params, x, plan_of(rj.Workload(loss, params, (x,), LinenBlock))


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def run(step, params, state, *batch, steps=3):
    results = []
    for _ in range(steps):
        params, state, value = step(params, state, *batch)
        results.append(value)
    return params, state, results


def compilations(step):
    """How often the step was compiled for its calls."""
    return sum(getattr(jitted, "jitted_fn", jitted)._cache_size() for jitted in step._jitted.values())


def by_hand(loss, optimizer=ADAM):
    @jax.jit
    def step(params, state, *batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


@pytest.mark.versions
def test_three_steps_are_those_written_by_hand(x64):
    loss, params, x, plan = linen()
    step = plan.train_step(loss, ADAM)
    given = copied(params), step.init(params)
    results = run(step, *given, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)), "parameters and state are donated"
    assert_bit_equal(results, run(by_hand(plan.apply(loss)), params, ADAM.init(params), x))
    assert_same(results, run(by_hand(loss), params, ADAM.init(params), x))
    kept = plan.train_step(loss, ADAM, donate=False)
    assert_bit_equal(run(kept, params, ADAM.init(params), x), results)
    # The same in a loop of the compiler, and compiled ahead.
    looped, losses = jax.lax.scan(lambda at, _: ((out := kept(*at, x))[:2], out[2]), (params, ADAM.init(params)), length=3)
    assert_same((*looped, list(losses)), results)
    ahead = step.lower(*jax.eval_shape(lambda: (params, step.init(params))), x).compile()
    assert_bit_equal(run(ahead, copied(params), step.init(params), x), results)


def test_an_array_that_occurs_twice_is_donated_once():
    loss, params, x, plan = linen()
    anchored = optax.GradientTransformation(
        lambda params: params, lambda g, at, p: (jax.tree.map(lambda g, at, p: -0.1 * (g + p - at), g, at, p), at)
    )
    tied = run(plan.train_step(loss, anchored), start := copied(params), anchored.init(start), x)
    assert_same(tied, run(by_hand(loss, anchored), params, anchored.init(params), x), 1e-5)


def test_aux_and_the_trained_parameters(x64):
    loss, params, x, _ = linen()
    job = rj.Workload(loss, params, (x,), LinenBlock, trainable="*layer_1*")
    step = plan_of(job).train_step(lambda p, x: (loss(p, x), x.sum()), ADAM, trainable="*layer_1*", has_aux=True)
    state = step.init(params)
    assert len(jax.tree.leaves(state)) == 1 + 2 * 2
    after, _, value = run(step, copied(params), state, x)
    frozen, trained = ({"params": {name: tree["params"][name]}} for tree, name in ((after, "layer_0"), (after, "layer_1")))
    assert_bit_equal(frozen["params"]["layer_0"], params["params"]["layer_0"])
    both = lambda trained, x: loss({"params": {**params["params"], **trained["params"]}}, x)  # noqa: E731
    part = {"params": {"layer_1": params["params"]["layer_1"]}}
    expected, _, losses = run(by_hand(both), part, ADAM.init(part), x)
    assert_same(trained, expected)
    assert_same(value, [(value, x.sum()) for value in losses])


def test_the_compiled_step_has_the_bytes_of_the_workloads_step():
    job = plan_models.job(128, optimizer=ADAM, layers=2)
    step = plan_of(job, "full").train_step(job.own_loss, ADAM)
    sizes = step.lower(job.params, step.init(job.params), *job.batch).compile().memory_analysis()
    size = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
    assert size == rj.measure(job, "full", "cpu").device_bytes > 100_000


@needs_gpu_compiler
def test_on_a_gpu_an_offloaded_state_is_in_host_memory_before_and_after():
    optimizer = rj.offload_optimizer(ADAM)
    job = plan_models.job(128, optimizer=optimizer, layers=1)
    step = plan_of(job, "full").train_step(job.own_loss, optimizer)
    arguments = job.params, jax.eval_shape(ADAM.init, job.params), *job.batch
    placed = step.lower(*arguments).in_avals[0]
    whole = rj.Workload.from_step(step, *placed, blocks=plan_models.MlpLayer, donate_argnums=(0, 1))
    measured, parameters = rj.measure(whole, "off", "h200"), compat.tree_bytes(job.params)
    assert measured.host_bytes == 2 * parameters
    assert measured.argument_bytes == parameters + compat.tree_bytes(job.batch) + 4


def test_an_offloaded_state_is_put_into_host_memory():
    loss, params, x, plan = linen()
    optimizer = rj.offload_optimizer(ADAM)
    step = plan.train_step(loss, optimizer)
    loaded = ADAM.init(params)  # as from a file: in device memory
    after, state, losses = run(step, copied(params), loaded, x)
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert kinds == ["pinned_host"] * 8 and compilations(step) == 1
    assert_bit_equal((after, losses), run(by_hand(plan.apply(loss)), params, ADAM.init(params), x)[::2])
    inputs = step.lower(*jax.eval_shape(lambda: (params, ADAM.init(params))), x).compile().input_shardings[0][1]
    assert [place.memory_kind for place in jax.tree.leaves(inputs)].count("pinned_host") == 8


# --- NNX ----------------------------------------------------------------------------------------------------------------


def nnx_case(tx=ADAM, **options):
    model = test_nnx.Model(rate=0.3)
    x = test_nnx.inputs()
    plan = plan_of(rj.Workload.from_nnx(model, test_nnx.loss, (x,), test_nnx.Layer), **options)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), x, plan


def nnx_by_hand(loss):
    @nnx.jit
    def step(model, optimizer, *batch):
        value, gradients = nnx.value_and_grad(loss)(model, *batch)
        optimizer.update(model, gradients)
        return value

    return step


@pytest.mark.versions
def test_nnx_steps_write_all_that_nnx_jit_writes(x64):
    model, optimizer, x, plan = nnx_case(compiler_options={"xla_cpu_enable_fast_math": False})
    plain, plain_optimizer, _, _ = nnx_case()
    step, expected = plan.train_step(test_nnx.loss, nnx.Optimizer), nnx_by_hand(test_nnx.loss)
    first = jax.tree.leaves(nnx.state((model, optimizer)))
    losses = [step(model, optimizer, x) for _ in range(3)]
    test_nnx.assert_same(losses, [expected(plain, plain_optimizer, x) for _ in range(3)])
    test_nnx.assert_same(nnx.state((model, optimizer)), nnx.state((plain, plain_optimizer)))
    assert [int(layer.dropout.rngs.count[...]) for layer in model.layers] == [3, 3]
    assert float(jnp.abs(model.layers[1].norm.mean[...]).sum()) != 0.0 and int(optimizer.step[...]) == 3
    assert all(leaf.is_deleted() for leaf in first) and compilations(step) == 1
    assert step.lower(model, optimizer, x).compile()(model, optimizer, x) == expected(plain, plain_optimizer, x)


def test_nnx_with_an_offloaded_state_metrics_and_aux():
    model, optimizer, x, plan = nnx_case(rj.offload_optimizer(ADAM))
    plain, plain_optimizer, _, _ = nnx_case()
    mean = nnx.metrics.Average("loss")

    def loss(model, x, mean):
        value = test_nnx.loss(model, x)
        mean.update(loss=value)
        return value, x.sum()

    step, expected = plan.train_step(loss, optimizer, has_aux=True), nnx_by_hand(test_nnx.loss)
    for _ in range(3):
        value, aux = step(model, optimizer, x, mean)
        test_nnx.assert_same(value, expected(plain, plain_optimizer, x), 1e-5)
    assert int(mean.count[...]) == 3 and float(aux) == pytest.approx(float(x.sum()))
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.ndim]
    assert kinds == ["pinned_host"] * 16


# --- Equinox ------------------------------------------------------------------------------------------------------------


class EqxLayer(eqx.Module):
    linear: eqx.nn.Linear
    activation: object
    offset: jax.Array

    def __call__(self, x):
        return x + self.activation(self.linear(x)) * self.offset


def test_an_equinox_model(x64):
    keys = jax.random.split(jax.random.key(0), 2)
    layers = [eqx.nn.Lambda(EqxLayer(eqx.nn.Linear(4, 4, key=key), jax.nn.gelu, jnp.arange(4))) for key in keys]
    model, x = eqx.nn.Sequential(layers), values(3, 4)
    loss = lambda model, x: jnp.sum(jnp.sin(jax.vmap(model)(x)))  # noqa: E731
    plan = plan_of(rj.Workload(loss, model, (x,), EqxLayer))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    step = plan.train_step(loss, ADAM)
    expected = run(by_hand(lambda arrays, x: loss(eqx.combine(arrays, rest), x)), arrays, ADAM.init(arrays), x)
    copied_model = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, model)
    after, state, losses = run(step, copied_model, step.init(model), x)
    assert after.layers[0].fn.activation is jax.nn.gelu and compilations(step) == 1
    assert_same((eqx.filter(after, eqx.is_inexact_array), state, losses), expected)


# --- a mesh -------------------------------------------------------------------------------------------------------------


def test_on_a_mesh_shardings_are_kept_and_the_step_is_compiled_once(on_eight_devices):
    told = json.loads(on_eight_devices("tests.train_steps_on_mesh", "told.json", JAX_ENABLE_X64="1").read_text())
    for kind in ("arrays", "nnx"):
        assert told[kind]["after"] == told[kind]["before"] and "fsdp" in str(told[kind]["before"])
        assert told[kind]["compilations"] == 1 and told[kind]["error"] < 1e-12


# --- errors -------------------------------------------------------------------------------------------------------------


def test_bad_arguments():
    loss, params, x, plan = linen()
    model, optimizer, x_nnx, nnx_plan = nnx_case()
    with pytest.raises(ArgumentError, match="fn=3: expected a function"):
        plan.train_step(3, ADAM)
    for bad in (None, 3, "adam", optax.adam, type(ADAM)):
        with pytest.raises(ArgumentError, match="optimizer=.*: expected an optax optimizer, with init and update"):
            plan.train_step(loss, bad)
    with pytest.raises(ArgumentError, match="trainable='.': an NNX step trains what its optimizer selects"):
        nnx_plan.train_step(test_nnx.loss, optimizer, trainable="*")
    step, nnx_step = plan.train_step(loss, ADAM), nnx_plan.train_step(test_nnx.loss, optimizer)
    for wrong in ((), (params,), (model, optimizer, x), (model, ADAM.init(params), x)):
        with pytest.raises(ArgumentError, match=r"step called with \(.*\): expected step\(params, state, \*batch\). For an"):
            step(*wrong)
    for wrong in ((model,), (params, optimizer, x), (model, x)):
        with pytest.raises(ArgumentError, match=r"expected step\(model, optimizer, \*batch\), an NNX module and its"):
            nnx_step(*wrong)
    with pytest.raises(ArgumentError, match=r"step.init: the state of an NNX step is in nnx.Optimizer\("):
        nnx_step.init(model)
    with pytest.raises(PlanningError, match=r"planned for x float32\[2, 3, 4\], called with float32\[1, 3, 4\]"):
        step(params, step.init(params), x[:1])
    loose = plan.train_step(loss, ADAM, strict=False)
    assert loose(copied(params), loose.init(params), x[:1])[2].shape == ()
    with pytest.raises(ArgumentError, match="params: 'count' is int32 and has no gradient"):
        loose({**params, "count": jnp.int32(3)}, loose.init(params), x)


@pytest.mark.parametrize("kind", ["arrays", "nnx"])
def test_the_compiler_gets_the_plans_options(kind):
    options = {"no_such_option": 1}
    if kind == "nnx":
        model, optimizer, x, plan = nnx_case(compiler_options=options)
        step, arguments = plan.train_step(test_nnx.loss, optimizer), (model, optimizer, x)
    else:
        loss, params, x = make_loss()
        step = plan_of(rj.Workload(loss, params, (x,), LinenBlock), compiler_options=options).train_step(loss, ADAM)
        arguments = params, step.init(params), x
    for call in (step, lambda *args: step.lower(*args).compile()):
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'no_such_option'"):
            call(*arguments)
    jit = nnx.jit if kind == "nnx" else jax.jit
    with pytest.warns(RematWarning, match=r"give jax.jit\(…, compiler_options={'no_such_option': 1}\) there"):
        jit(lambda *args: step(*args))(*arguments)
