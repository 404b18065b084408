"""The HTML page of a plan with a slider along its frontier of memory and time, and a picture of the frontier."""

from __future__ import annotations

from collections.abc import Sequence

from remat_jax.planning.explain import beside_plan, next_gib, ranked, signed, summary, time_text
from remat_jax.planning.plan_data import Part, PlanData, Point, over_budget, plan_point
from remat_jax.report.chart import FrontierPoint, frontier_figure
from remat_jax.report.document import document, escaped
from remat_jax.report.html_parts import Cell, Column, Estimate, html_picture, html_table, stacked_bars
from remat_jax.report.svg import WIDTH, Picture
from remat_jax.report.tables import format_bytes

_COLUMNS = (
    Column("device", "bytes"),
    Column("host", "bytes"),
    Column("memory"),
    Column("step", "seconds"),
    Column("time"),
    Column("budget"),
)
_RESIDUAL_COLUMNS = (Column("residual", "name"), Column("action"), Column("of one layer", "bytes"), Column("recomputing it"))
_BUDGET = {"": "within", "device": "over", "host": "over on the host"}
_EXCESS = {"": "", "device": "; over the budget", "host": "; over the budget of host memory"}
_OFFLOADED = "in host memory"
_HINT = (
    "Points on the left need less memory, and lower points are faster. Filled points were compiled, hollow points are "
    "predicted, and labelled points are named policies. The ring is the plan; a dashed ring follows the slider and the arrow "
    "keys along the line."
)

_ALLOWED = (
    "A plan makes a change that is allowed (<code>allow=…</code>, <code>--allow</code>) if the step is then faster, or fits "
    "only then."
)
_UNUSABLE = " Grey diamonds are named policies that cannot be the plan; their tips say why."
_RANGES = (
    " Some rates of this hardware are assumed, so the tables give a range for each time; the picture shows the estimate in it."
)


def page(plan: PlanData) -> str:
    """The plan's page as HTML text."""
    return document(f"{plan.workload} on {plan.target}, within {format_bytes(plan.budget)}{plan.per_device}", body(plan))


def body(plan: PlanData, level: int = 2) -> str:
    """The page below its title, with headings of `level`. A script shows the elements of one `data-point` at a time."""
    hint = _HINT + _UNUSABLE * any(point.remark for point in _named(plan)) + _RANGES * bool(plan.assumed_rates)
    points = with_plan(plan)
    chosen = next(index for index, point in enumerate(points) if _is_plan(plan, point))
    label = "device memory against the estimated time of a step; the same figures are in the tables below"
    sentences = "".join(f"<p>{escaped(sentence)}</p>" for sentence in (summary(plan), next_gib(plan), *plan.notes))
    figures, layers = "", ""
    for index, point in enumerate(points):
        text = ("The plan: " if index == chosen else "") + _described(plan, point) + _EXCESS[over_budget(plan, point)]
        shown = f'data-point="{index}"' + " hidden" * (index != chosen)
        figures += f'<dl class="figures" {shown} data-says="{escaped(text)}">{_figures(plan, point)}</dl>'
        layers += f"<div {shown}>{_layers(plan, point.parts)}</div>"
    return f"""{sentences}
<h{level}>Memory against time</h{level}>
<p class="hint">{hint}</p>
<div id="frontier">{html_picture(lambda width: picture(plan, title="", width=width), label)}</div>
<div class="slide">
<label for="at">Way to run the step</label>
<input id="at" type="range" min="0" max="{len(points) - 1}" step="1" value="{chosen}">
<button id="back" type="button">the plan</button>
</div>
<p class="now" role="status" aria-live="polite"><output id="says" for="at"></output></p>
{figures}
<noscript><p>The slider needs JavaScript.</p></noscript>
<details><summary>The line as a table</summary>{_frontier_table(plan, points, chosen)}</details>
<h{level}>What each layer does</h{level}>
<div id="parts">{layers}</div>
<h{level}>The named policies</h{level}>
{_named_table(plan)}
{_beyond(plan, level)}"""


def picture(plan: PlanData, title: str | None = None, width: float = WIDTH) -> Picture:
    """The picture of memory against time, with the frontier, the named policies and the plan."""
    title = f"{plan.workload} on {plan.target}: one training step" if title is None else title
    frontier, named = ([_place(plan, point) for point in points] for points in (with_plan(plan), _named(plan)))
    chosen = FrontierPoint(plan.device_bytes, plan.seconds, True, "")
    return frontier_figure(frontier, named, chosen, plan.budget, title, width)


def with_plan(plan: PlanData) -> tuple[Point, ...]:
    """The points of the frontier and the plan, the smallest memory first."""
    frontier = tuple(filter(_has_place, plan.frontier))
    if any(_is_plan(plan, point) for point in frontier):
        return frontier
    return tuple(sorted((*frontier, plan_point(plan)), key=lambda point: (point.device_bytes or 0, point.seconds or 0.0)))


def _named(plan: PlanData) -> list[Point]:
    return list(filter(_has_place, plan.named))


