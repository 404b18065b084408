"""The HTML page of a report: its content as plain data for `remat_jax.report`, which draws it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from remat_jax.overview.compared import THE_PLAN, Compared
from remat_jax.overview.data import Gathered
from remat_jax.overview.facts import facts
from remat_jax.parity.report import evidence
from remat_jax.planning import Plan
from remat_jax.planning.explain import explanation
from remat_jax.planning.explain import summary as plan_summary
from remat_jax.planning.page import page_data
from remat_jax.planning.problem import keeping_seconds
from remat_jax.policy import Action
from remat_jax.report.html_bars import StackedBar
from remat_jax.report.html_tables import Cell, Column
from remat_jax.report.overview_page import Modules, Overview, Trouble, overview_page
from remat_jax.report.stacked import KEPT, MOST_MODULES, WORKING, Memory, grouped
from remat_jax.report.tables import format_bytes, format_estimate

ON_HOST = "in host memory"
_COLUMNS = (
    "Device (temp included) and host: memory of the compiled step. Kept: residuals, from the forward to the backward pass. "
    "Step: the estimated time; over keeping all: how much longer it is than a step that keeps all residuals."
)
_FOOTER = (
    "Device memory is the memory of one training step as the target's own compiler lays it out: arguments + outputs − "
    "aliased + temp; it never includes host memory. Kept memory is residuals, from the forward to the backward pass. Times "
    "are estimates from counted operations and bytes at the target's rates, "
)
_RUN = "not measurements. Each step was run once, for its measured peak of memory."


def page(gathered: Gathered) -> str:
    """The page as HTML text."""
    return overview_page(overview(gathered))


def overview(gathered: Gathered) -> Overview:
    """The page's content as plain data."""
    policies, plan, parity = gathered.comparison.policies, _with_compiled(gathered), gathered.parity
    limit = _limit(gathered)
    columns, rows = _table(gathered, limit)
    return Overview(
        title=f"{gathered.workload.name} on {gathered.target.name}",
        short=_short(gathered, plan, limit),
        facts=facts(gathered.workload, gathered.target, gathered.comparison.described),
        columns=columns,
        rows=rows,
        device=[_device(one) for one in policies],
        host=[StackedBar(one.name, {(ON_HOST, "of one step"): n}) for one in policies if (n := one.memory.host_bytes)],
        limit=limit,
        notes=_notes(gathered, limit),
        offload=[_offload(one) for one in policies if one.memory.receipt is not None],
        warnings=_warnings(policies),
        findings=_findings(policies),
        modules=_modules(policies),
        plan=page_data(plan) if plan is not None else None,
        explanation=explanation(plan) if plan is not None else "",
        parity=(parity.verdict(), parity.passed, evidence(parity)) if parity is not None else None,
        footer=(_FOOTER + (_RUN if gathered.target.attached else "and nothing was run."),),
    )


def _with_compiled(gathered: Gathered) -> Plan | None:
    """The plan, with the bytes compiled for this page in place of its named policies' predicted bytes."""
    plan = gathered.plan
    if plan is None:
        return None
    known = {one.name: one.memory for one in gathered.comparison.policies}
    named = [
        replace(one, device_bytes=known[one.name].device_bytes, host_bytes=known[one.name].host_bytes, compiled=True)
        if one.name in known and not one.compiled and not one.remark
        else one
        for one in plan.named
    ]
    return replace(plan, named=tuple(named))


def _limit(gathered: Gathered) -> tuple[str, int] | None:
    if gathered.plan is not None:
        return "the budget", gathered.plan.budget
    size, devices = gathered.target.memory_bytes, gathered.target.devices
    whose = f"one device of {gathered.target.name}" if devices > 1 else gathered.target.name
    return (f"the memory of {whose}", size) if size is not None else None


def _fits(one: Compared, gathered: Gathered) -> bool:
    limit, plan = _limit(gathered), gathered.plan
    host = plan.host_budget if plan is not None else None
    within = limit is None or one.memory.device_bytes <= limit[1]
    return within and (host is None or one.memory.host_bytes <= host)


def _is_sound(one: Compared) -> bool:
    return all(finding.trap != "miscompiled_offload" for finding in one.diagnosis.findings)


def _same_rates(gathered: Gathered) -> bool:
    """Whether the plan's times and the policies' times are comparable."""
    plan, described = gathered.plan, gathered.comparison.described
    if plan is None or described is None:
        return True
    mine = [one for one in gathered.comparison.policies if one.name == THE_PLAN]
    kept = described.base_seconds + keeping_seconds(described)
    now, then = (mine[0].memory.seconds, plan.seconds) if plan.timed and mine else (kept, plan.base_seconds)
    return now is not None and abs(now - then) <= 1e-6 * then


