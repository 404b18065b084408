"""The HTML page of a report: a summary, policies, memory by module, the plan, and parity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from remat_jax.overview.facts import facts
from remat_jax.overview.gathered import THE_PLAN, Gathered, PolicyFigures
from remat_jax.parity.report import page_body as parity_body
from remat_jax.planning import Plan
from remat_jax.planning.explain import explanation
from remat_jax.planning.explain import summary as plan_summary
from remat_jax.planning.page import body as plan_body
from remat_jax.policy import Action
from remat_jax.report.document import document, escaped
from remat_jax.report.html_parts import Cell, Column, Estimate, html_table, stacked_bars
from remat_jax.report.stacked_bars import ARGUMENTS, KEPT, MOST_MODULES, WORKING, Memory, grouped
from remat_jax.report.tables import format_bytes, format_estimate

_ON_HOST = "in host memory"
_COLUMNS = (
    "Device (temp included) and host: memory of the compiled step. Kept: residuals, from the forward to the backward pass. "
    "Step: the estimated time{origin}; over keeping all: the excess over a step that keeps all residuals."
)
_AT_THE_PEAK = (
    "Device memory at the step's peak, by the module that made each array. Plain parts are arguments and the arrays that the "
    "forward pass kept; hatched parts are the working set: recomputed arrays, arrays of the backward pass, and the memory "
    "between arrays. Layers whose names differ only in a number are shown as one."
)
_RESIDUALS = (
    "Residuals, by the module that made them; hatched parts are in host memory. Memory at the peak is known only for GPU and "
    "TPU targets."
)
_FOOTER = (
    "Device memory is the memory of one training step as the target's own compiler lays it out: arguments + outputs − "
    "aliased + temp; it never includes host memory. Kept memory holds the residuals from the forward to the backward pass. "
    "Times are estimates from counted operations and bytes at the target's rates, "
)
_RUN = "not measurements. Each step was run once, to measure its peak memory."
_OFFLOAD_COLUMNS = (
    Column("policy", "name"),
    Column("offered", "bytes"),
    Column("in host memory", "bytes"),
    Column("device memory freed", "bytes"),
    Column("copies that compute hides"),
)


@dataclass(frozen=True)
class Trouble:
    """A trap or a warning: its name, the policies that have it, its place, the problem, and the remedy."""

    name: str
    under: str
    where: str
    problem: str
    remedy: str = ""


def page(gathered: Gathered) -> str:
    """The page's HTML text."""
    parity = gathered.parity
    pairs = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>" for name, text in facts(gathered))
    sections = {
        "policies": ("Policies compared", _policies(gathered)),
        "modules": ("Memory by module", modules(gathered.policies)),
        "plan": ("The plan", _plan(gathered)),
        "parity": ("Parity with PyTorch", parity_body(parity, level=3) if parity is not None else ""),
        "workload": ("What was measured", f'<dl class="facts">{pairs}</dl>'),
    }
    present = {name: entry for name, entry in sections.items() if entry[1]}
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, (heading, _) in present.items())
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-head"><h2 id="{name}-head">{heading}</h2>{text}</section>'
        for name, (heading, text) in present.items()
    )
    sentences = "".join(f"<li>{escaped(sentence)}</li>" for sentence in summary(gathered))
    return document(
        f"{gathered.workload.name} on {gathered.target.name}",
        f'<nav aria-label="sections"><ul>{links}</ul></nav><div class="short"><ul>{sentences}</ul></div>{body}'
        f"<footer><p>{escaped(footer(gathered))}</p></footer>",
    )


def footer(gathered: Gathered) -> str:
    """A text that explains the page's figures."""
    return _FOOTER + (_RUN if gathered.target.attached else "and nothing was run.")


