"""`Workload`: one training step, described without allocating anything."""

from __future__ import annotations

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import remat_jax as rj
from examples.steps import nnx_optimizer
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, BlockError
from remat_jax.warning import RematWarning
from tests.small_models import Stack


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.Dense(4, name="down")(jnp.tanh(nn.Dense(8, name="up")(x)))


MODEL = Stack(Block)
X = jax.ShapeDtypeStruct((3, 4), jnp.float32)
PARAMS = jax.eval_shape(MODEL.init, jax.random.key(0), X)["params"]
"""Two blocks of 4·8 + 8 + 8·4 + 4 = 76 parameters."""


def loss(params: Any, x: Any) -> Any:
    return (MODEL.apply({"params": params}, x) ** 2).mean()


def outputs(job: rj.Workload, policy: Any = "full") -> Any:
    step = job.step(policy)
    return jax.eval_shape(step.function, *step.arguments)


def size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_arrays_and_structs_mix_and_nothing_is_kept_or_allocated():
    alive = {id(array) for array in jax.live_arrays()}
    job = rj.Workload(lambda p, x, k, y, s: loss(p, x) * s, PARAMS, (X, 3, np.ones((2,), np.float64), True), Block)
    assert {id(array) for array in jax.live_arrays()} - alive == set()
    assert job.batch[1].dtype == jnp.int32 and job.batch[2].dtype == jnp.float32  # NumPy's float64 is float32 in JAX
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((job.params, job.batch)))
    long = rj.Workload(loss, PARAMS, (jax.ShapeDtypeStruct((10**9, 4), jnp.float32),), Block)
    assert rj.residuals(long, "offload_inputs").host_bytes == 2 * 4 * 4 * 10**9


def test_a_step_is_the_gradient_and_with_an_optimizer_its_donated_update():
    gradient = rj.Workload(loss, PARAMS, (X,), Block).step("full")
    value, grads = jax.eval_shape(gradient.function, *gradient.arguments)
    assert value.shape == () and size(grads) == 152 and gradient.donate_argnums == ()

    update = rj.Workload(loss, PARAMS, (X,), Block, optimizer=optax.adam(0.1)).step("full")
    params, state, value = jax.eval_shape(update.function, *update.arguments)
    assert (size(params), size(state), value.shape) == (152, 2 * 152 + 1, ())
    assert update.donate_argnums == (0, 1)
    assert rj.Workload(loss, PARAMS, (X,), Block, optimizer=optax.adam(0.1), donate=False).step("full").donate_argnums == ()