def _table(gathered: Gathered, limit: tuple[str, int] | None) -> tuple[list[Column], list[list[Cell]]]:
    policies = gathered.comparison.policies
    columns = [Column("policy", "name"), *(Column(title, "bytes") for title in ("device", "temp", "host"))]
    measured = any(one.memory.measured_peak_bytes is not None for one in policies)
    columns += [Column("measured peak", "bytes")] * measured
    columns += [Column("kept: device", "bytes"), Column("kept: host", "bytes")]
    columns += [Column("step", "seconds"), Column("over keeping all", "seconds"), Column("recomputed", "flops")]
    columns += [Column("fits")] if limit else []
    columns.append(Column("traps", "count"))
    rows = []
    for one in policies:
        memory = one.memory
        row: list[Cell] = [one.name, memory.device_bytes, memory.temp_bytes, memory.host_bytes]
        row += [memory.measured_peak_bytes] * measured
        row += [memory.residual_device_bytes, memory.residual_host_bytes]
        row += [one.seconds, one.extra_seconds, one.recompute_flops]
        row += ["yes" if _fits(one, gathered) else "no"] if limit else []
        row.append(len(one.diagnosis.findings))
        rows.append(row)
    return columns, rows


def _device(one: Compared) -> StackedBar:
    memory = one.memory
    given = memory.device_bytes - memory.temp_bytes
    return StackedBar(
        one.name,
        {("arguments and results", "there anyway"): given, ("temp", "residuals and working memory"): memory.temp_bytes},
    )


def _offload(one: Compared) -> list[Cell]:
    receipt, overlap = one.memory.receipt, one.memory.overlap
    assert receipt is not None
    covered = f"{100 * overlap.covered:.1f} % of {100 * overlap.coverable:.1f} %" if overlap else None
    return [one.name, receipt.offered_bytes, receipt.host_bytes, receipt.returned_bytes, covered]


def _warnings(policies: list[Compared]) -> list[Trouble]:
    """The warnings; a warning under several policies is listed once."""
    under: dict[str, list[str]] = {}
    for one in policies:
        for warning in one.memory.warnings:
            under.setdefault(warning, []).append(one.name)
    return [Trouble("warning", ", ".join(names), "", text) for text, names in under.items()]


def _findings(policies: list[Compared]) -> list[Trouble]:
    """The traps; a trap under several policies is listed once."""
    under: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for one in policies:
        for finding in one.diagnosis.findings:
            where = " at ".join(filter(None, (finding.block, finding.place)))
            alike = under.setdefault((finding.trap, finding.problem, finding.remedy), {})
            alike.setdefault(one.name, []).append(where)
    return [
        Trouble(trap, ", ".join(wheres), "; ".join(dict.fromkeys(filter(None, chain(*wheres.values())))), problem, remedy)
        for (trap, problem, remedy), wheres in under.items()
    ]


def _modules(policies: list[Compared]) -> Modules | None:
    """The arrays alive at the peak by module; for a CPU, where these are unknown, the residuals by module."""
    if any(one.memory.live for one in policies):
        memory: dict[str, Memory] = {one.name: one.memory.live_bytes_by_module for one in policies if one.memory.live}
        label, striped = "device memory at the peak, by module", WORKING
        hint = (
            "Device memory at the step's peak, by the module that made each array. Plain parts are arguments and the arrays "
            "that the forward pass kept; striped parts are the working set at that moment: recomputed and backward. Layers "
            "whose names differ only in a number are shown as one."
        )
    else:
        kept = {one.name: _kept(one) for one in policies}
        memory = {name: parts for name, parts in kept.items() if parts}
        label, striped = "residuals, by module", ON_HOST
        hint = (
            "Residuals, by the module that made them; striped parts are in host memory. Memory at the peak is known only for "
            "GPU targets."
        )
    if not memory:
        return None
    # Everything that is not KEPT is striped, under the label of this chart.
    bars = [
        StackedBar(name, {(module, kind if kind == KEPT else striped): size for (module, kind), size in parts.items()})
        for name, parts in grouped(memory, MOST_MODULES).items()
    ]
    return Modules(bars, label, striped, hint)


def _kept(one: Compared) -> Memory:
    parts: dict[tuple[str, str], int] = {}
    for row in one.kept or ():
        if row.action != Action.RECOMPUTE.value:
            key = row.name.partition(":")[0], "forward" if row.action == Action.SAVE.value else ON_HOST
            parts[key] = parts.get(key, 0) + row.bytes
    return parts


