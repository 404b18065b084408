"""The report of a comparison, printed as tables and written as an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group

from remat_jax.parity.report_data import (
    Check,
    KeptAlone,
    MemoryRow,
    TensorRow,
    difference_text,
    divergence_text,
    hidden_text,
    module_name,
    shape_text,
)
from remat_jax.parity.rule import relative_error
from remat_jax.report.document import document, escaped, write_whole
from remat_jax.report.html_parts import Cell, Column, html_table, stacked_bars, state
from remat_jax.report.tables import format_bytes, format_error, format_ratio, render, table

_SHOWN, _SHOWN_ALONE = 60, 6
"""The largest number of printed rows: of tensors, and of unpaired residuals per mode. `to_dict` and the page have all rows."""

_NAMED = 4
"""The largest number of texts about an unusual map in the verdict."""


@dataclass(frozen=True)
class ParityReport:
    """The result of `compare`.

    Attributes:
        rows: a row for each output, gradient (of a parameter or an input), written variable and update of a parameter.
        checks: the precision of both frameworks, the modes of PyTorch, the planted faults, the training run, …
        memory: residual bytes and peak memory of both frameworks in every mode.
        kept_alone: the residuals that only one framework saves; every other residual has a counterpart of equal size.
        divergences: `forward` and `backward` → the first module that differs, or None. The dict is empty if every row passes; a
            failed `update` row does not count.
        hidden: Flax modules whose arrays cannot be captured, such as modules in a `while` loop; `divergences` cannot name these
            modules. Empty if `divergences` is empty.
        differences: the settings in which the models differ, such as an epsilon; they do not fail the report by themselves.
        torch, flax: the names of the compared models.
        rules: the weight map, as text.
        weight_map: `given`; `proven`; `not proven` (no map makes the models agree, and `rules` is the map that names suggest);
            `crosses names` (the models agree only if equal names are exchanged, and `rules` is the map of equal names); or
            `unlike siblings` (the models agree only if a weight is transformed unlike its siblings, such as a kernel that is
            not transposed, and `rules` is the map without this exception).
        crossed: the groups of modules with exchanged names, such as "gate and up".
        unlike: a text for each weight that is transformed unlike its siblings.
        modes, dtypes, optimizer: the arguments of the comparison.

    >>> from remat_jax.parity.report_data import Check, TensorRow
    >>> row = TensorRow("output", "logits", errors={"off": 3e-16})
    >>> checks = (Check("planted faults", passed=True, found="12 of 12 were found"),)
    >>> ParityReport((row,), checks, (), "Net", "Net", "", ("off",), ("float64",)).passed
    True
    >>> ParityReport((), checks, (), "Net", "Net", "", ("off",), ("float64",)).passed  # nothing was compared
    False
    """

    rows: tuple[TensorRow, ...]
    checks: tuple[Check, ...]
    memory: tuple[MemoryRow, ...]
    torch: str
    flax: str
    rules: str
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    optimizer: str | None = None
    divergences: dict[str, Any] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    differences: tuple[dict[str, Any], ...] = ()
    kept_alone: tuple[KeptAlone, ...] = ()
    weight_map: str = "given"
    crossed: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there are rows, and every row and every check passes."""
        return bool(self.rows) and all(row.passed for row in self.rows) and all(check.passed for check in self.checks)

    @property
    def proves(self) -> bool:
        """Whether the planted faults were detected; if not, the other results prove nothing."""
        planted = [check.passed for check in self.checks if check.name.startswith("planted")]
        return bool(planted) and all(planted)

    @property
    def failed_rows(self) -> tuple[TensorRow, ...]:
        """The rows that fail."""
        return tuple(row for row in self.rows if not row.passed)

    def verdict(self) -> str:
        """One sentence: whether the comparison passed, and if not, why."""
        if self.passed:
            return f"PASSED: {self.flax} computes what {self.torch} computes, {len(self.rows)} tensors"
        checks = [check.name for check in self.checks if not check.passed and check.name != "weight map"]
        wrong = f"{len(self.failed_rows)} of {len(self.rows)} tensors" if self.failed_rows else ""
        if not self.proves:
            others = [name for name in checks if not name.startswith("planted")]
            see = f"; see {', '.join(others)}" if others else ""
            wrong = f"a planted fault was not found, so this comparison proves nothing{see}"
        elif checks:
            wrong = ", ".join(filter(None, (wrong, *checks)))
        return f"NOT PASSED: {': '.join(filter(None, (self._map_text(), wrong or 'all tensors agree')))}"

    def _map_text(self) -> str:
        """What is wrong with the weight map; "" if nothing is."""
        for unusual, texts, exception, usual in (
            ("crosses names", self.crossed, "equal names are exchanged", "map of equal names"),
            ("unlike siblings", self.unlike, "weights are transformed unlike their siblings", "map without this exception"),
        ):
            if self.weight_map == unusual:
                shown = ", ".join(texts[:_NAMED]) + (", …" if len(texts) > _NAMED else "")
                return f"the models agree only if {exception} ({shown}); under the {usual}"
        return "the weight map is not proven; under the map that names suggest" if self.weight_map == "not proven" else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        summary = {"passed": self.passed, "proves": self.proves, "verdict": self.verdict()}
        data = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {**summary, **data, "rows": [row.to_dict() for row in self.rows]}

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page with a sortable table of tensors, the tree of modules, and memory bars."""
        return write_whole(path, page(self))

    def __rich__(self) -> Any:
        checks = [(check.name, "ok" if check.passed else "FAILED", check.found) for check in self.checks]
        parts: list[Any] = [table(f"{self.torch} (PyTorch) and {self.flax} (Flax)", ("check", "", "found"), checks)]
        if self.differences:
            cells = [(module_name(each["path"]), each["what"], each["torch"], each["flax"]) for each in self.differences]
            parts.append(table("Settings that differ", ("module", "setting", "in PyTorch", "in Flax"), cells))
        parts.append(_rows_table(self))
        if self.memory:
            columns = ("mode", "framework", "kept: device", "kept: host", "peak", "source of the peak")
            title, formats = "Memory: residuals, and the peak of both passes", dict.fromkeys(columns[2:5], format_bytes)
            parts.append(table(title, columns, [astuple(row) for row in self.memory], formats=formats))
        if self.kept_alone:
            parts.append(_alone_table(self))
        parts += [divergence_text(direction, first) for direction, first in self.divergences.items() if first]
        parts += [hidden_text(self.hidden)] if self.hidden else []
        return Group(*parts, self.verdict())

    def __str__(self) -> str:
        return render(self)


def _rows_table(report: ParityReport) -> Any:
    """The rows as a table, worst first, at most `_SHOWN` of them."""
    dtypes = _working_dtypes(report)

    def figures(row: TensorRow) -> float:
        return max((row.error or 0.0) * 1e12, *(row.ratio(dtype) or 0.0 for dtype in dtypes), 0.0)

    ordered = sorted(report.rows, key=lambda row: (row.passed, -figures(row)))
    shown, hidden = ordered[:_SHOWN], ordered[_SHOWN:]
    cells = [(row.kind, row.name, row.shape, row.error, *map(row.ratio, dtypes), _verdict(row)) for row in shown]
    ratios = [f"{dtype} ratio" for dtype in dtypes]
    columns = ("kind", "tensor", "shape", "float64 error", *ratios, "verdict")
    formats: dict[str, Callable[[Any], str]] = {"shape": shape_text, "float64 error": format_error}
    formats |= dict.fromkeys(ratios, format_ratio)
    passed = ", all passed" if all(row.passed for row in hidden) else ""
    rest = f"and {len(hidden)} more{passed}" if hidden else None
    return table("Tensors, worst first", columns, cells, formats=formats, caption=rest)


def _working_dtypes(report: ParityReport) -> list[str]:
    return [dtype for dtype in report.dtypes if dtype != "float64"]


def _verdict(row: TensorRow) -> str:
    more = f" (and {len(row.problems) - 1} more)" if len(row.problems) > 1 else ""
    return f"{row.problems[0]}{more}" if row.problems else "ok" if row.passed else "not compared"


def _alone_table(report: ParityReport) -> Any:
    columns = ("mode", "saved by", "where", "computed by", "shape", "arrays", "size")
    by_mode = [[arrays for arrays in report.kept_alone if arrays.mode == mode] for mode in report.modes]
    cells = [astuple(arrays) for of_mode in by_mode for arrays in of_mode[:_SHOWN_ALONE]]
    hidden = [arrays.bytes for of_mode in by_mode for arrays in of_mode[_SHOWN_ALONE:]]
    rest = f"and {len(hidden)} more, {format_bytes(sum(hidden))}" if hidden else None
    title = "Kept by only one framework; all other residuals are equal to the byte"
    return table(title, columns, cells, formats={"shape": shape_text, "size": format_bytes}, caption=rest)


# The page.


@dataclass
class TreeNode:
    """A node of the tree of modules: its name, the text and the mark after the name, whether it passed, and its children."""

    name: str
    text: str = ""
    passed: bool = True
    mark: str = ""
    children: dict[str, TreeNode] = field(default_factory=dict)


def page(report: ParityReport) -> str:
    """The page as text."""
    return document(f"Parity: {report.torch} (PyTorch) and {report.flax} (Flax)", page_body(report))


def page_body(report: ParityReport, level: int = 2) -> str:
    """The page below its title; `level` is the level of the headings."""

    def section(heading: str, content: str) -> str:
        return f"<h{level}>{escaped(heading)}</h{level}>{content}" if content else ""

    sources = [f"{row.mode}, {row.framework}: {row.peak_from}" for row in report.memory if row.peak_from]
    details = {
        "Source of the peaks": "\n".join(sources),
        "Kept by only one framework": "\n".join(map(_alone, report.kept_alone)),
        "Modules that could not be observed": hidden_text(report.hidden) if report.hidden else "",
        "Settings that differ": "\n".join(map(difference_text, report.differences)),
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


def module_tree(report: ParityReport) -> TreeNode:
    """The PyTorch modules as a tree, with the errors of the parameters' gradients and the first difference of each pass."""
    root = TreeNode(report.torch, "the whole model")
    for row in report.rows:
        if row.kind == "gradient" and not row.name.startswith("input:"):
            nodes = _path(root, row.name.split("."))
            nodes[-1].text = f"gradient {format_error(row.error)}" if row.error is not None else ""
            for node in nodes:
                node.passed &= row.passed
    for direction, first in report.divergences.items():
        if first:
            node = _path(root, filter(None, first["torch_path"].replace("/", ".").split(".")))[-1]
            error = format_error(relative_error(first["error"], first["reference"]))
            mark = f"◀ first difference, {direction} ({error})"
            node.mark = f"{node.mark} {mark}".lstrip()
    return root


