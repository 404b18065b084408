"""A plan in words: each layer's action for each residual, its reason, and the gain from more memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from remat_jax.memory.compile.backends import LIMIT_OPTIONS
from remat_jax.memory.compile.options import GRAPHS
from remat_jax.planning.model import block_name
from remat_jax.planning.plan_data import Beyond, LayerRow, Part, PlanData, Point, over_budget, plan_point
from remat_jax.policy import NAMED, LayerPolicies
from remat_jax.report.tables import format_bytes, format_difference, format_estimate, format_flops, render, table

GIB = 2**30
_SHORT = 3
_SMALL = 0.01
"""Residuals smaller than this share of the largest residual are summarised in one line per action."""


def plan_table(plan: PlanData) -> Any:
    """The layers' actions as a table, with one row per run of equal layers; a plan without checkpoints has one row."""
    columns = ("block and layers", "saved", "offloaded", "recomputed", "recompute time", "copies not hidden", "policy")
    rows = [
        (
            part.where,
            *(format_bytes(size) for size in (part.saved_bytes, part.offloaded_bytes, part.recomputed_bytes)),
            time_text(plan, part.layers * part.recompute_seconds),
            time_text(plan, part.layers * part.copy_seconds),
            _what(part),
        )
        for part in plan.parts
    ]
    if plan.is_off:
        nothing = format_bytes(0), format_bytes(0), time_text(plan, 0.0), time_text(plan, 0.0)
        rows = [("every layer", format_bytes(sum(part.saved_bytes for part in plan.parts)), *nothing, "off")]
    host = f", host {format_bytes(plan.host_budget)}" if plan.host_budget is not None else ""
    budgets = f"{format_bytes(plan.budget)}{host}"
    changes = [Beyond(change, times=plan.changes.count(change)).text for change in dict.fromkeys(plan.changes)]
    with_changes = f" with {' and '.join(changes)}" if changes else ""
    title = (
        f"Plan for {plan.workload}{with_changes} on {plan.target} within {budgets}{plan.per_device}: "
        f"{format_bytes(plan.device_bytes)} compiled"
    )
    narrow = ("copies not hidden", "recompute time", "recomputed", "offloaded")
    return table(title, columns, rows, caption=summary(plan), optional=narrow)


def named_table(plan: PlanData) -> Any:
    """The memory and time of the plan and of the named policies, as a table."""
    rows = [_named_row(plan_point(plan, "this plan"), plan, "fits")]
    rows += [_named_row(point, plan, _verdict(plan, point)) for point in sorted(plan.named, key=_by_time)]
    columns = ("policy", "device", "memory", "host", "step", "time", "over keeping everything", "")
    narrow = ("over keeping everything", "time", "memory", "host", "step")
    return table("The plan and the named policies", columns, rows, optional=narrow)


def beyond_table(plan: PlanData) -> Any:
    """What each change beyond the blocks gives as a plan, as a table; None if there is none to show."""
    if not plan.beyond:
        return None
    rows = [
        (each.text, format_bytes(each.device_bytes), time_text(plan, each.seconds), *beside_plan(plan, each))
        for each in plan.beyond
    ]
    columns = ("change", "device", "step", "figures", "than this plan", "")
    narrow = ("figures", "step", "device")
    return table("Changes beyond the blocks, each as a plan (allow=…)", columns, rows, optional=narrow)


def beside_plan(plan: PlanData, change: Beyond) -> tuple[str, str, str]:
    """Where the figures of a change come from, its time beside the plan's, and a remark."""
    gain = None if change.seconds is None else plan.seconds - change.seconds
    how = "" if change.seconds is None else "compiled" if change.compiled else "estimated"
    is_made = change.times <= plan.changes.count(change.change)
    gained = "" if gain is None or is_made else signed(plan, gain, "slower") + " faster" * (gain > 0)
    return how, gained, change.remark or ("in this plan" if is_made else "")