def _has_place(point: Point) -> bool:
    return point.device_bytes is not None and point.seconds is not None


def _is_plan(plan: PlanData, point: Point) -> bool:
    return point.compiled and (point.device_bytes, point.seconds) == (plan.device_bytes, plan.seconds)


def _place(plan: PlanData, point: Point) -> FrontierPoint:
    remark = f"; {point.remark}" if point.remark else ""
    tooltip = (f"{point.name}: " if point.name else "") + _described(plan, point) + remark
    return FrontierPoint(point.device_bytes or 0, point.seconds or 0.0, point.compiled, tooltip, point.name, not point.remark)


def _described(plan: PlanData, point: Point) -> str:
    on_host = f", {format_bytes(point.host_bytes)} in host memory" if point.host_bytes else ""
    device = f"{format_bytes(point.device_bytes)} ({'compiled' if point.compiled else 'predicted'})"
    return f"{device}, {time_text(plan, point.seconds)} a step ({_timing(point)}){on_host}"


def _timing(point: Point) -> str:
    """Where a point's time comes from, as text."""
    return "compiled schedule" if point.timed else "traced program"


def _figures(plan: PlanData, point: Point) -> str:
    left = plan.budget - (point.device_bytes or 0)
    extra = (point.seconds or 0.0) - plan.base_seconds
    share = f" ({100 * abs(extra) / plan.base_seconds:.2g} %)" if plan.base_seconds else ""
    figures = {
        "device memory": format_bytes(point.device_bytes),
        "host memory": format_bytes(point.host_bytes),
        "estimated step": f"{time_text(plan, point.seconds)}, {_timing(point)}",
        "over keeping everything": signed(plan, extra) + share,
        "left of the budget" if left >= 0 else "over the budget": format_bytes(abs(left)),
    }
    return "".join(f"<div><dt>{name}</dt><dd>{escaped(text)}</dd></div>" for name, text in figures.items())


def _layers(plan: PlanData, parts: Sequence[Part]) -> str:
    bars = {
        part.where: {
            ("saved", "in device memory"): part.saved_bytes,
            ("offloaded", _OFFLOADED): part.offloaded_bytes,
            ("recomputed", "in the backward pass"): part.recomputed_bytes,
        }
        for part in parts
    }
    tables = "".join(_residuals(plan, part) for part in parts)
    return stacked_bars(bars, "residuals of the layers", hatched={_OFFLOADED: _OFFLOADED}) + tables


def _residuals(plan: PlanData, part: Part) -> str:
    saved, offloaded, recomputed = map(format_bytes, (part.saved_bytes, part.offloaded_bytes, part.recomputed_bytes))
    sizes = f"{saved} saved, {offloaded} offloaded, {recomputed} recomputed"
    costs = time_text(plan, part.layers * (part.recompute_seconds + part.copy_seconds))
    rows: list[list[Cell]] = [[row.residual, row.action, row.bytes, time_text(plan, row.seconds)] for row in ranked(part.rows)]
    return (
        f"<details><summary><b>{escaped(part.where)}</b> <small>{sizes}; takes {costs} more</small></summary>"
        f'<p class="hint">{escaped(part.policy)}</p>'
        f"{html_table(_RESIDUAL_COLUMNS, rows, label=f'residuals of {part.where}', sortable=False)}</details>"
    )


def _frontier_table(plan: PlanData, points: Sequence[Point], chosen: int) -> str:
    rows = [["the plan" if index == chosen else point.name, *_row(plan, point)] for index, point in enumerate(points)]
    return html_table([Column("policy", "name"), *_COLUMNS], rows, label="the frontier")


def _named_table(plan: PlanData) -> str:
    rows = [[point.name, *_row(plan, point)] for point in plan.named]
    return html_table([Column("policy", "name"), *_COLUMNS], rows, label="the named policies")


def _beyond(plan: PlanData, level: int) -> str:
    """The changes beyond the blocks, each as a plan, with a heading; empty if there is none to show."""
    if not plan.beyond:
        return ""
    columns = [Column("change", "name"), Column("device", "bytes"), Column("step", "seconds"), Column("figures")]
    columns += [Column("than this plan"), Column("remark")]
    rows: list[list[Cell]] = [
        [each.text, each.device_bytes, Estimate(each.seconds, bool(plan.assumed_rates)), *beside_plan(plan, each)]
        for each in plan.beyond
    ]
    label = "Changes beyond the blocks, each as a plan"
    return f"<h{level}>{label}</h{level}>\n<p>{_ALLOWED}</p>\n{html_table(columns, rows, label=label)}\n"


def _row(plan: PlanData, point: Point) -> list[Cell]:
    memory, time = "compiled" if point.compiled else "predicted", Estimate(point.seconds, bool(plan.assumed_rates))
    origin = "compiled" if point.timed else "traced"
    verdict = point.remark or _BUDGET[over_budget(plan, point)]
    if not _has_place(point):
        return [point.device_bytes, None, "", None, "", verdict]
    return [point.device_bytes, point.host_bytes, memory, time, origin, verdict]
