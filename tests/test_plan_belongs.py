"""A plan refuses a call that it was not made for."""

from __future__ import annotations

import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.errors import PlanningError
from tests.plan_by_hand import plan_of
from tests.small_models import assert_same
from tests.workloads import Perceptron


def model(layer: Any) -> Any:
    return nn.Sequential([layer(name=f"layer_{index}") for index in range(3)])


def loss_of(layer: Any = Perceptron) -> Any:
    def loss(params: Any, tokens: Any) -> Any:
        return (model(layer).apply(params, tokens) ** 2).mean()

    return loss


TOKENS = jnp.ones((64, 32))
PARAMS = jax.jit(model(Perceptron).init)(jax.random.key(0), TOKENS)


PLAN = plan_of(rj.Workload(loss_of(), PARAMS, (TOKENS,), Perceptron, name="three layers"), "full")


def test_its_own_call_passes():
    assert jax.eval_shape(PLAN.apply(loss_of()), PARAMS, TOKENS).shape == ()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (jnp.ones((128, 32)), r"planned for tokens float32\[64, 32\], called with float32\[128, 32\]"),
        (jnp.ones((64, 32), jnp.bfloat16), r"planned for tokens float32\[64, 32\], called with bfloat16\[64, 32\]"),
    ],
)
def test_another_batch_is_refused_when_it_is_traced(tokens, said):
    with pytest.raises(PlanningError, match=said + r".*strict=False"):
        jax.eval_shape(jax.grad(PLAN.apply(loss_of())), PARAMS, tokens)
    shape = jax.eval_shape(PLAN.apply(loss_of(), strict=False), PARAMS, tokens)
    assert shape.shape == ()


def test_a_loss_with_checkpoints_of_its_own_is_refused():
    wrapped = loss_of(nn.remat(Perceptron))
    with pytest.raises(PlanningError, match="planned for a loss with 0 checkpoints of its own, but this loss has 3"):
        jax.eval_shape(PLAN.apply(wrapped), PARAMS, TOKENS)
    assert jax.eval_shape(PLAN.apply(wrapped, strict=False), PARAMS, TOKENS).shape == ()


def test_another_mesh_is_refused():
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(PlanningError, match="one device, but is called under data=4"):
        jax.eval_shape(PLAN.apply(loss_of()), PARAMS, TOKENS)


def test_arrays_on_another_mesh_are_refused_where_no_mesh_is_set():
    """The arrays carry their mesh, also inside a jit: one of two devices of which only types are needed."""
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tokens = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype, sharding=place)
    for call in (PLAN.apply(loss_of()), jax.jit(jax.grad(PLAN.apply(loss_of())))):
        with pytest.raises(PlanningError, match="the mesh one device, but is called under data=2"):
            jax.eval_shape(call, PARAMS, tokens)


def test_what_it_was_made_for_is_in_its_file_and_older_files_are_read(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    loaded = rj.Plan.load(tmp_path / "plan.json")
    assert loaded.model == PLAN.model and loaded.model.checkpoints == 0 and loaded.model.mesh == ()
    data = json.loads((tmp_path / "plan.json").read_text())
    del data["model"]["mesh"], data["model"]["checkpoints"]
    data["version"] = 2
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = rj.Plan.load(tmp_path / "old.json")
    assert (old.model.mesh, old.model.checkpoints) == (None, None)
    # Properties that the file does not state are not compared; the batch is.
    assert jax.eval_shape(old.apply(loss_of(nn.remat(Perceptron))), PARAMS, TOKENS).shape == ()
    with pytest.raises(PlanningError, match="planned for tokens"):
        jax.eval_shape(old.apply(loss_of()), PARAMS, jnp.ones((128, 32)))


def test_a_loss_that_closes_over_the_batch_is_shown_how_to_apply_the_plan():
    def closure(params: Any) -> Any:
        return loss_of()(params, TOKENS)

    with pytest.raises(PlanningError, match=r"(?s)called without it.*value_and_grad\(plan.apply\(loss_fn, strict=False\)\)"):
        jax.grad(PLAN.apply(closure))(PARAMS)
    losses = closure, PLAN.apply(closure, strict=False)
    assert_same(*jax.jit(lambda params: [jax.grad(fn)(params) for fn in losses])(PARAMS), 1e-5)
