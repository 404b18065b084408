"""The plans of one model: `python -m benchmarks.gpu.plan_make REQUEST FILE`, beside the run and without its GPU.

Every policy that is to be run is a line of JSON appended to FILE as soon as it is there: each named policy, then the plan at
each budget, priced by the nominal rates of the target and by the calibrated ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import remat_jax as rj
from benchmarks.gpu.plan_jobs import Shape, workload
from remat_jax.errors import RematError
from remat_jax.hardware import target as target_named
from remat_jax.memory.measure import measure_many
from remat_jax.planning.problem import Described, describe, extra_seconds
from remat_jax.policy import NAMED


def make(
    model: str,
    shape: Shape,
    targets: dict[str, str],
    shares: Sequence[float],
    tell: Callable[[dict[str, Any]], None],
    names: Sequence[str] = tuple(NAMED),
) -> None:
    """Tell of every named policy, then of the plan at each budget, which lies so much of the way from `full` to `off`.

    Args:
      targets: what is planned for by `calibrated`, and what else prices are told for.
    """
    whole = workload(model, shape)
    priced = {key: describe(whole, name) for key, name in targets.items()}
    planned_for = targets["calibrated"]
    (block,) = (getattr(one, "__name__", one) for one in whole.blocks)
    reports, refused = measured(whole, names, planned_for)
    for name in names:
        if name in refused:
            tell({"policy": name, "kind": "named", "refused": refused[name]})
            continue
        # Without checkpointing nothing is computed again, as where everything is kept.
        estimated = _seconds(priced, "everything" if name == "off" else name)
        policies = {} if name == "off" else {block: name}
        told = {"policies": policies, "device_bytes": reports[name].device_bytes, "host_bytes": reports[name].host_bytes}
        tell({"policy": name, "kind": "named", **told, "estimated_seconds": estimated})
    least, most = reports["full"].device_bytes, reports["off"].device_bytes
    for share in shares:
        budget = least + round(share * (most - least))
        try:
            plan = rj.plan(whole, budget, target_named(planned_for))
        except RematError as error:
            tell({"policy": f"plan at {share:g}", "kind": "plan", "budget": budget, "refused": str(error)[:300]})
            continue
        policies = {} if plan.is_off else plan.texts
        estimated = _seconds(priced, plan.texts[block] if policies else "everything")
        told = {"policies": policies, "device_bytes": plan.device_bytes, "host_bytes": plan.host_bytes, "budget": budget}
        tell({"policy": f"plan at {share:g}", "kind": "plan", **told, "estimated_seconds": estimated})


def measured(whole: rj.Workload, names: Sequence[str], target: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What each of the named policies takes, and why those are refused that are."""
    try:
        return dict(zip(names, measure_many(whole, names, target), strict=True)), {}
    except RematError:
        pass  # one of them at least: each by itself tells which
    reports, refused = {}, {}
    for name in names:
        try:
            reports[name] = rj.measure(whole, name, target)
        except RematError as error:
            refused[name] = str(error)[:300]
    return reports, refused


def _seconds(priced: dict[str, Described], policy: str) -> dict[str, float]:
    return {key: one.base_seconds + extra_seconds(one, policy) for key, one in priced.items()}


def main() -> None:
    """Make what the request asks for."""
    request, path = json.loads(sys.argv[1]), Path(sys.argv[2])

    def tell(line: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"model": request["model"], **line}) + "\n")

    make(request["model"], Shape(**request["shape"]), request["targets"], request["shares"], tell)


if __name__ == "__main__":
    main()