def _policies(gathered: Gathered) -> str:
    policies = gathered.policies
    rows = [policy_cells(gathered, policy) for policy in policies]
    device = {policy.name: _device(policy) for policy in policies}
    host = {policy.name: {(_ON_HOST, "of one step"): size} for policy in policies if (size := policy.memory.host_bytes)}
    cells = [list(row.values()) for row in rows]
    parts = [
        html_table(list(rows[0]), cells, label="policies compared", name="policies-table"),
        *(f'<p class="hint">{escaped(note)}</p>' for note in notes(gathered)),
        "<h3>Device memory</h3>",
        stacked_bars(device, "device memory by policy", limit=gathered.limit),
    ]
    if host:
        parts += ["<h3>Host memory</h3>", stacked_bars(host, "host memory by policy")]
    if offloads := offload_rows(policies):
        parts += ["<h3>Effect of offload</h3>", html_table(_OFFLOAD_COLUMNS, offloads, label="offload", sortable=False)]
        parts.append(_list(warnings(policies)))
    searched = [policy.name for policy in policies if policy.is_searched]
    where = "any of these policies" if len(searched) == len(policies) else ", ".join(searched)
    none = f"No known trap was found under {escaped(where)}." if searched else "The search for traps was not finished."
    return "".join([*parts, "<h3>Traps</h3>", _list(findings(policies)) or f"<p>{none}</p>"])


def _list(troubles: Sequence[Trouble]) -> str:
    entries = []
    for trouble in troubles:
        where = f" ({escaped(trouble.where)})" if trouble.where else ""
        remedy = f"<p>Remedy: {escaped(trouble.remedy)}</p>" if trouble.remedy else ""
        entries.append(
            f"<li><p><strong>{escaped(trouble.name)}</strong> under {escaped(trouble.under)}{where}</p>"
            f"<p>{escaped(trouble.problem)}</p>{remedy}</li>"
        )
    return f'<ul class="findings">{"".join(entries)}</ul>' if entries else ""


def policy_cells(gathered: Gathered, policy: PolicyFigures) -> dict[Column, Cell]:
    """A policy's row of the table, by column."""
    memory = policy.memory
    has_peaks = any(other.memory.measured_peak_bytes is not None for other in gathered.policies)
    return {
        Column("policy", "name"): policy.name,
        Column("device", "bytes"): memory.device_bytes,
        Column("temp", "bytes"): memory.temp_bytes,
        Column("host", "bytes"): memory.host_bytes,
        **({Column("measured peak", "bytes"): memory.measured_peak_bytes} if has_peaks else {}),
        Column("kept: device", "bytes"): memory.residual_device_bytes,
        Column("kept: host", "bytes"): memory.residual_host_bytes,
        Column("step", "seconds"): Estimate(policy.seconds, bool(gathered.assumed_rates)),
        Column("over keeping all", "seconds"): Estimate(policy.extra_seconds, bool(gathered.assumed_rates)),
        **({Column("time"): _origin(policy)} if len(_origins(gathered)) > 1 else {}),
        Column("recomputed", "flops"): policy.recompute_flops,
        **({Column("fits"): "yes" if gathered.fits(policy) else "no"} if gathered.limit else {}),
        Column("traps", "count"): len(policy.traps) if policy.traps or policy.is_searched else None,
    }


def _device(policy: PolicyFigures) -> Memory:
    temp = policy.memory.temp_bytes
    argument_bytes = policy.memory.device_bytes - temp
    return {(ARGUMENTS, "independent of the policy"): argument_bytes, ("temp", "residuals and working memory"): temp}


def offload_rows(policies: Sequence[PolicyFigures]) -> list[list[Cell]]:
    """The effect of each policy's offload, with a cell for each of `_OFFLOAD_COLUMNS`."""
    rows: list[list[Cell]] = []
    for policy in policies:
        receipt, overlap = policy.memory.receipt, policy.memory.overlap
        if receipt is not None:
            hidden = f"{100 * overlap.covered:.1f} % (at most {100 * overlap.coverable:.1f} %)" if overlap else None
            rows.append([policy.name, receipt.offered_bytes, receipt.host_bytes, receipt.returned_bytes, hidden])
    return rows


def warnings(policies: Sequence[PolicyFigures]) -> list[Trouble]:
    """The warnings that no trap repeats; a warning under several policies is listed once."""
    under: dict[str, list[str]] = {}
    for policy in policies:
        for warning in policy.memory.warnings:
            if warning not in {finding.problem for finding in policy.traps}:
                under.setdefault(warning, []).append(policy.name)
    return [Trouble("warning", ", ".join(names), "", text) for text, names in under.items()]


