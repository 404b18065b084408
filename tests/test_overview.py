"""The report's sentences and notes claim only what is known, and nothing is left out silently."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import pytest

import remat_jax as rj
from remat_jax import compat, errors
from remat_jax.diagnosis.findings import Finding
from remat_jax.hardware import target, targets
from remat_jax.hardware.rates import Rates
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.memory.compile.sizes import UNFINISHED
from remat_jax.memory.report import Receipt
from remat_jax.overview import facts, page
from remat_jax.overview import gathered as gathering
from remat_jax.overview.plan_as_compiled import plan_as_compiled
from remat_jax.overview.save import gather
from tests.plan_models import MlpLayer
from tests.report_pages import JOB, PLAN, plan_for


@pytest.fixture(scope="module")
def found():
    return gather(JOB, ["full"], "cpu")


@pytest.fixture(scope="module")
def planned():
    return gather(JOB, ["full"], "cpu", plan=PLAN)


def with_first(report, **changes):
    """`report` with other values for its first policy."""
    first, *rest = report.policies
    return replace(report, policies=[replace(first, **changes), *rest])


def test_a_policy_that_fits_and_has_no_time_is_not_said_to_be_over(found):
    untimed = with_first(found, seconds=None)
    for size, said in ((2**40, False), (1, True)):
        sentences = page.summary(replace(untimed, plan=plan_for(JOB, budget=size)))
        assert any("No policy that is safe to run is within the budget (1 B)" in sentence for sentence in sentences) is said
        assert any("No policy that" in sentence for sentence in sentences) is said


def test_a_policy_that_was_not_compiled_in_time_takes_no_other_its_time(found):
    (full,) = found.policies
    timed, late = (replace(full.memory, seconds=seconds, no_time=why) for seconds, why in ((0.5, ""), (None, UNFINISHED)))
    shown = replace(found, policies=[replace(full, memory=timed), replace(full, name="dots", memory=late)])
    gathering._as_compiled(shown)
    assert [(policy.seconds, policy.timed) for policy in shown.policies] == [(0.5, True), (None, False)]
    assert f"No time is estimated for dots: {UNFINISHED}" in page.notes(shown)


def test_all_places_of_a_trap_are_shown(found):
    (full,) = found.policies
    traps = [Finding("nested_checkpoint", block, f"h/{index}", "p", "r") for index, block in enumerate("aab")]
    (trouble,) = page.findings([replace(full, diagnosis=replace(full.diagnosis, findings=tuple(traps)))])
    assert trouble.where == "a at h/0; a at h/1; b at h/2" and trouble.under == "full"


def test_a_plan_whose_figures_are_not_those_of_this_step_is_told(planned):
    memory = planned.policies[-1].memory
    note = next(note for note in page.notes(planned) if note.startswith("Compiled for this page, the plan's step needs"))
    assert f"{rj.report.format_bytes(memory.device_bytes)} on the device and 0 B on the host" in note
    assert "when the plan was made, it needed 4.0 MiB and 24.0 MiB" in note and "plan again" in note
    same = replace(planned, plan=replace(PLAN, device_bytes=memory.device_bytes, host_bytes=memory.host_bytes))
    assert not any("Compiled for this page" in note for note in page.notes(same))


def test_the_host_budget_is_with_what_fits(planned):
    assert page.notes(planned)[0].endswith("Fits: within the budget, 6.0 MiB.")
    narrow = replace(planned, plan=plan_for(JOB, host_budget=2**20))
    assert page.notes(narrow)[0].endswith("Fits: within the budget, 6.0 MiB, and 1.0 MiB of host memory.")


def test_what_was_run_is_not_said_not_to_have_been(found):
    assert "nothing was run" in page.footer(found)
    (full,) = found.policies
    memory = replace(full.memory, measured_peak_bytes=77, receipt=Receipt(3, 2, 1))
    there = with_first(replace(found, target=replace(found.target, attached=True)), memory=memory)
    assert "nothing was run" not in page.footer(there) and "Each step was run once" in page.footer(there)
    (row,) = json.loads(json.dumps(there.to_dict()))["policies"]
    assert row["measured_peak_bytes"] == 77
    sizes = {"offered_bytes": 3, "host_bytes": 2, "returned_bytes": 1}
    assert row["receipt"] == {**sizes, "warnings": [], "shared": [], "miscompiled": False}
    assert found.to_dict()["policies"][0]["receipt"] is None


def test_on_a_mesh_what_is_offered_is_of_all_devices(found):
    several = replace(found, target=replace(found.target, name="8xcpu", devices=8, memory_bytes=2**20))
    assert several.limit == ("the memory of one device of 8xcpu", 2**20)
    (note,) = (
        note for note in page.notes(several) if note.startswith("Device and host memory is for one of 8 devices; residuals")
    )
    assert note.endswith("and the sizes of arguments below are totals of all devices.")


def test_one_step_has_one_figure_on_the_page():
    """Times of compiled schedules: `off`, which the plan predicts to be slower and larger, bounds the frontier."""
    names, seconds = ("off", "full", "the plan"), (0.0100, 0.0140, PLAN.seconds)
    sizes = (7 * 2**20, 3 * 2**20, PLAN.device_bytes)
    shown = gather(JOB, ["off", "full"], "cpu", plan=replace(PLAN, timed=True))
    for index, policy in enumerate(shown.policies):
        memory = replace(policy.memory, seconds=seconds[index], device_bytes=sizes[index], assumed_rates=("flops",))
        shown.policies[index] = replace(policy, memory=memory)
    gathering._as_compiled(shown)
    plan = shown.plan = plan_as_compiled(shown)
    points = {point.name: point for point in plan.named}
    for policy, name in zip(shown.policies[:2], names, strict=False):
        point = points[name]
        assert (point.seconds, point.timed, point.device_bytes) == (policy.seconds, True, policy.memory.device_bytes)
    assert [(point.device_bytes, point.seconds) for point in plan.frontier][-1] == (7 * 2**20, 0.0100)
    assert plan.base_seconds == 0.0100 and shown.policies[-1].extra_seconds == plan.seconds - plan.base_seconds
    rows = [page.policy_cells(shown, policy) for policy in shown.policies]
    cells = [{column.title: cell for column, cell in row.items()} for row in rows]
    assert [row["step"] for row in cells] == [(each, True) for each in seconds]
    assert "time" not in cells[0] and "Step: the estimated time, from the compiled schedule; over" in page.notes(shown)[0]
    text = page.page(shown)
    assert text.count("8.5 ms to 14 ms") >= 3 and "10 ms<" not in text
    assert "2.1 ms to 3.4 ms over keeping everything (25 %)" in text


def test_a_bound_that_a_compiled_policy_beats_is_left_out():
    """A plan whose search was cut short: `full`, compiled for the page, fits and is faster than the plan's bound."""
    bounded = replace(PLAN, timed=True, budget=2**40, lower_bound=0.95 * PLAN.seconds)
    for share, bound in ((0.9, None), (0.97, bounded.lower_bound)):
        shown = gather(JOB, ["off", "full"], "cpu", plan=bounded)
        for index, seconds in enumerate((PLAN.seconds, share * PLAN.seconds, PLAN.seconds)):
            memory = replace(shown.policies[index].memory, seconds=seconds, assumed_rates=("flops",))
            shown.policies[index] = replace(shown.policies[index], memory=memory)
        gathering._as_compiled(shown)
        shown.plan = plan_as_compiled(shown)
        assert shown.plan.lower_bound == bound
        assert ("no plan within the budget" in page.page(shown)) is (bound is not None)