def _notes(gathered: Gathered, limit: tuple[str, int] | None) -> list[str]:
    comparison, plan = gathered.comparison, gathered.plan
    host = plan.host_budget if plan is not None else None
    on_host = f", and {format_bytes(host)} of host memory" if host is not None else ""
    notes = [_COLUMNS + (f" Fits: within {limit[0]}, {format_bytes(limit[1])}{on_host}." if limit else "")]
    if gathered.target.devices > 1:
        notes.append(
            f"Device and host memory is per device, of {gathered.target.devices}; residuals, bytes offered to the host, "
            "recomputed FLOPs, and the sizes of arguments below are totals of all devices."
        )
    notes += [f"Left out: {name}: {why}" for name, why in comparison.left_out.items()] + comparison.notes
    unknown = [one.name for one in comparison.policies if one.seconds is None]
    if unknown and comparison.described is not None:
        notes.append(
            f"No time is estimated for {', '.join(unknown)}: the costs of the offloaded or kept arrays are unknown here"
        )
    if _modules(comparison.policies) is None:
        notes.append(
            "No memory by module: memory at the peak is known only for GPU targets, and residuals only if the workload has "
            "its loss"
        )
    return notes + (_notes_of_plan(gathered, plan) if plan is not None else [])


def _notes_of_plan(gathered: Gathered, plan: Plan) -> list[str]:
    """Notes on differences between the plan's step and the report's."""
    comparison, notes = gathered.comparison, []
    versions = {one.memory.jax_version for one in comparison.policies} - {plan.jax_version}
    if versions:
        notes.append(f"The plan was made with JAX {plan.jax_version}, but the report with JAX {', '.join(versions)}")
    if not _same_rates(gathered):
        notes.append(
            "The plan's times and the policies' times are not comparable: they were estimated for different steps or with "
            "different rates"
        )
    for one in comparison.policies:
        now, then = ((each.device_bytes, each.host_bytes) for each in (one.memory, plan))
        if one.name == THE_PLAN and now != then:
            notes.append(
                f"Compiled for this page, the plan's step needs {format_bytes(now[0])} on the device and "
                f"{format_bytes(now[1])} on the host; compiled with the plan, it needed {format_bytes(then[0])} and "
                f"{format_bytes(then[1])}. The optimizer, JAX or XLA_FLAGS differ; plan again"
            )
    return notes


def _short(gathered: Gathered, plan: Plan | None, limit: tuple[str, int] | None) -> list[str]:
    """The summary, in sentences."""
    named = [one for one in gathered.comparison.policies if one.name != THE_PLAN]
    sentences = [_least_and_most(named)] if named else []
    timed = [(one.seconds, one) for one in named if one.seconds is not None]
    # A miscompiled policy is never recommended, however fast.
    fits = [entry for entry in timed if _fits(entry[1], gathered) and _is_sound(entry[1])]
    if fits:
        seconds, best = min(fits, key=lambda entry: (entry[0], entry[1].memory.device_bytes))
        within = f" within {limit[0]} ({format_bytes(limit[1])})" if limit else ""
        size = format_bytes(best.memory.device_bytes)
        sentences.append(f"The fastest policy{within} is {best.name}: {_said_time(best)} per step (estimated), in {size}.")
    elif limit and named and not any(_fits(one, gathered) and _is_sound(one) for one in named):
        sentences.append(f"No policy that is safe to run is within {limit[0]} ({format_bytes(limit[1])}).")
    if plan is not None:
        sentences.append(f"The plan: {plan_summary(plan)}")
        faster = [one.name for seconds, one in fits if seconds < plan.seconds]
        if faster and _same_rates(gathered):
            sentences.append(
                f"Compiled for this page, these policies fit and are estimated to be faster than the plan: {', '.join(faster)}."
            )
    traps = len(_findings(gathered.comparison.policies))
    sentences.append(
        f"Known traps: {traps or 'none'}" + (", each with its remedy below." if traps else " found under any policy.")
    )
    if gathered.parity is not None:
        sentences.append(f"Parity with PyTorch: {gathered.parity.verdict()}.")
    return sentences


def _said_time(one: Compared) -> str:
    return format_estimate(one.seconds, bool(one.memory.assumed_rates))


def _least_and_most(policies: list[Compared]) -> str:
    least, most = (choose(policies, key=lambda one: one.memory.device_bytes) for choose in (min, max))
    smallest, largest = least.memory.device_bytes, most.memory.device_bytes
    if smallest == largest:
        return f"{' and '.join(one.name for one in policies)}: {format_bytes(smallest)} on the device."
    return (
        f"Of the policies compared, {least.name} needs the least device memory, {format_bytes(smallest)}: "
        f"{100 * smallest / largest:.0f} % of the {format_bytes(largest)} of {most.name}."
    )