def _path(root: TreeNode, parts: Iterable[str]) -> list[TreeNode]:
    """The nodes on a path from the root; missing nodes are added."""
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


def _checks(report: ParityReport) -> str:
    columns = [Column(""), Column("check", "name"), Column("found")]
    rows = [["✓" if check.passed else "✗", check.name, check.found] for check in report.checks]
    return html_table(columns, rows, label="checks", sortable=False, passed=[check.passed for check in report.checks])


def _tensors(report: ParityReport) -> str:
    dtypes = _working_dtypes(report)
    columns = [Column("kind"), Column("tensor"), Column("in Flax"), Column("shape"), Column("norm", "error")]
    columns += [Column("float64 error", "error"), *(Column(f"{dtype} ratio", "ratio") for dtype in dtypes), Column("verdict")]
    ordered = sorted(report.rows, key=lambda row: row.passed)
    rows: list[list[Cell]] = []
    for row in ordered:
        verdict = "; ".join(row.problems) or ("ok" if row.passed else "not compared")
        figures = row.norm, row.error, *map(row.ratio, dtypes)
        rows.append([row.kind, row.name, row.flax, shape_text(row.shape), *figures, verdict])
    passed = [row.passed for row in ordered]
    return (
        '<p class="tools"><label>Filter <input id="filter" type="search" placeholder="part of a row"></label> '
        '<label><input id="failed" type="checkbox"> only what failed</label> '
        f'<output id="count">{len(rows)} of {len(rows)}</output></p>'
        f"{html_table(columns, rows, label='tensors', name='rows', passed=passed)}"
    )


def _memory(rows: Sequence[MemoryRow]) -> str:
    kept, peaks = {}, {}
    for row in rows:
        name = f"{row.mode}, {row.framework}"
        kept[name] = {("residuals", "on the device"): row.device_bytes, ("residuals", "on the host"): row.host_bytes}
        if row.peak_bytes is not None:
            peaks[name] = {("peak", "of both passes"): row.peak_bytes}
    return (
        '<p class="hint">Residuals on the device and on the host, without parameters and inputs; the peak includes parameters, '
        "inputs and gradients, but no optimizer."
        f"</p>{stacked_bars(kept, 'residuals', hatched={'on the host': 'on the host'})}{stacked_bars(peaks, 'peak memory')}"
    )


def _alone(arrays: KeptAlone) -> str:
    shapes = f"{arrays.count} × {shape_text(arrays.shape)} of {arrays.name}"
    return f"{arrays.mode}: {arrays.framework} keeps {shapes} on the {arrays.place}: {format_bytes(arrays.bytes)}"
