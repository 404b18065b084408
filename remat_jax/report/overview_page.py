"""One self-contained HTML page of a workload: policies, memory by module, the plan, parity. It loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat_jax.report import plan_page
from remat_jax.report.document import document, escaped
from remat_jax.report.html_bars import StackedBar, stacked_bars
from remat_jax.report.html_tables import Cell, Column, html_table
from remat_jax.report.page import page_body

OFFLOAD_COLUMNS = tuple(
    Column(title, style)
    for title, style in (
        ("policy", "name"),
        ("offered", "bytes"),
        ("in host memory", "bytes"),
        ("device memory freed", "bytes"),
        ("copies that compute hides", "text"),
    )
)
_COLOURS = {
    "parameters": "g0",
    "frozen parameters": "g1",
    "optimizer state": "g2",
    "batch": "g3",
    "arguments and results": "g2",
    "other modules": "o0",
    "of no module": "o1",
}


@dataclass(frozen=True)
class Modules:
    """Memory by module: the bars, a description of them, the striped kind, and a hint how to read them."""

    stacks: Sequence[StackedBar]
    label: str
    striped: str
    hint: str


@dataclass(frozen=True)
class Trouble:
    """A finding: its name, its policies, its place, the problem, and the remedy."""

    name: str
    under: str
    where: str
    problem: str
    remedy: str = ""


@dataclass(frozen=True)
class Overview:
    """The content of the page, as texts or as figures in bytes and seconds.

    Attributes:
      title: the page's title.
      short: a summary in sentences.
      facts: the workload as pairs of a name and a text.
      columns, rows: the table of the compared policies.
      device, host: a bar for each policy in device and in host memory; `limit` is drawn across the device bars.
      notes: further notes on the policies.
      offload: rows of `OFFLOAD_COLUMNS`; `warnings` are offloads that did not happen as requested.
      findings: the traps.
      modules: memory by module; None if unknown, with the reason in `notes`.
      plan: the data for `plan_page`; `explanation` has its reasons.
      parity: the verdict, whether it passed, and the arguments of `page_body`.
      footer: how the figures were made.
    """

    title: str
    short: Sequence[str]
    facts: Sequence[tuple[str, str]]
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    device: Sequence[StackedBar]
    host: Sequence[StackedBar]
    limit: tuple[str, int] | None = None
    notes: Sequence[str] = ()
    offload: Sequence[Sequence[Cell]] = ()
    warnings: Sequence[Trouble] = ()
    findings: Sequence[Trouble] = ()
    modules: Modules | None = None
    plan: Mapping[str, Any] | None = None
    explanation: str = ""
    parity: tuple[str, bool, Mapping[str, Any]] | None = None
    footer: Sequence[str] = field(default_factory=tuple)


def overview_page(page: Overview) -> str:
    """The page as text.

    >>> stack = StackedBar("full", {("temp", "on the device"): 1024})
    >>> rows = [["full", 1024]]
    >>> text = overview_page(Overview("t", ["s"], [], [Column("policy", "name"), Column("device", "bytes")], rows, [stack], []))
    >>> "http" in text, "</th><td" in text, '<section id="policies"' in text, "<section id=" + '"plan"' in text
    (False, True, True, False)
    """
    sections = {
        "policies": ("Policies compared", _policies(page)),
        "modules": ("Memory by module", _modules(page.modules)),
        "plan": ("The plan", _plan(page)),
        "parity": ("Parity with PyTorch", _parity(page.parity)),
        "workload": ("What was measured", _facts(page)),
    }
    present = {name: entry for name, entry in sections.items() if entry[1]}
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, (heading, _) in present.items())
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-head"><h2 id="{name}-head">{heading}</h2>{text}</section>'
        for name, (heading, text) in present.items()
    )
    short = f'<div class="short"><ul>{"".join(f"<li>{escaped(sentence)}</li>" for sentence in page.short)}</ul></div>'
    footer = "".join(f"<p>{escaped(sentence)}</p>" for sentence in page.footer)
    scripts = plan_page.SCRIPTS if page.plan is not None else ("tables.js",)
    return document(
        page.title,
        f'<nav aria-label="sections"><ul>{links}</ul></nav>{short}{body}<footer>{footer}</footer>',
        styles=(*plan_page.STYLES, "overview_page.css"),
        scripts=scripts,
        data=page.plan,
    )


def _policies(page: Overview) -> str:
    parts = [
        html_table(page.columns, [(True, row) for row in page.rows], label="policies compared", name="policies-table"),
        *(f'<p class="hint">{escaped(note)}</p>' for note in page.notes),
        "<h3>Device memory</h3>",
        stacked_bars(page.device, label="device memory by policy", limit=page.limit, colours=_COLOURS),
    ]
    if page.host:
        parts += ["<h3>Host memory</h3>", stacked_bars(page.host, label="host memory by policy")]
    if page.offload:
        rows = [(True, row) for row in page.offload]
        parts += ["<h3>Effect of offload</h3>", html_table(OFFLOAD_COLUMNS, rows, label="offload", sortable=False)]
        parts.append(_troubles(page.warnings))
    none = "<p>No known trap was found under any of these policies.</p>"
    parts += ["<h3>Traps</h3>", _troubles(page.findings) or none]
    return "".join(parts)


def _troubles(troubles: Sequence[Trouble]) -> str:
    entries = []
    for trouble in troubles:
        where = f" ({escaped(trouble.where)})" if trouble.where else ""
        remedy = f"<p>Remedy: {escaped(trouble.remedy)}</p>" if trouble.remedy else ""
        entries.append(
            f"<li><p><strong>{escaped(trouble.name)}</strong> under {escaped(trouble.under)}{where}</p>"
            f"<p>{escaped(trouble.problem)}</p>{remedy}</li>"
        )
    return f'<ul class="findings">{"".join(entries)}</ul>' if entries else ""


def _modules(modules: Modules | None) -> str:
    if modules is None:
        return ""
    bars = stacked_bars(modules.stacks, label=modules.label, striped=modules.striped, colours=_COLOURS)
    return f'<p class="hint">{escaped(modules.hint)}</p>{bars}'


def _plan(page: Overview) -> str:
    if page.plan is None:
        return ""
    why = f"<details><summary>Why each residual is where it is</summary><pre>{escaped(page.explanation)}</pre></details>"
    return plan_page.plan_body(page.plan, level=3) + (why if page.explanation else "")


def _parity(parity: tuple[str, bool, Mapping[str, Any]] | None) -> str:
    return page_body(parity[0], parity[1], level=3, **parity[2]) if parity is not None else ""


def _facts(page: Overview) -> str:
    entries = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>" for name, text in page.facts)
    return f'<dl class="facts">{entries}</dl>'
