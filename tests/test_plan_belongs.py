"""A plan refuses a call that it was not made for."""

from __future__ import annotations

import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from remat_jax.errors import PlanningError
from remat_jax.memory.measure import measure_many
from remat_jax.planning import loop


class Layer(nn.Module):
    """A perceptron."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.Dense(32)(nn.gelu(nn.Dense(128)(x)))


def model(layer: Any) -> Any:
    return nn.Sequential([layer(name=f"layer_{index}") for index in range(3)])


def loss_of(layer: Any = Layer) -> Any:
    def loss(params: Any, tokens: Any) -> Any:
        return (model(layer).apply(params, tokens) ** 2).mean()

    return loss


TOKENS = jnp.ones((64, 32))
PARAMS = jax.jit(model(Layer).init)(jax.random.key(0), TOKENS)


@pytest.fixture(scope="module")
def plan() -> Any:
    job = rj.Workload(loss_of(), PARAMS, (TOKENS,), Layer, name="three layers")
    full, most = (report.device_bytes for report in measure_many(job, ("full", "off"), "cpu"))
    with pytest.MonkeyPatch.context() as patched:  # which plan it is does not matter here
        patched.setattr(loop, "MOST_COMPILED", 2)
        plan = rj.plan(job, (full + most) // 2, "cpu")
    assert not plan.is_off
    return plan


def test_its_own_call_passes_and_has_the_gradients_of_the_loss(plan):
    losses = loss_of(), plan.apply(loss_of())
    expected, gradients = jax.jit(lambda *args: [jax.grad(fn)(*args) for fn in losses])(PARAMS, TOKENS)
    jax.tree.map(lambda wanted, actual: np.testing.assert_allclose(wanted, actual, rtol=1e-5, atol=1e-7), expected, gradients)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (jnp.ones((128, 32)), r"planned for tokens float32\[64, 32\], called with float32\[128, 32\]"),
        (jnp.ones((64, 32), jnp.bfloat16), r"planned for tokens float32\[64, 32\], called with bfloat16\[64, 32\]"),
    ],
)
def test_another_batch_is_refused_when_it_is_traced(plan, tokens, said):
    with pytest.raises(PlanningError, match=said + r".*strict=False"):
        jax.eval_shape(jax.grad(plan.apply(loss_of())), PARAMS, tokens)
    shape = jax.eval_shape(plan.apply(loss_of(), strict=False), PARAMS, tokens)
    assert shape.shape == ()


def test_a_loss_with_checkpoints_of_its_own_is_refused(plan):
    wrapped = loss_of(nn.remat(Layer))
    with pytest.raises(PlanningError, match="planned for a loss with 0 checkpoints of its own, but this loss has 3"):
        jax.eval_shape(plan.apply(wrapped), PARAMS, TOKENS)
    assert jax.eval_shape(plan.apply(wrapped, strict=False), PARAMS, TOKENS).shape == ()


def test_another_mesh_is_refused(plan):
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(PlanningError, match="one device, but is called under data=4"):
        jax.eval_shape(plan.apply(loss_of()), PARAMS, TOKENS)


def test_arrays_on_another_mesh_are_refused_where_no_mesh_is_set(plan):
    """The arrays carry their mesh, also inside a jit: one of two devices of which only types are needed."""
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tokens = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype, sharding=place)
    for call in (plan.apply(loss_of()), jax.jit(jax.grad(plan.apply(loss_of())))):
        with pytest.raises(PlanningError, match="the mesh one device, but is called under data=2"):
            jax.eval_shape(call, PARAMS, tokens)


def test_what_it_was_made_for_is_in_its_file_and_older_files_are_read(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = rj.Plan.load(tmp_path / "plan.json")
    assert loaded.model == plan.model and loaded.model.checkpoints == 0 and loaded.model.mesh == ()
    data = json.loads((tmp_path / "plan.json").read_text())
    del data["model"]["mesh"], data["model"]["checkpoints"]
    data["version"] = 2
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = rj.Plan.load(tmp_path / "old.json")
    assert (old.model.mesh, old.model.checkpoints) == (None, None)
    # Properties that the file does not state are not compared; the batch is.
    assert jax.eval_shape(old.apply(loss_of(nn.remat(Layer))), PARAMS, TOKENS).shape == ()
    with pytest.raises(PlanningError, match="planned for tokens"):
        jax.eval_shape(old.apply(loss_of()), PARAMS, jnp.ones((128, 32)))


def test_a_loss_that_closes_over_the_batch_is_shown_how_to_apply_the_plan(plan):
    def closure(params: Any) -> Any:
        return loss_of()(params, TOKENS)

    with pytest.raises(PlanningError, match=r"(?s)called without it.*value_and_grad\(plan.apply\(loss_fn, strict=False\)\)"):
        jax.grad(plan.apply(closure))(PARAMS)
    losses = closure, plan.apply(closure, strict=False)
    expected, actual = jax.jit(lambda params: [jax.grad(fn)(params) for fn in losses])(PARAMS)
    jax.tree.map(lambda wanted, found: np.testing.assert_allclose(wanted, found, rtol=1e-5, atol=1e-6), expected, actual)