def summary(plan: PlanData) -> str:
    """The estimated time, the recomputation, the memory, and the best named policy that fits, in a few sentences."""
    schedule = " (compiled schedule)" if plan.timed else ""
    device, predicted = format_bytes(plan.device_bytes), format_bytes(plan.predicted_bytes)
    host = f", {format_bytes(plan.host_bytes)} in host memory" if plan.host_bytes else ""
    steps = f"{len(plan.tried)} steps were compiled" if len(plan.tried) > 1 else "one step was compiled"
    estimated = f"Estimated {time_text(plan, plan.seconds)} per step{schedule}"
    recomputed = (
        f"{format_flops(plan.recompute_flops)} are recomputed"
        if plan.recompute_flops
        else "no matmul and no convolution is recomputed"
    )
    sentences = [
        f"{estimated}. The whole step fits without checkpoints."
        if plan.is_off
        else f"{estimated}, {_over_everything(plan)}; {recomputed}.",
        f"Compiled: {device} on {'each' if plan.per_device else 'the'} device (predicted: {predicted}){host}; {steps}.",
    ]
    if plan.compiler_options:
        reasons = {
            **dict.fromkeys(LIMIT_OPTIONS, "Compiled with a memory limit"),
            GRAPHS: "The copies in loops overlap compute only with these options",
        }
        text = ". ".join(reason for option, reason in reasons.items() if option in plan.compiler_options)
        sentences.append(
            f"{text}: jax.jit(step, compiler_options={dict(plan.compiler_options)!r}). On a finished step that has a jit, "
            "plan.apply sets them."
        )
    if plan.lower_bound is not None and plan.seconds:
        share = 100 * (1 - plan.lower_bound / plan.seconds)
        faster = f"more than {share:.1f} % faster" if share >= 0.05 else "faster"
        sentences.append(f"By the same estimate, no plan within the budget is {faster}.")
    best = plan.best_named
    if best is None:
        sentences.append("No named policy fits.")
    elif not plan.is_off and all(policy == NAMED.get(best.name) for policy in plan.policies.values()):
        sentences.append(f"The plan is a named policy, {best.name}.")
    elif not plan.is_off:
        how = ", estimated before compiling" if plan.timed and not best.timed else ""
        sentences.append(f"The best named policy that fits, {best.name}, takes {time_text(plan, best.seconds)}{how}.")
    return " ".join(sentences)


def explanation(plan: PlanData) -> str:
    """The reason for each residual's action and the gain from the next GiB, as multi-line text."""
    lines = [summary(plan), "Bytes and times are of one layer.", ""]
    if plan.is_off:
        lines.append("Nothing is checkpointed: the whole step fits as it is.")
    layered = [(block_name(each), policy) for each, policy in plan.policies.items() if isinstance(policy, LayerPolicies)]
    cuts = {(name, cut) for name, policy in layered for cut in policy.cuts}
    for part in plan.parts if not plan.is_off else ():
        lines.append(f"{part.where}, in a scan of its own:" if (part.block, part.first) in cuts else f"{part.where}:")
        lines += _lines(part, plan)
    changes = render(beyond_table(plan)).splitlines() if plan.beyond else []
    lines += ["", next_gib(plan), *plan.notes, *changes]
    return "\n".join(lines)


def time_text(plan: PlanData, seconds: float | None) -> str:
    """An estimated time as text; a range if the estimate uses an assumed rate."""
    return format_estimate(seconds, bool(plan.assumed_rates))


def _over_everything(plan: PlanData) -> str:
    """The time difference from a step that keeps everything, as text. It may be negative: keeping residuals takes time."""
    extra = plan.seconds - plan.base_seconds
    share = f" ({100 * abs(extra) / plan.base_seconds:.2g} %)" if plan.base_seconds else ""
    return f"{time_text(plan, abs(extra))} {'over' if extra >= 0 else 'less than'} keeping everything{share}"