def findings(policies: Sequence[PolicyFigures]) -> list[Trouble]:
    """The traps; a trap under several policies is listed once."""
    under: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for policy in policies:
        for finding in policy.traps:
            where = " at ".join(filter(None, (finding.block, finding.place)))
            places = under.setdefault((finding.trap, finding.problem, finding.remedy), {})
            places.setdefault(policy.name, []).append(where)
    return [
        Trouble(trap, ", ".join(places), "; ".join(dict.fromkeys(filter(None, chain(*places.values())))), problem, remedy)
        for (trap, problem, remedy), places in under.items()
    ]


def modules(policies: Sequence[PolicyFigures]) -> str:
    """The bars of memory by module; empty if memory by module is unknown."""
    memory = _by_module(policies)
    if not memory:
        return ""
    label, hint, hatched = "residuals, by module", _RESIDUALS, _ON_HOST
    if any(policy.memory.live for policy in policies):
        label, hint, hatched = "device memory at the peak, by module", _AT_THE_PEAK, WORKING
    # Every kind except KEPT is hatched, and gets the name `hatched` in this chart.
    bars = {
        name: {(module, kind if kind == KEPT else hatched): size for (module, kind), size in parts.items()}
        for name, parts in grouped(memory, MOST_MODULES).items()
    }
    return f'<p class="hint">{escaped(hint)}</p>{stacked_bars(bars, label, hatched={hatched: hatched})}'


def _by_module(policies: Sequence[PolicyFigures]) -> dict[str, Memory]:
    """Policy name → bytes by module of the arrays alive at the peak, or of the residuals if the peak's arrays are unknown."""
    alive: dict[str, Memory] = {policy.name: policy.memory.live_bytes_by_module for policy in policies if policy.memory.live}
    return alive or {policy.name: kept for policy in policies if (kept := _kept(policy))}


def _kept(policy: PolicyFigures) -> Memory:
    parts: Counter[tuple[str, str]] = Counter()
    for row in policy.kept or ():
        if row.action != Action.RECOMPUTE.value:
            phase = "forward" if row.action == Action.SAVE.value else _ON_HOST
            parts[row.name.partition(":")[0], phase] += row.bytes
    return parts


def _plan(gathered: Gathered) -> str:
    plan = gathered.plan
    if plan is None:
        return ""
    reasons = f"<details><summary>Why each residual is where it is</summary><pre>{escaped(explanation(plan))}</pre></details>"
    return plan_body(plan, level=3) + reasons


_ORIGINS = {"compiled": "compiled schedule", "traced": "traced program"}


def _origin(policy: PolicyFigures) -> str:
    """Where a policy's time comes from; empty if it has none."""
    return "" if policy.seconds is None else "compiled" if policy.timed else "traced"


def _origins(gathered: Gathered) -> list[str]:
    return sorted(set(filter(None, map(_origin, gathered.policies))))


def notes(gathered: Gathered) -> list[str]:
    """Remarks on the table and on missing figures."""
    limit, host = gathered.limit, gathered.host_budget
    on_host = f", and {format_bytes(host)} of host memory" if host is not None else ""
    origins = _origins(gathered)
    origin = f", from the {_ORIGINS[origins[0]]}" if len(origins) == 1 else ""
    remarks = [
        _COLUMNS.format(origin=origin) + (f" Fits: within {limit[0]}, {format_bytes(limit[1])}{on_host}." if limit else "")
    ]
    if gathered.target.devices > 1:
        remarks.append(
            f"Device and host memory is for one of {gathered.target.devices} devices; residuals, bytes offered to the host, "
            "recomputed FLOPs, and the sizes of arguments below are totals of all devices."
        )
    remarks += [f"Left out: {name}: {why}" for name, why in gathered.left_out.items()] + gathered.notes
    for policy in gathered.policies if gathered.described is not None else ():
        if policy.seconds is None:
            why = policy.memory.no_time or "the costs of the offloaded or kept arrays are unknown here"
            remarks.append(f"No time is estimated for {policy.name}: {why}")
    if not _by_module(gathered.policies):
        remarks.append(
            "No memory by module: memory at the peak is known only for GPU and TPU targets, and residuals only if the workload "
            "has its loss"
        )
    return remarks + (_notes_of_plan(gathered, gathered.plan) if gathered.plan is not None else [])


