"""The HTML page of a report, with its rows as a table and as a tree of modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from remat_jax.parity.report_data import ParityData, TensorRow, differs, relative, shape_text, unseen
from remat_jax.report.html_tables import Column
from remat_jax.report.page import Bar, TreeNode, html_page
from remat_jax.report.tables import format_bytes, format_error


def page(report: ParityData) -> str:
    """The page as text."""
    title = f"Parity: {report.torch} (PyTorch) and {report.flax} (Flax)"
    return html_page(title, report.verdict(), report.passed, **evidence(report))


def evidence(report: ParityData) -> dict[str, Any]:
    """The page's content below the verdict, as plain data."""
    dtypes = [dtype for dtype in report.dtypes if dtype != "float64"]
    columns = [Column("kind"), Column("tensor"), Column("in Flax"), Column("shape"), Column("norm", "error")]
    columns += [Column("float64 error", "error"), *(Column(f"{dtype} ratio", "ratio") for dtype in dtypes), Column("verdict")]
    return {
        "checks": [(check.name, check.passed, check.found) for check in report.checks],
        "tree": module_tree(report),
        "columns": columns,
        "rows": [(row.passed, _cells(row, dtypes)) for row in sorted(report.rows, key=lambda row: row.passed)],
        "bars": [Bar(row.framework, row.mode, _parts(row)) for row in report.memory],
        "details": {
            "Source of the peaks": "\n".join(
                f"{row.mode}, {row.framework}: {row.peak_from}" for row in report.memory if row.peak_from
            ),
            "Kept by only one framework": _alone(report),
            "Modules that could not be observed": unseen(report.hidden) if report.hidden else "",
            "Settings that differ": _differences(report.differences),
            "Weight map": report.rules,
        },
    }


def module_tree(report: ParityData) -> TreeNode:
    """The PyTorch modules as a tree: parameters with their figures, and a mark at the first difference of each pass."""
    root = TreeNode(report.torch, "the whole model")
    for row in report.rows:
        if row.kind == "gradient" and not row.name.startswith("input:"):
            nodes = _path(root, row.name.split("."))
            nodes[-1].text = f"gradient {format_error(row.error)}" if row.error is not None else ""
            for node in nodes:
                node.passed &= row.passed
    for direction, found in report.divergences.items():
        if found:
            node = _path(root, [part for part in found["torch_path"].replace("/", ".").split(".") if part])[-1]
            node.mark = " ".join(
                filter(None, (node.mark, f"◀ first difference, {direction} ({format_error(relative(found))})"))
            )
    return root


def _path(root: TreeNode, parts: Iterable[str]) -> list[TreeNode]:
    nodes = [root]
    for part in parts:
        nodes.append(nodes[-1].children.setdefault(part, TreeNode(part)))
    return nodes


def _cells(row: TensorRow, dtypes: list[str]) -> list[Any]:
    verdict = "; ".join(row.problems) if row.problems else "ok" if row.passed else "not compared"
    return [
        row.kind,
        row.name,
        row.flax,
        shape_text(row.shape),
        row.norm,
        row.error,
        *(row.ratio(dtype) for dtype in dtypes),
        verdict,
    ]


def _parts(row: Any) -> dict[str, int | None]:
    return {"device": row.device_bytes, "host": row.host_bytes, "peak": row.peak_bytes}


def _alone(report: ParityData) -> str:
    return "\n".join(
        f"{one.mode}: {one.framework} keeps {one.count} × {shape_text(one.shape)} of {one.name} on the {one.place}: "
        f"{format_bytes(one.bytes)}"
        for one in report.kept_alone
    )


def _differences(differences: Iterable[dict[str, Any]]) -> str:
    return "\n".join(f"{one['path'] or 'the whole model'}: {differs(one)}" for one in differences)
