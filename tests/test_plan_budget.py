"""Budgets: the meaning of each form, and errors; and the arguments that fill the device before the step computes anything."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import InfeasibleBudget, PlanningError
from remat_jax.hardware import target
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.hlo.live import LiveBuffer
from remat_jax.planning import make_plan
from remat_jax.planning.check_budget import (
    argument_bytes,
    budget_bytes,
    check_arguments_fit,
    held_by,
    host_budget_bytes,
    remedy,
)
from remat_jax.planning.problem import describe
from tests.planning_models import RATES, ROWS, WIDTH, mlp
from tests.small_models import Mlp, make_loss

H200 = target("h200")
MEMORY = 150_754_820_096


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (40 * 2**30, 40 * 2**30),
        (np.int64(7), 7),
        (1, 1),
        ("1", 1),
        ("40GiB", 40 * 2**30),
        (" 38 GB ", 38 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("40 Gib", 40 * 2**30),
        ("512 kb", 512_000),
        ("3B", 3),
        ("0.1 TB", 10**11),
        (1.0, MEMORY),
        (0.25, MEMORY // 4),
        ("80%", int(MEMORY * 0.8)),
        ("100 %", MEMORY),
        ("0.25", MEMORY // 4),
        (".25", MEMORY // 4),
    ],
)
def test_a_budget_is_so_many_bytes(budget, expected):
    assert budget_bytes(budget, H200) == expected


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0, "budget=0: expected more than 0 bytes"),
        ("0 GiB", "expected more than 0 bytes"),
        (-5, "budget=-5: expected a number of bytes"),
        ("-5 GB", "budget='-5 GB': expected a number of bytes"),
        (0.0, "a share of memory is above 0 and at most 1"),
        (float("nan"), "budget=nan: a share"),
        (float("inf"), "budget=inf: a share"),
        (40e9, "bytes are an integer, such as 40_000_000_000"),
        ("120%", "budget='120%': a share of memory is above 0 and at most 1"),
        ("40G", "'G' is not a unit of bytes; the units are B, kB, .* Did you mean 'GiB' or 'GB'"),
        ("lots", "budget='lots': expected a number of bytes"),
        ("", "budget='': expected"),
        ("4 0 GiB", "expected a number of bytes"),
        ("1e3 GB", "expected a number of bytes"),
        (True, "budget=True: expected"),
        (10**400, "budget=10{400}: expected a number of bytes"),
        (None, "budget=None: expected a number of bytes"),
        ([1], r"budget=\[1\]: expected"),
        ("200GiB", "is 200.0 GiB, but the h200 has 140.4 GiB"),
    ],
)
def test_what_is_no_budget_is_refused_by_name_and_value(budget, message):
    with pytest.raises(PlanningError, match=message):
        budget_bytes(budget, H200)


def test_a_share_needs_a_memory_that_is_known():
    with pytest.raises(PlanningError, match="'cpu' has no memory_bytes; give bytes"):
        budget_bytes("80%", target("cpu"))
    assert budget_bytes("80 MB", target("cpu")) == 80_000_000


def test_a_host_budget_may_be_nothing_or_no_limit_but_no_share():
    assert [host_budget_bytes(budget) for budget in (None, 0, "0 B", "64GiB")] == [None, 0, 0, 64 * 2**30]
    for share in (0.5, "50%"):
        with pytest.raises(PlanningError, match="host_budget=.*a share refers to device memory; give the host's bytes"):
            host_budget_bytes(share)


def test_the_time_of_a_plan_begins_with_the_call(monkeypatch):
    """What is checked before the search may trace the step."""
    given, (model, params, x) = [], make_loss()
    monkeypatch.setattr(make_plan, "_check", lambda *_: time.sleep(0.2))
    monkeypatch.setattr(make_plan, "_Planner", lambda *args: given.append(args[4]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rj.plan(rj.Workload(model, params, (x,), Mlp), "1GiB", "cpu", timeout=10)
    assert given[0] <= 9.8


# The step's arguments, which fill the device before it computes anything.


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
