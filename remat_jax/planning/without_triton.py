"""The memory of a plan's step without Triton's matmuls, and a plan that fits without them too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from remat_jax.errors import CompileError, InfeasibleBudget
from remat_jax.hardware import Target
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.options import OPTION, WITHOUT_TRITON, Kernels
from remat_jax.planning.candidate import Tried
from remat_jax.planning.check_budget import check_arguments_fit
from remat_jax.planning.compile_candidates import Progress, first_sentence
from remat_jax.planning.findings import PlanFinding, info, warning
from remat_jax.planning.plan import Plan
from remat_jax.report.tables import format_bytes
from remat_jax.workload import Workload

NOT_SHOWN_WITHOUT_TRITON = "Not shown: whether the step fits if XLA chooses cuBLAS for the matmuls"

_SHORTEST = 1.0
"""The compile process gets at least this many seconds."""


def fitting_without_triton(
    plan_for: Callable[[int, float, list[Tried]], tuple[Plan, ExportedProgram, list[Tried]]],
    workload: Workload,
    budget: int,
    target: Target,
    timeout: float,
    progress: Progress,
    kernels: Kernels,
) -> Plan:
    """The plan for `budget` bytes, or one for less if the first exceeds `budget` without Triton's matmuls.

    Without a GPU, XLA takes Triton for every matmul. A GPU takes the faster kernel, often cuBLAS's, and then a step may need
    more memory. So for a GPU target the plan's step is compiled once more, without Triton. If it exceeds the budget, a second
    plan, with a finding, is made for a budget that is smaller by the difference between both compilations. If there is no
    second plan in time that fits without Triton, or if the step cannot be compiled without Triton, the first plan is returned
    with a finding.

    Args:
      plan_for: makes a plan for a budget in bytes within a number of seconds, given compiled steps; returns it, its step, and
        all compiled steps.
      timeout: the seconds for everything.

    Raises:
      InfeasibleBudget: `plan_for` finds no plan for `budget`.
    """
    ends = time.monotonic() + timeout

    def left() -> float:
        return ends - time.monotonic()

    def bytes_without_triton(made: Plan, program: ExportedProgram, limit: int) -> int:
        if left() <= 0:
            raise CompileError("the timeout was over; give a longer one")
        progress("compiling the plan without Triton", len(made.tried), len(made.tried))
        sizes = compile_programs(
            [replace(program, key="the plan")],
            target,
            timeout=max(_SHORTEST, left()),
            compiler_options=WITHOUT_TRITON,
            memory_limit=limit if OPTION in made.compiler_options else None,
            kernels=kernels,
        )
        return sizes["the plan"].device

    def with_finding(made: Plan, finding: PlanFinding, *others: PlanFinding) -> Plan:
        return replace(made, findings=(*made.findings, *others, finding))

    first, step, tried = plan_for(budget, timeout, [])
    if not backend_of(target).chooses_kernels_on_device:
        return first
    try:
        needed = bytes_without_triton(first, step, budget)
    except CompileError as error:
        text = f"{NOT_SHOWN_WITHOUT_TRITON}: {first_sentence(error)}"
        return with_finding(first, warning("kernels", text))
    if needed <= budget:
        return first
    smaller = budget - (needed - first.device_bytes)
    if left() > 0:
        with contextlib.suppress(InfeasibleBudget, CompileError):  # CompileError: nothing fits before the timeout
            check_arguments_fit(workload, smaller)
            second, step, _ = plan_for(smaller, left(), tried)
            if bytes_without_triton(second, step, smaller) <= budget:
                text = (
                    f"Planned for {format_bytes(smaller)} instead of {format_bytes(budget)}: on the GPU XLA may use cuBLAS for "
                    f"matmuls, with which a plan for the whole budget needs {format_bytes(needed)}"
                )
                failed = [finding for finding in first.findings if finding.kind == "left_out"]  # not compiled again
                return with_finding(second, info("kernels", text), *failed)
    over = f"{format_bytes(needed - budget)} more than the budget ({100 * needed / budget - 100:.1f} %)"
    text = f"On the GPU the step may need {over}, because XLA chooses the kernel of each matmul there; try a smaller budget"
    return with_finding(first, warning("kernels", text))
