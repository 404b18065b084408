"""One row of the benchmark: a plan for a budget, the memory with one more saved residual, and the best other policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import remat_jax as rj
from benchmarks.plan.rivals import Rival, best_within
from benchmarks.plan.workloads import Case
from remat_jax.errors import InfeasibleBudget
from remat_jax.hardware import target as target_named
from remat_jax.planning import Plan
from remat_jax.planning.known import WORTH_COMPILING
from remat_jax.planning.make_plan import leanest
from remat_jax.planning.model import block_name
from remat_jax.planning.problem import Described, Kind, extra_seconds, kept_bytes
from remat_jax.planning.translate import selectors
from remat_jax.policy import LayerPolicies, Policy

TIMEOUT = 1200.0


@dataclass(frozen=True)
class Further:
    """A plan with one residual more saved in one run of equal layers.

    Attributes:
      where, residual: the layers, and the residual's name. If several arrays share one choice, it is the name of the first.
      saved_bytes: by how much the bytes kept on the device between the passes grow. Arrays from which only the saved residual
        was recomputed are no longer kept.
      policies: the plan's policies with this change.
    """

    where: str
    residual: str
    saved_bytes: int
    policies: dict[Any, Any]


def budgets(case: Case, target: str, shares: Sequence[float]) -> list[int]:
    """Budgets in bytes, at `shares` of the way from the least memory that the planner reaches to that of `off`."""
    full = rj.measure(case.workload, "full", target, timeout=TIMEOUT).device_bytes
    # If `full` exceeds the budget by one byte, the planner also compiles its own step of least memory.
    least, _ = leanest(case.workload, full - 1, target_named(target), None, timeout=TIMEOUT)
    most = rj.measure(case.workload, "off", target, timeout=TIMEOUT).device_bytes
    assert least is not None, "the step's arguments alone exceed the budget"
    return [least + round(share * (most - least)) for share in shares]


def row(case: Case, described: Described, budget: int, target: str, others: list[Rival]) -> dict[str, Any]:
    """A plan for a budget and the best other policy, as plain data."""
    begin = time.perf_counter()
    best = best_within(others, budget)
    fields: dict[str, Any] = {
        "workload": case.workload.name,
        "budget": budget,
        "best": best.name if best else None,
        "best_bytes": best.device_bytes if best else None,
        "best_extra_seconds": best.extra_seconds if best else None,
        "best_seconds": best.seconds if best else None,
    }
    try:
        plan = rj.plan(case.workload, budget, target, timeout=TIMEOUT)
    except InfeasibleBudget as error:
        return fields | {"infeasible": error.least_bytes, "wall_seconds": time.perf_counter() - begin}
    planned = time.perf_counter() - begin
    return (
        fields
        | {
            "device_bytes": plan.device_bytes,
            "predicted_bytes": plan.predicted_bytes,
            "host_bytes": plan.host_bytes,
            "seconds": plan.seconds if plan.timed else None,
            "base_seconds": described.base_seconds,
            "extra_seconds": extra_seconds(described, dict(plan.policies)),
            "policies": plan.texts,
            "tried": plan.tried,
            "notes": plan.notes,
            "further": one_more(case, described, plan, target),
        }
        | {"wall_seconds": planned}
    )


def one_more(case: Case, described: Described, plan: Plan, target: str) -> dict[str, Any] | None:
    """The plan's memory with the smallest recomputed residual saved as well; None if there is none."""
    options = further(described, plan)
    if not options:
        return None
    least = min(options, key=lambda option: option.saved_bytes)
    report = rj.measure(case.workload, least.policies, target, timeout=TIMEOUT)
    fields: dict[str, Any] = {"where": least.where, "residual": least.residual, "saved_bytes": least.saved_bytes}
    fields |= {"seconds": report.seconds}
    return fields | {"device_bytes": report.device_bytes, "extra_seconds": extra_seconds(described, least.policies)}


def further(described: Described, plan: Plan) -> list[Further]:
    """Every way to save one more residual in one run of equal layers, if its estimated gain is worth a compilation."""
    if plan.is_off:
        return []
    worth = WORTH_COMPILING * described.base_seconds
    extra, kept, options = extra_seconds(described, plan.policies), kept_bytes(described, plan.policies)[0], []
    for part in plan.parts:
        layers = range(part.first, part.first + part.layers * part.every, part.every)
        kind, block = next(
            pair
            for pair in zip(described.kinds, described.stack.blocks, strict=True)
            if block_name(pair[0].block) == part.block and part.first in pair[0].layers
        )
        saved, away = kind.program.names(policy_at(plan.policies[kind.block], part.first))
        for residual, members in zip(block.residuals, kind.members, strict=True):
            if not residual.may_save or saved.intersection(members) or away.intersection(members):
                continue
            policies = dict(plan.policies) | {kind.block: saving(described, kind, plan, layers, members)}
            more = kept_bytes(described, policies)[0] - kept
            if more > 0 and extra_seconds(described, policies) < extra - worth:
                options.append(Further(part.where, residual.name, more, policies))
    return options


def saving(described: Described, kind: Kind, plan: Plan, layers: range, members: Sequence[str]) -> LayerPolicies:
    """The plan's policies for the blocks of `kind`, with the arrays `members` saved in `layers`, each by its own name. Scans
    stay cut where the plan cuts them, even between layers that now have the same policy.
    """
    count = sum(len(other.layers) for other in described.kinds if other.block == kind.block)
    policies = [policy_at(plan.policies[kind.block], layer) for layer in range(count)]
    for layer in layers:
        path = kind.paths[kind.layers.index(layer)]
        names = [path + name.removeprefix(kind.paths[0]) for name in members]
        rules = selectors({"save": names}, [path], names).rules
        policies[layer] = Policy((*(rule for rule in rules if rule.action.value == "save"), *policies[layer].rules))
    whole = plan.policies[kind.block]
    cuts = [run.start for run, _ in whole.ranges[1:]] if isinstance(whole, LayerPolicies) else []
    return LayerPolicies.of(policies, cuts)


def policy_at(policy: Any, layer: int) -> Policy:
    """The policy of one layer, parsed if it is a text."""
    if isinstance(policy, LayerPolicies):
        return policy[layer]
    return policy if isinstance(policy, Policy) else Policy.parse(policy)