def _notes_of_plan(gathered: Gathered, plan: Plan) -> list[str]:
    remarks = []
    versions = {policy.memory.jax_version for policy in gathered.policies} - {plan.jax_version}
    if versions:
        remarks.append(f"The plan was made with JAX {plan.jax_version}, but the report with JAX {', '.join(versions)}")
    if not gathered.has_comparable_times:
        remarks.append(
            "The plan's times and the policies' times are not comparable: they were estimated for different steps or with "
            "different rates"
        )
    for policy in gathered.policies:
        now, then = ((step.device_bytes, step.host_bytes) for step in (policy.memory, plan))
        if policy.name == THE_PLAN and now != then:
            remarks.append(
                f"Compiled for this page, the plan's step needs {format_bytes(now[0])} on the device and "
                f"{format_bytes(now[1])} on the host; when the plan was made, it needed {format_bytes(then[0])} and "
                f"{format_bytes(then[1])}. The optimizer, JAX or XLA_FLAGS differ; plan again"
            )
    return remarks


def summary(gathered: Gathered) -> list[str]:
    """Sentences that summarise the figures."""
    limit, plan = gathered.limit, gathered.plan
    named = [policy for policy in gathered.policies if policy.name != THE_PLAN]
    # A miscompiled policy is never recommended, however small or fast.
    sound = [policy for policy in named if policy.is_sound]
    sentences = [_least_and_most(sound)] if sound else []
    fits = [policy for policy in sound if gathered.fits(policy)]
    timed = [(policy.seconds, policy.memory.device_bytes, policy) for policy in fits if policy.seconds is not None]
    if plan is not None:
        sentences.append(f"The plan: {plan_summary(plan)}")
    if timed:
        seconds, size, fastest = min(timed, key=lambda entry: entry[:2])
        within = f" within {limit[0]} ({format_bytes(limit[1])})" if limit else ""
        time = format_estimate(seconds, bool(gathered.assumed_rates))
        which = "The fastest policy" if plan is None else "Beside the plan, the fastest policy"
        best = None if plan is None else plan.best_named
        if best is None or (best.name, best.seconds) != (fastest.name, seconds):  # the plan's sentence names it
            sentences.append(f"{which}{within} is {fastest.name}: {time} per step (estimated), in {format_bytes(size)}.")
    elif limit and named and not fits:
        sentences.append(f"No policy that is safe to run is within {limit[0]} ({format_bytes(limit[1])}).")
    if plan is not None:
        faster = [policy.name for seconds, _, policy in timed if seconds < plan.seconds]
        if faster and gathered.has_comparable_times:
            sentences.append(
                f"Compiled for this page, these policies fit and are estimated to be faster than the plan: {', '.join(faster)}."
            )
    traps = len(findings(gathered.policies))
    sentences.append(
        f"Known traps: {traps or 'none'}"
        + (", each with its remedy below" if traps else " found under any policy")
        + ("." if all(policy.is_searched for policy in gathered.policies) else "; the search was not finished.")
    )
    if gathered.parity is not None:
        sentences.append(f"Parity with PyTorch: {gathered.parity.verdict()}.")
    return sentences


def _least_and_most(policies: Sequence[PolicyFigures]) -> str:
    least, most = (choose(policies, key=lambda policy: policy.memory.device_bytes) for choose in (min, max))
    smallest, largest = least.memory.device_bytes, most.memory.device_bytes
    if smallest == largest:
        return f"{' and '.join(policy.name for policy in policies)}: {format_bytes(smallest)} on the device."
    return (
        f"Of the policies compared, {least.name} needs the least device memory, {format_bytes(smallest)}: "
        f"{100 * smallest / largest:.0f} % of the {format_bytes(largest)} of {most.name}."
    )
