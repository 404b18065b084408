"""A plan for a GPU fits whichever kernels XLA chooses there: Triton's, which it takes without a GPU, or cuBLAS's."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import remat_jax as rj
from remat_jax.hardware import target
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.options import WITHOUT_TRITON
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.planning import loop, without_triton
from tests.plan_models import MlpLayer, job
from tests.workloads import needs_gpu_compiler

pytestmark = needs_gpu_compiler
MIB = 2**20
MAY_EXCEED = "On the GPU the step may need"


def bytes_without_triton(work: rj.Workload, policies: object) -> int:
    program = export_step("step", work.step(policies), target("h200"))
    return compile_programs([program], target("h200"), timeout=60, compiler_options=WITHOUT_TRITON)["step"].device


@pytest.fixture(scope="module")
def work() -> rj.Workload:
    return job(rows=65536, layers=6)


def test_a_plan_fits_with_cublas_too(work, monkeypatch) -> None:
    """The fastest plan within the budget exceeds it without Triton, so the plan is a slower one that does not.

    XLA decides what Triton's fusions save, so the budget is midway between what one mix of policies needs with and without it.
    """
    mix = {MlpLayer: rj.LayerPolicies.parse("2 × full | 4 × save: *:tanh#0")}
    with_triton, without = rj.measure(work, mix, "h200").device_bytes, bytes_without_triton(work, mix)
    budget = (with_triton + without) // 2
    assert with_triton < budget
    with monkeypatch.context() as patched:
        nothing = SimpleNamespace(device=0)
        patched.setattr(without_triton, "compile_programs", lambda programs, *_, **__: {programs[0].key: nothing})
        greedy = rj.plan(work, budget, "h200")
    exceeding = bytes_without_triton(work, dict(greedy.policies))
    assert greedy.device_bytes <= budget < exceeding
    plan = rj.plan(work, budget, "h200")
    needed = bytes_without_triton(work, dict(plan.policies))
    assert plan.device_bytes <= needed <= budget == plan.budget and plan.seconds > greedy.seconds
    (given_up,) = (note for note in plan.notes if note.startswith("Given up: "))
    assert f"It needs {greedy.device_bytes / MIB:.1f} MiB with Triton's matmuls, but {exceeding / MIB:.1f} MiB with" in given_up
    assert not any(note.startswith(MAY_EXCEED) for note in plan.notes)


def test_an_excess_that_no_plan_avoids_is_said(work, monkeypatch) -> None:
    """`full` needs 120 MiB with Triton and 184 without; nothing needs less."""
    monkeypatch.setattr(loop, "MOST_COMPILED", 2)
    monkeypatch.setattr(loop, "MOST_GIVEN_UP", 1)
    with pytest.warns(rj.RematWarning, match=MAY_EXCEED):
        plan = rj.plan(work, "152 MiB", "h200")
    excess = bytes_without_triton(work, dict(plan.policies)) - 152 * MIB
    assert f"may need {excess / MIB:.1f} MiB more than the budget ({100 * excess / 152 / MIB:.1f} %)" in "".join(plan.notes)


def test_a_plan_that_cannot_be_checked_without_triton_is_returned_with_a_note(work, monkeypatch) -> None:
    monkeypatch.setattr(loop, "MOST_COMPILED", 2)
    late = Mock(side_effect=NotDoneError("not done after timeout=1 s, stopped at policy='the plan'. Give a longer timeout"))
    monkeypatch.setattr(without_triton, "compile_programs", late)
    plan = rj.plan(work, "200 MiB", "h200")
    assert plan.device_bytes <= 200 * MIB and late.call_count == 1
    (finding,) = (each for each in plan.findings if each.kind in ("cut_short", "not_shown", "kernels"))
    assert finding.text.startswith("Not shown: whether the step fits if XLA chooses cuBLAS for the matmuls; that no further")
    assert finding.severity == "warning"
