"""The memory of a compiled step without Triton's matmuls.

Without a GPU, XLA takes Triton for every matmul. A GPU takes the faster kernel, often cuBLAS's, and then a step may need more
memory. So for a GPU target the step that is to be the plan is compiled once more, without Triton. If it then exceeds the
budget, the search goes on (`planning/loop.py`).
"""

from __future__ import annotations

import time
from dataclasses import replace

from remat_jax.hardware import Target
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.options import WITHOUT_TRITON
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.planning.candidate import Tried
from remat_jax.planning.compile_candidates import Compiler, first_sentence
from remat_jax.planning.findings import FITS_WITH_CUBLAS, PlanFinding, info, warning
from remat_jax.planning.known import Known
from remat_jax.planning.outcome import time_of
from remat_jax.report.tables import format_bytes

_SHORTEST = 1.0
"""The compile process gets at least this many seconds."""


def more_without_triton(compiler: Compiler, tried: Tried) -> int | None:
    """The device bytes that a compiled step needs in addition without Triton, at least 0.

    None if the target's kernels are not chosen on the device, or, with a finding, if the step cannot be compiled so.
    """
    if not backend_of(compiler.target).chooses_kernels_on_device:
        return None
    if tried.compiled.sizes is not None and tried.compiled.sizes.untiled:
        return 0  # it was compiled without Triton already
    left = compiler.deadline - time.monotonic()
    try:
        if left <= 0:
            raise NotDoneError("the timeout was over")
        compiler.progress("compiling the plan without Triton", compiler.count, compiler.count)
        sizes = compile_programs(
            [replace(tried.compiled.program, key="the plan")],
            compiler.target,
            timeout=max(_SHORTEST, left),
            compiler_options=WITHOUT_TRITON,
            memory_limit=tried.candidate.memory_limit,
            kernels=compiler.kernels,
        )
    except NotDoneError:  # the plan says what is not shown
        return None
    except Exception as error:  # a step that fits is not lost, whatever fails
        compiler.findings.append(warning("kernels", f"Not shown: {FITS_WITH_CUBLAS}: {first_sentence(error)}"))
        return None
    return max(0, sizes["the plan"].device - tried.compiled.device_bytes)


def is_unchecked(best: Tried, compiler: Compiler) -> bool:
    """Whether it is unknown, and no finding says so yet, if the step fits without Triton."""
    is_open = best.compiled.more is None and backend_of(compiler.target).chooses_kernels_on_device
    return is_open and not any(finding.kind == "kernels" for finding in compiler.findings)


def kernel_findings(known: Known, best: Tried, target: Target) -> list[PlanFinding]:
    """What a reader should know of the kernels: a step that was given up for them, or that the plan may exceed the budget."""
    if best.compiled.more is None:
        return []
    budget = round(known.fit.budget)
    excess = best.compiled.most_bytes - budget
    if excess > 0:
        over = f"{format_bytes(excess)} more than the budget ({100 * excess / budget:.1f} %)"
        text = f"On the GPU the step may need {over}, because XLA chooses the kernel of each matmul there; try a smaller budget"
        return [warning("kernels", text)]
    given_up = [step for step in known.fit.tried if step.compiled.more is not None and step.compiled.most_bytes > budget]
    return [
        info(
            "kernels",
            f"Given up: {step.candidate.title}, {time_of(step, known.seconds(step.candidate), target)}. It needs "
            f"{format_bytes(step.compiled.device_bytes)} with Triton's matmuls, but {format_bytes(step.compiled.most_bytes)} "
            "with cuBLAS's, which XLA may choose on the GPU. The plan fits with both",
        )
        for step in given_up[:1]
    ]
