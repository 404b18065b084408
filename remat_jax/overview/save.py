"""The call that a user makes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remat_jax.errors import ArgumentError, PlanningError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.devices import check_devices
from remat_jax.memory.measure import DEFAULT_TIMEOUT, check_timeout
from remat_jax.overview.compared import Progress, compare
from remat_jax.overview.data import Gathered
from remat_jax.parity.report import ParityReport
from remat_jax.planning import Plan
from remat_jax.planning.budget import budget_bytes
from remat_jax.planning.make import plan as make_plan
from remat_jax.policy import as_block_policy
from remat_jax.report.document import write_whole
from remat_jax.workload import Workload


def save_report(
    path: str | os.PathLike[str],
    workload: Workload,
    policies: Sequence[Any] | None = None,
    target: str | Target = "h200",
    *,
    plan: Plan | int | float | str | None = None,
    parity: ParityReport | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Progress | None = None,
) -> Path:
    """Write one self-contained HTML page with all that is known of a workload; gives the path back.

    It has the policies side by side (memory as compiled, estimated time, what offload really did, known traps), memory by
    module, and, where they are given, the plan with a slider over the frontier of memory against time, and the parity report.
    It loads nothing, and is written as a whole or not at all. No GPU is needed; for the target
    `attached` each step is run on this machine's too.

    Args:
      path: the file; its folder must exist.
      policies: one or more of what `measure` takes, each of which must have an effect. None for the usual named ones; those
        that are impossible here are left out, and the page says why.
      target: the name of a target, or a `Target`.
      plan: a `Plan` for this workload and target, or a budget to plan within: bytes, a text (`"40GiB"`, `"80%"`), or a share of
        the target's memory (0.8). None for no plan.
      parity: what `remat_jax.parity.compare` gave. None for no such section.
      timeout: seconds that compiling the policies may take in all; that the plan may take; and that each compilation of the
        doctor's may.
      progress: told what is being done, how many parts are behind, and of how many.

    Raises:
      ArgumentError: `path` cannot be written, or another argument is no such thing.
      PlanningError: the plan is for another model or target, or the budget is none.
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
    where = checked_path(path)
    return write_page(where, gather(workload, policies, target, plan=plan, parity=parity, timeout=timeout, progress=progress))


def gather(
    workload: Workload,
    policies: Sequence[Any] | None = None,
    target: str | Target = "h200",
    *,
    plan: Plan | int | float | str | None = None,
    parity: ParityReport | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Progress | None = None,
) -> Gathered:
    """All that the page shows; as `save_report`."""
    if not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r}: expected a remat_jax.Workload")
    if parity is not None and not isinstance(parity, ParityReport):
        raise ArgumentError(f"parity={parity!r}: expected a ParityReport, which remat_jax.parity.compare gives, or None")
    check_timeout(timeout)
    described = target if isinstance(target, Target) else target_named(target)
    asked = checked_policies(policies)
    check_devices(workload, described)
    tell = progress or _silent
    # First, because a budget that nothing fits ends it.
    found = _plan(workload, plan, described, timeout, tell)
    return Gathered(workload, described, compare(workload, asked, described, found, timeout, tell), found, parity)


def write_page(path: Path, gathered: Gathered, argument: str = "path") -> Path:
    """Write the page of what was gathered."""
    from remat_jax.overview.page import page

    text = page(gathered)
    try:
        return write_whole(path, text)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{argument}={str(path)!r} cannot be written ({error}); give another file") from None


def checked_path(path: Any, argument: str = "path") -> Path:
    """`path` as one that can be written, said before minutes of compiling.

    Raises:
      ArgumentError: it is none, a folder, or in a folder that is not there or cannot be written to.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"{argument}={path!r}: expected the path of a file, such as 'report.html'")
    where = Path(path)
    try:
        folder = Path(os.path.realpath(where)).parent
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{argument}={str(path)!r} cannot be written ({error}); give another file") from None
    if where.is_dir():
        raise ArgumentError(f"{argument}={str(path)!r} is a folder: give a file, such as {str(where / 'report.html')!r}")
    if not folder.is_dir():
        raise ArgumentError(f"{argument}={str(path)!r}: there is no folder {folder}; make it, or give another file")
    if (where.is_file() or not where.exists()) and not os.access(folder, os.W_OK):
        raise ArgumentError(f"{argument}={str(path)!r}: the folder {folder} cannot be written to; give another file")
    return where


def checked_policies(policies: Any) -> list[Any] | None:
    """The policies that `policies` has, each once; None for the usual ones.

    Raises:
      ArgumentError: it is no sequence, or empty.
      PolicyError: what one of them is not.
    """
    if policies is None:
        return None
    if isinstance(policies, str) or not isinstance(policies, Sequence):
        raise ArgumentError(f"policies={policies!r}: expected a list of policies, such as ['off', 'full'], or None")
    if not policies:
        raise ArgumentError("policies is empty: name one or more, such as ['off', 'full'], or give None for the usual ones")
    found: dict[Any, Any] = {}
    for index, one in enumerate(policies):
        argument = f"policies[{index}]"
        if isinstance(one, Mapping):
            found.setdefault(tuple((block, as_block_policy(each, argument)) for block, each in one.items()), dict(one))
        else:
            found.setdefault(as_block_policy(one, argument), one)
    return list(found.values())


def _plan(workload: Workload, plan: Any, target: Target, timeout: float, tell: Progress) -> Plan | None:
    if plan is None:
        return None
    if not isinstance(plan, Plan):
        if isinstance(plan, bool) or not isinstance(plan, int | float | str):
            raise ArgumentError(f"plan={plan!r}: expected a Plan, a budget such as '40GiB' or 0.8, or None")
        return make_plan(workload, _budget(plan, target), target, timeout=timeout, progress=tell)
    check_plan(plan, workload, target)
    return plan


def _budget(plan: int | float | str, target: Target) -> int:
    try:
        return budget_bytes(plan, target, "plan")
    except PlanningError as error:
        if not isinstance(plan, str):
            raise
        raise PlanningError(f"{error}. A saved plan is loaded by remat_jax.Plan.load(path, workload)") from None


def check_plan(plan: Plan, workload: Workload, target: Target) -> None:
    """Refuse a plan for another target or model.

    Raises:
      PlanningError: saying what differs.
    """
    if plan.target != target.name:
        raise PlanningError(
            f"plan is for target={plan.target!r}, and the report for {target.name!r}: plan again, or give "
            f"target={plan.target!r}"
        )
    plan.model.check_workload(workload, f"the plan for {plan.workload!r}")


def _silent(what: str, done: int, of: int) -> None:
    """Tell nobody."""