def next_gib(plan: PlanData) -> str:
    """The gain from more memory, as a sentence."""
    more = f"{format_bytes(plan.next_bytes)} more".replace(".0 ", " ")
    if plan.next_gib_seconds is None and plan.cut_short:
        return f"The search ended early: what {more} would gain is not known."
    if plan.next_gib_seconds is None:
        return "More memory would not make the step faster, by the estimate."
    if not plan.next_gib_seconds:
        return f"{more} would not make the step faster: the next faster step needs more than that."
    share = 100 * plan.next_gib_seconds / plan.seconds if plan.seconds else 0.0
    if share < 0.1:
        return f"{more} would save less than 0.1 % of a step, by the estimate."
    return f"{more} would save {time_text(plan, plan.next_gib_seconds)} a step ({share:.2g} %), by the estimate."


def ranked(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Rows in reading order: saved, offloaded, recomputed; the largest first within each action."""
    order = ("save", "offload", "recompute")
    return sorted(rows, key=lambda row: (order.index(row.action), -row.bytes, row.residual))


def _lines(part: Part, plan: PlanData) -> list[str]:
    """One line per large residual, and one line per action for all small residuals."""
    least = _SMALL * max((row.bytes for row in part.rows), default=0)
    lines, small = [], dict[str, list[LayerRow]]()
    for row in ranked(part.rows):
        if row.bytes < least:
            small.setdefault(row.action, []).append(row)
        else:
            lines.append(f"  {row.action:<9} {row.residual}, {format_bytes(row.bytes)}: {_why(row, part, plan)}")
    for action, rows in small.items():
        count = f"{len(rows)} small residual{'s' * (len(rows) > 1)}"
        lines.append(f"  {action:<9} {count}, {format_bytes(sum(row.bytes for row in rows))} together")
    return lines


def _what(part: Part) -> str:
    """The named policy of a run of layers, or the largest residuals that it saves and offloads."""
    if part.policy in NAMED:
        return part.policy
    texts = []
    for action in ("save", "offload"):
        names = [row.residual for row in ranked(part.rows) if row.action == action]
        if names:
            more = f" and {len(names) - _SHORT} more" if len(names) > _SHORT else ""
            texts.append(f"{action}: {', '.join(names[:_SHORT])}{more}")
    return "; ".join(texts) or part.policy


def _why(row: LayerRow, part: Part, plan: PlanData) -> str:
    price = "it cannot be recomputed" if row.seconds is None else f"recomputing it takes {_price(row, plan)}"
    if row.action != "offload":
        return price
    compute = f"{price}; the layer's compute ({time_text(plan, part.forward_seconds)} forward)"
    if not part.copy_seconds:
        return f"{compute} hides the copies"
    return f"{compute} does not hide {time_text(plan, part.copy_seconds)} of the copies"


def _price(row: LayerRow, plan: PlanData) -> str:
    if not row.seconds:
        return "no extra time"
    per_gib = f", {time_text(plan, row.seconds * GIB / row.bytes)} for each GiB" if row.bytes else ""
    return f"{time_text(plan, row.seconds)}{per_gib}"


def _verdict(plan: PlanData, point: Point) -> str:
    if point.remark:
        return point.remark
    if point.device_bytes is None:
        return "not compiled"
    return {"device": "too large", "host": "too much host memory"}.get(over_budget(plan, point), "fits")


def _by_time(point: Point) -> tuple[float, float]:
    """A sort key: the fastest first, on ties the smallest; unknown values last."""
    seconds, size = point.seconds, point.device_bytes
    return math.inf if seconds is None else seconds, math.inf if size is None else size


def _named_row(point: Point, plan: PlanData, verdict: str) -> tuple[Any, ...]:
    how = "" if point.device_bytes is None else "compiled" if point.compiled else "predicted"
    time = "" if point.seconds is None else "compiled" if point.timed else "traced"
    extra = None if point.seconds is None else point.seconds - plan.base_seconds
    sizes = format_bytes(point.device_bytes), how, format_bytes(point.host_bytes)
    return point.name, *sizes, time_text(plan, point.seconds), time, signed(plan, extra), verdict


def signed(plan: PlanData, extra: float | None, below: str = "less") -> str:
    """`format_difference` of times of a plan."""
    return format_difference(extra, bool(plan.assumed_rates), below)