def test_no_trap_is_claimed_only_for_policies_whose_search_was_finished(found):
    (full,) = found.policies
    unfinished = replace(full, name="dots", diagnosis=None)
    for policies, said in (
        ([full], "No known trap was found under any of these policies."),
        ([full, unfinished], "No known trap was found under full."),
        ([unfinished], "The search for traps was not finished."),
    ):
        assert f"<h3>Traps</h3><p>{said}</p>" in page.page(replace(found, policies=policies))


@pytest.mark.parametrize("plan", ["lots", "plan.json", 2.5])
def test_what_is_no_plan_is_called_one(plan):
    with pytest.raises(errors.PlanningError) as error:
        gather(JOB, ["full"], "cpu", plan=plan)
    assert str(error.value).startswith(f"plan={plan!r}: ") and "budget=" not in str(error.value)
    assert ("remat_jax.Plan.load(path, workload)" in str(error.value)) == isinstance(plan, str)


def test_a_missing_section_is_noted():
    forward = rj.Workload.from_step(JOB.loss, JOB.params, *JOB.batch, blocks=MlpLayer, name="forward")
    shown = gather(forward, ["full"], "cpu")
    assert page.modules(shown.policies) == ""
    notes = " ".join(page.notes(shown))
    assert "No memory by module: " in notes and "No step time is estimated" in notes


