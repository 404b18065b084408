"""A step's arguments that fill the device before it computes anything, and the advice if they are too large."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import InfeasibleBudget
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.hlo.live import LiveBuffer
from remat_jax.planning.check_budget import argument_bytes, check_arguments_fit, held_by, remedy
from remat_jax.planning.problem import describe
from tests.planning_models import RATES, ROWS, WIDTH, mlp

ADAM = optax.adam(1e-3)
PARAMETERS = compat.tree_bytes(mlp().params)
BATCH = 4 * ROWS * WIDTH
COUNT = 4  # Adam's number of the step
BIASES = compat.tree_bytes([leaf for leaf in jax.tree.leaves(mlp().params) if leaf.ndim == 1])


def offloaded(kind: str) -> Any:
    """Adam's state on the host, bare or inside another optimizer."""
    on_host = rj.offload_optimizer(ADAM)
    labels = lambda tree: jax.tree.map(lambda leaf: "there" if leaf.ndim > 1 else "here", tree)  # noqa: E731
    return {
        "bare": on_host,
        "chain": optax.chain(optax.clip_by_global_norm(1.0), on_host),
        "groups": optax.multi_transform({"there": on_host, "here": ADAM}, labels),
    }[kind]


@functools.cache
def fixed_bytes_here() -> float:
    return describe(mlp(optimizer=ADAM), "h200", rates=RATES).stack.fixed_bytes


@pytest.mark.parametrize(("kind", "counts", "moments"), [("bare", 1, 0), ("chain", 1, 0), ("groups", 2, 2 * BIASES)])
def test_a_state_on_the_host_is_left_out_array_by_array(kind: str, counts: int, moments: int) -> None:
    left = counts * COUNT + moments
    job = mlp(optimizer=offloaded(kind))
    assert argument_bytes(mlp(optimizer=ADAM)) == 3 * PARAMETERS + COUNT + BATCH
    assert argument_bytes(job) == PARAMETERS + BATCH + left
    check_arguments_fit(job, PARAMETERS + BATCH + left)
    with pytest.raises(InfeasibleBudget):
        check_arguments_fit(job, PARAMETERS + BATCH + left - 1)
    fixed = {target: describe(job, target, rates=RATES).stack.fixed_bytes for target in ("h200", "cpu")}
    assert fixed_bytes_here() - fixed["h200"] == 2 * PARAMETERS + COUNT - left
    # A processor has one memory.
    assert fixed["cpu"] == fixed_bytes_here() + (counts - 1) * COUNT


@pytest.mark.parametrize("kind", ["bare", "chain"])
def test_a_state_on_the_host_holds_nothing_up_but_where_there_is_one_memory(kind: str) -> None:
    job = mlp(optimizer=offloaded(kind))
    sizes = {"temp": 7, "argument": 0, "output": 0, "alias": 0, "host_temp": 0, "host_output": 0, "host_alias": 0}
    there = held_by(job, Sizes(**sizes, host_argument=2 * PARAMETERS))
    assert there["optimizer state"] == COUNT and there["parameters"] == PARAMETERS
    assert held_by(job, Sizes(**sizes, host_argument=0))["optimizer state"] == 2 * PARAMETERS + COUNT


def test_a_state_that_is_too_large_may_go_to_the_host_on_a_mesh_too() -> None:
    job = mlp(optimizer=ADAM, mesh={"data": 2}, shardings=(None, P("data")))
    with pytest.raises(InfeasibleBudget) as caught:
        check_arguments_fit(job, 1000)
    assert next(iter(caught.value.held_by)) == "optimizer state"
    advice = (
        "Raise the budget, keep the state in host memory (rj.offload_optimizer(optimizer)), or shard the parameters over more "
    )
    assert str(caught.value).endswith(f"{advice}devices: the state is partitioned like the parameters.")
    alone = "Raise the budget, or keep the state in host memory: rj.offload_optimizer(optimizer)."
    assert remedy({"optimizer state": 1}) == alone


def test_the_arguments_of_a_finished_step_hold_memory_under_their_names() -> None:
    w, x = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    loss = lambda w, x: jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0].sum()  # noqa: E731
    job = rj.Workload.from_step(jax.jit(lambda state, x: state["w"] - jax.grad(loss)(state["w"], x)), {"w": w}, x)
    names = job.step("off").array_names
    assert names == ("argument state/w", "argument x")
    live = [LiveBuffer(name, name.partition("/")[0], "argument", 16, "f32[4]") for name in names]
    sizes = Sizes(0, 48, 0, 0, 0, 0, 0, 0, live=(*live, LiveBuffer("mul", "", "forward", 128, "f32[8,4]")))
    assert held_by(job, sizes) == {"kept between the passes: of no module": 128, "argument state": 16, "argument x": 16}
    with pytest.raises(InfeasibleBudget, match="896 B: argument state 768 B, argument x 128 B"):
        check_arguments_fit(job, 800)
