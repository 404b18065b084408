"""One self-contained HTML page of a plan: memory against time, with a slider along the frontier. It loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_jax.report.document import asset, document, escaped
from remat_jax.report.html_tables import Column, html_table

STYLES, SCRIPTS = ("plan_page.css",), ("tables.js", "plan_page.js")
"""The files that `plan_body` needs; the document's data must be the plan's."""


def plan_page(data: Mapping[str, Any]) -> str:
    """The page as text.

    `data` has `title`; `summary`, sentences; `budget` in bytes; `host_budget`, None without a limit; `base_seconds`; `points`
    along the frontier with `device`, `host`, `seconds`, `compiled`, `says`, `figures` (pairs of a name and a text) and `parts`;
    `chosen`, the index of the plan in `points`; and `named`, points with a `name`. A part has `where`, `policy`, `costs`,
    `bytes` and `texts` by action, and `rows` of (residual, action, size, seconds).

    >>> point = {"device": 1, "host": 0, "seconds": 1.0, "compiled": True, "says": "</script>", "figures": [], "parts": []}
    >>> rest = {"title": "t", "summary": [], "budget": 1, "host_budget": None, "base_seconds": 1.0, "chosen": 0, "named": []}
    >>> text = plan_page({**rest, "points": [point]})
    >>> text.count("</script>"), "http" in text
    (2, False)
    """
    return document(str(data["title"]), plan_body(data), styles=STYLES, scripts=SCRIPTS, data=data)


def plan_body(data: Mapping[str, Any], level: int = 2) -> str:
    """The page below the title, for the same data; `level` is the level of the headings."""
    summary = "".join(f"<p>{escaped(sentence)}</p>" for sentence in data["summary"])
    body = asset("plan_page.html").replace("h2>", f"h{level}>")
    return summary + body.replace("<!-- points -->", _points(data)).replace("<!-- named -->", _named(data))


def _points(data: Mapping[str, Any]) -> str:
    columns = [Column("device", "bytes"), Column("host", "bytes"), Column("step", "seconds"), Column("known"), Column("budget")]
    rows = []
    for index, point in enumerate(data["points"]):
        provenance = "compiled" if point["compiled"] else "predicted"
        shown = f"{provenance}, the plan" if index == data["chosen"] else provenance
        rows.append((True, [point["device"], point["host"], point["seconds"], shown, _within(point, data)]))
    return html_table(columns, rows, label="the frontier", name="points")


def _named(data: Mapping[str, Any]) -> str:
    columns = [Column("policy", "name"), Column("device", "bytes"), Column("host", "bytes"), Column("step", "seconds")]
    rows = [
        (
            True,
            [
                point["name"],
                point["device"],
                point["host"],
                point["seconds"],
                "compiled" if point["compiled"] else "predicted",
                _within(point, data),
            ],
        )
        for point in data["named"]
    ]
    return html_table([*columns, Column("known"), Column("budget")], rows, label="the named policies", name="named")


def _within(point: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if point["device"] > data["budget"]:
        return "over"
    host = data["host_budget"]
    return "within" if host is None or point["host"] <= host else "over on the host"