def test_the_page_has_what_was_compiled_before_the_timeout(monkeypatch):
    measured, passed, clock, orders = gathering.measure_many, [], time.monotonic, []

    def late(workload, policies, target, timeout, on_done):
        orders.append([policy if isinstance(policy, str) else "the plan" for policy in policies])
        if len(orders) > 1:
            return measured(workload, policies, target, timeout, on_done)
        measured(workload, policies[:2], target, timeout, on_done)
        passed.append(1000)
        raise NotDoneError("compiling: not done after timeout=99 s, stopped at policy='full'")

    monkeypatch.setattr(gathering.time, "monotonic", lambda: clock() + sum(passed))
    monkeypatch.setattr(gathering, "measure_many", late)
    monkeypatch.setattr(gathering, "_usual", lambda *_: ["off", "full"])
    report = gather(JOB, None, "cpu", plan=PLAN, timeout=100)
    assert orders == [["the plan", "off", "full"], ["the plan"], ["off"]]
    assert [policy.name for policy in report.policies] == ["off", "the plan"]
    assert report.left_out["full"] == "the timeout was over before it was compiled"


@pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")
def test_the_search_for_traps_ends_with_the_timeout(monkeypatch):
    """The clock stands past the timeout when the policies are compiled."""
    passed, clock, measured = [], time.monotonic, gathering.measure_many

    def slow(*arguments):
        reports = measured(*arguments)
        passed.append(1000)
        return reports

    monkeypatch.setattr(gathering.time, "monotonic", lambda: clock() + sum(passed))
    monkeypatch.setattr(gathering, "measure_many", slow)
    monkeypatch.setattr(gathering, "diagnose", lambda *_, **__: pytest.fail("traps were looked for"))
    late = gather(JOB, ["off", "full"], "h200", timeout=300)
    assert [policy.diagnosis for policy in late.policies] == [None, None]
    assert "The search for traps under off, full was not finished: the timeout was over; a longer one finishes it" in late.notes
    assert page.summary(late)[-1] == "Known traps: none found under any policy; the search was not finished."
    assert "No known trap was found" not in page.page(late)
    assert [policy["findings"] for policy in late.to_dict()["policies"]] == [None, None]


def test_a_search_for_traps_that_a_compilation_ends_keeps_what_it_found(monkeypatch):
    def stopped(*_):
        yield Finding("frees_nothing", "b", "", "p", "r")
        raise errors.CompileError("timeout=1 s")

    module = sys.modules["remat_jax.diagnosis.doctor"]
    monkeypatch.setattr(module, "compiled_traps", stopped)
    report, h200 = rj.measure(JOB, "full", "cpu"), target("h200")
    diagnosis = module.diagnose(JOB, "full", h200, 300, report=report, ends=0.0)
    assert diagnosis.cut_short and [finding.trap for finding in diagnosis.findings] == ["frees_nothing"]


def test_the_rates_of_every_target_have_names_in_words():
    assert {rate for name in targets() for rate in Rates.of(name).source} <= facts._RATES.keys()
