"""The HTML page of a comparison: a verdict, checks, a table that sorts and filters, a tree of modules, bars of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from remat_jax.parity.report_data import MemoryRow, ParityData, TensorRow, differs, relative, shape_text, unseen
from remat_jax.report.document import document, escaped
from remat_jax.report.html_parts import Cell, Column, html_table, stacked_bars, state
from remat_jax.report.tables import format_bytes, format_error

_ON_HOST = "on the host"


@dataclass
class TreeNode:
    """A node of the tree: its name, the text beside it, whether it passed, a mark, and its children."""

    name: str
    text: str = ""
    passed: bool = True
    mark: str = ""
    children: dict[str, TreeNode] = field(default_factory=dict)


def page(report: ParityData) -> str:
    """The page as text."""
    return document(f"Parity: {report.torch} (PyTorch) and {report.flax} (Flax)", body(report))


def body(report: ParityData, level: int = 2) -> str:
    """The page below its title; `level` is the level of the headings."""

    def section(heading: str, content: str) -> str:
        return f"<h{level}>{escaped(heading)}</h{level}>{content}" if content else ""

    sources = [f"{row.mode}, {row.framework}: {row.peak_from}" for row in report.memory if row.peak_from]
    details = {
        "Source of the peaks": "\n".join(sources),
        "Kept by only one framework": _alone(report),
        "Modules that could not be observed": unseen(report.hidden) if report.hidden else "",
        "Settings that differ": "\n".join(f"{one['path'] or 'the whole model'}: {differs(one)}" for one in report.differences),
        "Weight map": report.rules,
    }
    hint = '<p class="hint">Modules that differ are opened; the first difference of each pass is marked.</p>'
    parts = [
        f'<p class="verdict {state(report.passed)}" role="status">{escaped(report.verdict())}</p>',
        section("Checks", _checks(report)),
        section("Tensors", _tensors(report)),
        section("Modules", f'{hint}<ul class="tree">{_list_item(module_tree(report))}</ul>'),
        section("Memory", _memory(report.memory) if report.memory else ""),
        *(section(heading, f"<pre>{escaped(text)}</pre>" if text else "") for heading, text in details.items()),
    ]
    return "".join(parts)


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
            mark = f"◀ first difference, {direction} ({format_error(relative(found))})"
            node.mark = f"{node.mark} {mark}".lstrip()
    return root


def _path(root: TreeNode, parts: Iterable[str]) -> list[TreeNode]:
    nodes = [root]
    for part in parts:
        nodes.append(nodes[-1].children.setdefault(part, TreeNode(part)))
    return nodes


def _list_item(node: TreeNode) -> str:
    mark = f' <strong class="mark">{escaped(node.mark)}</strong>' if node.mark else ""
    label = f'<span class="{state(node.passed)}">{escaped(node.name)}</span> <small>{escaped(node.text)}</small>{mark}'
    if not node.children:
        return f"<li>{label}</li>"
    opened = " open" if not node.passed or _marked(node) else ""
    inside = "".join(map(_list_item, node.children.values()))
    return f"<li><details{opened}><summary>{label}</summary><ul>{inside}</ul></details></li>"


def _marked(node: TreeNode) -> bool:
    return bool(node.mark) or any(map(_marked, node.children.values()))


def _checks(report: ParityData) -> str:
    columns = [Column(""), Column("check", "name"), Column("found")]
    rows = [["✓" if check.passed else "✗", check.name, check.found] for check in report.checks]
    return html_table(columns, rows, label="checks", sortable=False, passed=[check.passed for check in report.checks])


def _tensors(report: ParityData) -> str:
    dtypes = [dtype for dtype in report.dtypes if dtype != "float64"]
    columns = [Column("kind"), Column("tensor"), Column("in Flax"), Column("shape"), Column("norm", "error")]
    columns += [Column("float64 error", "error"), *(Column(f"{dtype} ratio", "ratio") for dtype in dtypes), Column("verdict")]
    ordered = sorted(report.rows, key=lambda row: row.passed)
    rows, passed = [_cells(row, dtypes) for row in ordered], [row.passed for row in ordered]
    return (
        '<p class="tools"><label>Filter <input id="filter" type="search" placeholder="part of a row"></label> '
        '<label><input id="failed" type="checkbox"> only what failed</label> '
        f'<output id="count">{len(rows)} of {len(rows)}</output></p>'
        f"{html_table(columns, rows, label='tensors', name='rows', passed=passed)}"
    )


def _cells(row: TensorRow, dtypes: Sequence[str]) -> list[Cell]:
    verdict = "; ".join(row.problems) if row.problems else "ok" if row.passed else "not compared"
    ratios = [row.ratio(dtype) for dtype in dtypes]
    return [row.kind, row.name, row.flax, shape_text(row.shape), row.norm, row.error, *ratios, verdict]


def _memory(rows: Sequence[MemoryRow]) -> str:
    kept, peaks = {}, {}
    for row in rows:
        name = f"{row.mode}, {row.framework}"
        kept[name] = {("residuals", "on the device"): row.device_bytes, ("residuals", _ON_HOST): row.host_bytes}
        if row.peak_bytes is not None:
            peaks[name] = {("peak", "of both passes"): row.peak_bytes}
    return (
        '<p class="hint">Residuals on the device and on the host, without parameters and inputs; the peak includes everything.'
        f"</p>{stacked_bars(kept, 'residuals', hatched={_ON_HOST: _ON_HOST})}{stacked_bars(peaks, 'peak memory')}"
    )


def _alone(report: ParityData) -> str:
    return "\n".join(
        f"{one.mode}: {one.framework} keeps {one.count} × {shape_text(one.shape)} of {one.name} on the {one.place}: "
        f"{format_bytes(one.bytes)}"
        for one in report.kept_alone
    )