def test_the_update_is_the_optimizers(x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)))
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1, jnp.float64), PARAMS)
    tx = optax.adamw(0.1)
    step = rj.Workload(loss, params, (x,), Block, optimizer=tx).step("dots")
    new, state, value = jax.jit(step.function)(params, tx.init(params), {}, x)
    updates, expected_state = tx.update(jax.grad(loss)(params, x), tx.init(params), params)
    expected = (optax.apply_updates(params, updates), expected_state, loss(params, x))
    for got, want in zip(jax.tree.leaves((new, state, value)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("trainable", "count"),
    [("*/down/*", 2 * 36), (("layer_0/*", "*/up/bias"), 76 + 8), (lambda path, leaf: leaf.ndim == 1, 2 * 12), (None, 152)],
)
def test_what_is_frozen_has_no_gradient_and_no_optimizer_state(trainable, count):
    job = rj.Workload(loss, PARAMS, (X,), Block, optimizer=optax.adam(0.1), trainable=trainable)
    params, state, _ = outputs(job)
    assert (size(params), size(state)) == (count, 2 * count + 1)
    assert sum(size(argument) for argument in job.step("full").arguments) == 152 + 2 * count + 1 + 12


def test_frozen_parameters_cost_no_matmuls():
    steps = [
        rj.Workload(loss, PARAMS, (X,), Block, trainable=each).step("off") for each in (None, "layer_1/down/*", "layer_1/*")
    ]
    # 4 forward, 4 for the kernels, 3 for the inputs of all but the first.
    assert [matmuls(step.function, *step.arguments) for step in steps] == [11, 5, 7]


def test_aux_is_an_output_of_the_step():
    def with_aux(params, x):
        return loss(params, x), {"x": 2 * x}

    (value, aux), grads = outputs(rj.Workload(with_aux, PARAMS, (X,), Block, has_aux=True))
    assert value.shape == () and aux["x"].shape == (3, 4) and size(grads) == 152
    *_, (_, aux) = outputs(rj.Workload(with_aux, PARAMS, (X,), Block, has_aux=True, optimizer=optax.sgd(0.1)))
    assert aux["x"].shape == (3, 4)


def test_a_finished_step_is_taken_as_it_is():
    @jax.jit
    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    job = rj.Workload.from_step(step, PARAMS, X, blocks=Block, donate_argnums=0)
    assert job.name == "step" and job.step("off").donate_argnums == (0,)
    counts = [matmuls(job.step(policy).function, *job.step(policy).arguments) for policy in ("off", "full", "off")]
    assert counts == [11, 13, 11]  # under full the first matmul of each block is recomputed
    for wrong in (2, (0, -1), "0"):
        with pytest.raises(ArgumentError, match="expected positions among the 2 arguments of step"):
            rj.Workload.from_step(step, PARAMS, X, blocks=Block, donate_argnums=wrong)


def nnx_loss(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def nnx_step(model: Any, optimizer: Any, metrics: Any, x: Any) -> Any:
    value, gradients = nnx.value_and_grad(nnx_loss)(model, x)
    optimizer.update(model, gradients)
    metrics.update(loss=value)
    return value


def nnx_objects() -> tuple[Any, Any, Any]:
    model = nnx_optimizer.Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


ROWS = jax.ShapeDtypeStruct((8, 6), jnp.float32)


@pytest.mark.parametrize("jit", [lambda step: step, nnx.jit])
def test_what_a_finished_step_writes_to_nnx_objects_is_its_result(jit):
    objects = nnx_objects()
    graphdef, state = nnx.split(objects)

    def functional(state: Any, x: Any) -> Any:
        inner = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))
        return nnx_step(*inner, x), nnx.state(inner)

    job = rj.Workload.from_step(jit(nnx_step), *objects, ROWS, blocks=nnx_optimizer.Layer, donate_argnums=(0, 1))
    plain = matmuls(functional, state, ROWS)
    counts = [matmuls(job.step(policy).function, *job.step(policy).arguments) for policy in ("off", "full")]
    assert counts == [plain, plain + 4]  # under full the two matmuls of each block are recomputed
    keys = sum(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state))
    # The loss, and all state but the unchanged keys of random streams, which nnx.jit returns too.
    assert len(jax.tree.leaves(outputs(job))) == 1 + len(jax.tree.leaves(state)) - (0 if jit is nnx.jit else keys)
    assert size(job.step("full").arguments) == size(state) + ROWS.size
    assert int(objects[0].layers[0].dropout.rngs.count[...]) == 0


def test_writes_that_jax_jit_drops_are_told():
    with pytest.warns(RematWarning, match="drops what the step writes to its NNX arguments"):
        job = rj.Workload.from_step(jax.jit(nnx_step), *nnx_objects(), ROWS, blocks=nnx_optimizer.Layer)
    assert len(jax.tree.leaves(outputs(job))) == 1


