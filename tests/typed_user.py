"""A user's program, only for the type checker (`make lint`): every public name has a type that is not `Any`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_type

import remat_jax as rj
from remat_jax.diagnosis import Diagnosis
from remat_jax.hardware import Target, target
from remat_jax.memory import ResidualTable
from remat_jax.planning import BatchTable, JittedStep, LargestBatch


def loss(params: dict[str, int], x: float) -> float:
    """A loss; functions made from it must have its type."""
    return params["w"] * x


def applied(model: list[int]) -> None:
    """Functions that apply a policy keep the type of their argument."""
    assert_type(rj.checkpoint_blocks(loss, {"*": "full"})({"w": 1}, 2.0), float)
    assert_type(rj.replan(loss, "dots")({"w": 1}, x=2.0), float)
    assert_type(rj.remat(loss)({"w": 1}, 2.0), float)
    assert_type(rj.enable_gradient_checkpointing(model), list[int])
    assert_type(rj.disable_gradient_checkpointing(model), list[int])
    assert_type(rj.gradient_checkpoint_forward(loss, True, False, {"w": 1}, x=2.0), Any)
    assert_type(rj.checkpoint_sequential([loss], 1, 2.0), Any)
    assert_type(rj.accumulate_gradients(loss, 2)({"w": 1}, 2.0), tuple[Any, Any])
    _: Callable[..., Any] = rj.jax_policy("dots")


def policies() -> None:
    """Policies are data."""
    policy = rj.Policy.parse("save: @dots")
    assert_type(policy, rj.Policy)
    assert_type(rj.Policy.from_json(policy.to_json()), rj.Policy)
    assert_type(rj.LayerPolicies.parse("2 x full"), rj.LayerPolicies)


def asked(job: rj.Workload, path: Path) -> None:
    """Measurements and plans have typed attributes."""
    assert_type(target("h200"), Target)
    assert_type(rj.residuals(job, "dots"), ResidualTable)
    report = rj.measure(job, "dots", target="h200")
    assert_type(report, rj.MemoryReport)
    assert_type(report.device_bytes, int)
    assert_type(rj.doctor(job, "dots"), Diagnosis)
    plan = rj.plan(job, budget="40GiB", target="h200")
    assert_type(plan, rj.Plan)
    assert_type((plan.device_bytes, plan.seconds), tuple[int, float])
    assert_type(plan.apply(loss)({"w": 1}, 2.0), float)
    step = plan.train_step(loss, object(), has_aux=True)
    assert_type(step, JittedStep)
    _, _, _ = step({"w": 1}, step.init({"w": 1}), 2.0)
    assert_type(rj.Plan.load(path), rj.Plan)
    assert_type(rj.largest_batch(lambda size: job, "40GiB", "h200"), LargestBatch)
    table = rj.batches(lambda size: job, "40GiB", "h200", batches=range(1, 9))
    assert_type(table, BatchTable)
    assert_type((table.best.batch, table.best.plan, table.why), tuple[int, rj.Plan | None, str])
    assert_type(rj.save_report(path, job, plan=plan), Path)


def ported(rules: rj.porting.Rules, state: Mapping[str, Any], variables: dict[str, Any], models: Sequence[Any]) -> None:
    """Weight maps and comparisons."""
    assert_type(rj.porting.Rules.parse("a -> params/a"), rj.porting.Rules)
    assert_type(rj.porting.propose(models[0], models[1], ()), rj.porting.Rules)
    compared = rj.parity.compare(models[0], models[1], ())
    assert_type(compared, rj.parity.ParityReport)
    assert_type(compared.passed, bool)


def infeasible(error: rj.InfeasibleBudget) -> None:
    """Errors have typed attributes."""
    _: rj.RematError = error
    assert_type(error.least_bytes, float | None)
