"""The public function `save_report`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remat_jax.errors import ArgumentError, PlanningError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.devices import check_devices
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT, check_timeout
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.overview.gathered import THE_PLAN, Gathered, Progress, add_policies
from remat_jax.overview.page import page
from remat_jax.overview.plan_as_compiled import plan_as_compiled
from remat_jax.parity.report import ParityReport
from remat_jax.planning import Plan
from remat_jax.planning.check_budget import budget_bytes
from remat_jax.planning.make_plan import plan as make_plan
from remat_jax.policy import as_block_policy
from remat_jax.report.document import write_whole
from remat_jax.report.progress import shown
from remat_jax.workload import Workload

REPORT_TIMEOUT = 2 * DEFAULT_TIMEOUT


def save_report(
    path: str | os.PathLike[str],
    workload: Workload,
    policies: Sequence[Any] | None = None,
    target: str | Target = "h200",
    *,
    plan: Plan | int | float | str | None = None,
    parity: ParityReport | None = None,
    timeout: float = REPORT_TIMEOUT,
    progress: Progress | None = None,
) -> Path:
    """Write a self-contained HTML page about a workload, and return its path.

    The page compares policies (compiled memory, estimated time, the effect of offload, known traps) and shows memory by
    module, the plan with a slider over the frontier of memory against time, and the parity report. It loads no other file, and
    is written completely or not at all. No GPU is needed; for the target `attached` each step also runs on this machine's GPU.

    Args:
      path: the file; its folder must exist.
      policies: policies in the forms that `measure` takes; each must have an effect. None compares the default policies; the
        page lists the default policies that are left out, with the reasons.
      target: the name of a target, or a `Target`.
      plan: a `Plan` for this workload and target, or a budget to plan within: bytes, a text (`"40GiB"`, `"80%"`), or a share of
        the target's memory (0.8). None for no plan.
      parity: the result of `remat_jax.parity.compare`. None leaves this section out.
      timeout: seconds for the whole call, of which a plan takes at most half. What does not end in time is left out, with a
        note: default policies, the search for traps. If a policy of `policies` does not compile in time, it is an error.
      progress: called with the current activity, the number of finished parts, and the number of all parts. None shows a bar
        if standard error is a terminal.

    Raises:
      ArgumentError: `path` cannot be written, or another argument is invalid.
      PlanningError: the plan is for another model or target, or the budget is invalid.
      InfeasibleBudget: nothing fits the budget.
      BlockError: the loss does not call the workload's blocks.
      PolicyError, NoEffectError, TargetError, CompileError, UnsupportedError: as `measure` raises them.

    >>> import tempfile, jax, jax.numpy as jnp, flax.linen as nn
    >>> model = nn.Sequential([nn.Dense(8), nn.Dense(8)])
    >>> x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> job = Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), blocks=nn.Dense)
    >>> page = save_report(Path(tempfile.mkdtemp()) / "report.html", job, ["off", "full"], "cpu")
    >>> page.name, "Policies compared" in page.read_text()
    ('report.html', True)
    """
    checked = checked_path(path)
    return write_page(checked, gather(workload, policies, target, plan=plan, parity=parity, timeout=timeout, progress=progress))


def gather(
    workload: Workload,
    policies: Sequence[Any] | None = None,
    target: str | Target = "h200",
    *,
    plan: Plan | int | float | str | None = None,
    parity: ParityReport | None = None,
    timeout: float = REPORT_TIMEOUT,
    progress: Progress | None = None,
) -> Gathered:
    """The content of the page; arguments as for `save_report`."""
    if not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r}: expected a remat_jax.Workload")
    if parity is not None and not isinstance(parity, ParityReport):
        raise ArgumentError(f"parity={parity!r}: expected a ParityReport, which remat_jax.parity.compare gives, or None")
    check_timeout(timeout)
    ends = time.monotonic() + timeout
    described = target if isinstance(target, Target) else target_named(target)
    asked = checked_policies(policies)
    check_devices(workload, described)
    with shown(progress) as tell:
        # Plan first: an infeasible budget then ends the report before minutes of compiling.
        late = None
        try:
            made = _plan(workload, plan, described, timeout / 2, tell)
        except NotDoneError as error:  # the policies have the other half of the time
            made, late = None, f"{error} The plan has half of timeout={timeout:g} s"
        gathered = Gathered(workload, described, made, parity)
        if late is not None:
            gathered.left_out[THE_PLAN] = late
        add_policies(gathered, asked, max(1.0, ends - time.monotonic()), tell)
    gathered.plan = plan_as_compiled(gathered)
    return gathered


def write_page(path: Path, gathered: Gathered, argument: str = "path") -> Path:
    """Write the page of a report's content."""
    text = page(gathered)
    try:
        return write_whole(path, text)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{argument}={str(path)!r} cannot be written ({error}); give another file") from None


def checked_path(path: Any, argument: str = "path", example: str = "report.html") -> Path:
    """`path` as a `Path`; raises ArgumentError, with an example, for a wrong path before minutes of compiling."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"{argument}={path!r}: expected the path of a file, such as {example!r}")
    file, shown = Path(path), f"{argument}={str(path)!r}"
    try:
        folder = Path(os.path.realpath(file)).parent
        if file.is_dir():
            raise ArgumentError(f"{shown} is a folder: give a file, such as {str(file / example)!r}")
        if not folder.is_dir():
            raise ArgumentError(f"{shown}: there is no folder {folder}; create it, or give another file")
        if file.is_file() or not file.exists():
            with tempfile.TemporaryFile(dir=folder):
                pass
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{shown} cannot be written ({error}); give another file") from None
    return file


def checked_policies(policies: Any) -> list[Any] | None:
    """The distinct policies in `policies`; None for the default policies."""
    if policies is None:
        return None
    if isinstance(policies, str) or not isinstance(policies, Sequence):
        raise ArgumentError(f"policies={policies!r}: expected a list of policies, such as ['off', 'full'], or None")
    if not policies:
        raise ArgumentError(
            "policies is empty: name one or more, such as ['off', 'full'], or give None for the default policies"
        )
    distinct: dict[Any, Any] = {}
    for index, policy in enumerate(policies):
        argument = f"policies[{index}]"
        if isinstance(policy, Mapping):
            by_block = tuple((block, as_block_policy(of_block, argument)) for block, of_block in policy.items())
            distinct.setdefault(by_block, dict(policy))
        else:
            distinct.setdefault(as_block_policy(policy, argument), policy)
    return list(distinct.values())


def _plan(workload: Workload, plan: Any, target: Target, timeout: float, tell: Progress) -> Plan | None:
    if plan is None:
        return None
    if isinstance(plan, Plan):
        check_plan(plan, workload, target)
        return plan
    if isinstance(plan, bool) or not isinstance(plan, int | float | str):
        raise ArgumentError(f"plan={plan!r}: expected a Plan, a budget such as '40GiB' or 0.8, or None")
    try:
        budget = budget_bytes(plan, target, "plan")
    except PlanningError as error:
        if not isinstance(plan, str):
            raise
        raise PlanningError(f"{error}. A saved plan is loaded by remat_jax.Plan.load(path, workload)") from None
    return make_plan(workload, budget, target, timeout=timeout, progress=tell)


def check_plan(plan: Plan, workload: Workload, target: Target) -> None:
    """Raise PlanningError unless a plan is for this target and model."""
    if plan.target != target.name:
        raise PlanningError(
            f"the plan is for target={plan.target!r}, but the report is for {target.name!r}: plan again, or give "
            f"target={plan.target!r}"
        )
    plan.model.check_workload(workload, f"the plan for {plan.workload!r}")