@pytest.mark.parametrize("abstract", [False, True])
def test_an_nnx_model_with_rng_state_and_statistics(abstract):
    make = lambda: nnx_optimizer.Net(nnx.Rngs(0))  # noqa: E731
    model = nnx.eval_shape(make) if abstract else make()
    before = None if abstract else int(model.layers[0].dropout.rngs.count[...])
    job = rj.Workload.from_nnx(model, nnx_loss, (ROWS,), optimizer=optax.adam(0.1), trainable="*/up/*")
    assert job.blocks == (nnx_optimizer.Layer,)
    params, state, _ = outputs(job)
    assert (size(params), size(state)) == (4 * 168, 2 * 4 * 168 + 1)
    names = {row.name for row in rj.residuals(job, "dots_with_no_batch_dims") if row.action == "save"}
    assert {f"layers/{index}/up:dot_general#0" for index in range(4)} <= names
    assert abstract or int(model.layers[0].dropout.rngs.count[...]) == before, "the model itself is not touched"


def test_wrong_arguments_are_named():
    ok: dict[str, Any] = {"loss": loss, "params": PARAMS, "batch": (X,), "blocks": Block}
    for changed, message in [
        ({"loss": 3}, r"loss=3: expected a function loss\(params, \*batch\)"),
        ({"loss": lambda p, x: x}, r"loss: it returns float32\[3, 4\], expected a floating-point scalar; with aux"),
        ({"loss": lambda p, x: (loss(p, x), x)}, r"with aux, pass has_aux=True"),
        ({"has_aux": True}, r"loss: it returns float32\[\], expected \(scalar, aux\)"),
        ({"batch": X}, r"batch=ShapeDtypeStruct: expected a tuple of arguments; write \(batch,\)"),
        ({"batch": ("text",)}, r"batch holds 'text' of type str: expected arrays or jax.ShapeDtypeStruct"),
        ({"params": {"w": object}}, r"params holds <class 'object'>"),
        ({"params": {**PARAMS, "step": jnp.int32(1)}}, r"params: 'step' is int32 and has no gradient"),
        ({"blocks": dict}, r"blocks=<class 'dict'>: this class has no __call__"),
        ({"blocks": ()}, r"blocks=\(\): expected at least one"),
        ({"blocks": (Block, "")}, r"blocks='': expected a class whose instances are called"),
        ({"optimizer": "adam"}, r"optimizer='adam': expected an optax optimizer"),
        ({"trainable": "*lora*"}, r"trainable='\*lora\*' selects no parameter; the first paths are: layer_0/down/bias"),
        ({"trainable": 3}, r"trainable=3: expected a glob on parameter paths, several of them, or a function"),
        ({"trainable": (1,)}, r"trainable=\(1,\): expected a glob"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            rj.Workload(**{**ok, **changed})
    with pytest.raises(ArgumentError, match="shardings without mesh: give the mesh too"):
        rj.Workload(**ok, shardings=object())
    with pytest.raises(ArgumentError, match="step=3: expected a function"):
        rj.Workload.from_step(3, blocks=Block)
    with pytest.raises(ArgumentError, match="(?s)model=.*expected an NNX module"):
        rj.Workload.from_nnx(MODEL, nnx_loss, (X,), Block)
    with pytest.raises(BlockError, match="blocks=None: no module, marked function, checkpoint or scan in 'nnx_loss' with much"):
        rj.residuals(rj.Workload.from_nnx(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx_loss, (X,)), "full")
    with pytest.raises(BlockError, match="block=BatchNorm: this class was never called"):
        rj.residuals(rj.Workload(loss, PARAMS, (X,), nn.BatchNorm), "full")


@pytest.mark.parametrize("mesh", [None, {"data": 1}])
def test_a_loss_keeps_its_signature_and_takes_keywords(mesh):
    def loss(params, x, *, scale=1.0):
        """Scaled."""
        return scale * (params * x).sum()

    ones = jnp.ones(3)
    kept = rj.Workload(loss, ones, (ones,), nn.Dense, mesh=mesh).loss
    assert inspect.signature(kept) == inspect.signature(loss) and (kept.__name__, kept.__doc__) == ("loss", "Scaled.")
    assert jax.jit(lambda x: kept(x, x=x, scale=2.0))(ones) == 6.0
