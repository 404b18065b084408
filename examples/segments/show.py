"""The experiment for people: tables, their meaning in words, and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from remat_jax.report import format_bytes, format_error, format_ratio, table
from remat_jax.report.chart import Panel, Series, chart
from remat_jax.report.svg import BLUE, GREEN, INK, ORANGE, PURPLE, SHAPES, SKY, VERMILLION
from remat_jax.report.tables import byte_unit, scaled_bytes

from ..pictures import demo_pictures
from .setting import Row, Setting

COLOURS = (INK, VERMILLION, BLUE, GREEN, ORANGE, PURPLE, SKY)
PEAKS = {"PyTorch": "torch", "JAX Linen": "h200"}
COLUMNS = (
    "form, segments",
    "kept",
    "peak",
    "layer\nruns",
    "matmuls",
    "step\ntime",
    "memory\nsaved",
    "time\nadded",
    "saved ÷\nadded",
    "gradient\nerror",
    "closed\nforms",
)
LEGEND = (
    "Kept: from the forward to the backward pass, parameters and batch left out. Peak: of a step that ends with the gradients; "
    "PyTorch tracked on fake tensors, JAX compiled for an H200, parameters and gradients included. Step time: the median of "
    "interleaved rounds, relative to plain in the same run; it varies, the matmuls do not. Memory saved: share of plain's "
    "kept bytes. Saved ÷ added: that share, divided by the added share of step time. Gradient error: in float64, against "
    "PyTorch plain. Closed forms: whether kept bytes, layer runs and matmuls (PyTorch's peak too) equal them exactly."
)


def report(setting: Setting, found: dict[str, Any], pictures: list[str], wrong: list[str]) -> list[Any]:
    """The whole printed output, in order."""
    parts: list[Any] = [*(_of_framework(setting, found["rows"], name) for name in PEAKS), LEGEND, ""]
    parts += [_depths(found["depths"]), _rules(found["rules"]), *(f"• {sentence}" for sentence in reading(found)), ""]
    if pictures:
        parts.append(f"Pictures in {Path(pictures[0]).parent}: {', '.join(Path(one).name for one in pictures)}")
    parts += [f"NOT EQUAL to the closed form: {one}" for one in wrong]
    parts.append("NOT PASSED" if wrong else "PASSED")
    return parts


def saved_share(row: Row, plain: Row) -> float:
    """The share of plain's kept bytes that a form does not keep."""
    return 1 - row.saved_bytes / plain.saved_bytes


def trade_off(row: Row, plain: Row) -> float | None:
    """The saved share of kept bytes divided by the added share of step time; None for a form that costs no time or saves
    nothing.
    """
    if row.relative_time is None:
        return None
    added, saved = row.relative_time - 1, saved_share(row, plain)
    return saved / added if added > 0 and saved > 0 else None


def _of_framework(setting: Setting, rows: list[Row], framework: str) -> Table:
    its_rows = [row for row in rows if row.framework == framework]
    plain = next(row for row in its_rows if row.form == "plain")
    unit = byte_unit(max(max(row.saved_bytes, row.peak_bytes or 0) for row in its_rows))
    cells = []
    for row in its_rows:
        ratio = trade_off(row, plain)
        cells.append(
            (
                row.form,
                format_bytes(row.saved_bytes, unit),
                None if row.peak_bytes is None else format_bytes(row.peak_bytes, unit),
                row.executions,
                row.matmuls,
                format_ratio(row.relative_time),
                f"{saved_share(row, plain):.1%}",
                None if row.relative_time is None else f"{row.relative_time - 1:.1%}",
                None if ratio is None else f"{ratio:.1f}",
                format_error(row.gradient_error),
                "NO" if row.wrong else "equal",
            )
        )
    title = f"{framework}: {setting.num_layers} layers of {setting.hidden_size}, batch {setting.batch}, float32"
    return _slim(table(title, COLUMNS, cells))


def _depths(depths: dict[int, Any]) -> Table:
    names = list(next(iter(depths.values())))
    unit = byte_unit(max(one["measured"] for forms in depths.values() for one in forms.values()))
    cells = [(depth, *(format_bytes(forms[name]["measured"], unit) for name in names)) for depth, forms in depths.items()]
    return _slim(
        table("Kept between the passes, measured", ["layers", *(name.replace(", ", ",\n", 1) for name in names)], cells)
    )


def _rules(rules: list[dict[str, float]]) -> Table:
    columns = ("layers", "saving,\n1 − √L/L", "saving,\nmeasured", "added work,\n2√L/L", "added work,\nmeasured")
    keys = ("claimed_saving", "measured_saving", "claimed_increase", "measured_increase")
    cells = [(rule["num_layers"], *(f"{rule[key]:.1%}" for key in keys)) for rule in rules]
    return _slim(table("The rules of thumb for √L segments, and PyTorch", columns, cells))


def reading(found: dict[str, Any]) -> list[str]:
    """The meaning of the figures in words."""
    rows, lines = found["rows"], []
    for framework in PEAKS:
        its_rows = [row for row in rows if row.framework == framework]
        plain = its_rows[0]
        best = min(its_rows, key=lambda row: row.saved_bytes)
        took = "" if best.relative_time is None else f", and a step takes {format_ratio(best.relative_time)} the time"
        lines.append(
            f"{framework}: {best.form} keeps least, {format_bytes(best.saved_bytes)} instead of "
            f"{format_bytes(plain.saved_bytes)}; it runs layers {best.executions} times instead of {plain.executions}{took}."
        )
    deepest = found["rules"][-1]
    lines.append(
        f"At {deepest['num_layers']} layers √L segments add {deepest['measured_increase']:.1%} to the work of a step: nearly "
        f"one forward pass, a third of a step. 2√L/L says {deepest['claimed_increase']:.1%}, and less at greater depth."
    )
    lines.append(
        f"They save {deepest['measured_saving']:.1%} of the kept bytes; 1 − √L/L says {deepest['claimed_saving']:.1%}, because "
        "it counts only the segments' inputs, and not the interior of the last segment, which has no checkpoint."
    )
    return lines


def pictures(setting: Setting, found: dict[str, Any], folder: Path) -> list[str]:
    """Draw memory, time, trade-off, depth and the rules, each as SVG in `folder`; returns the paths."""
    drawn = [
        {
            "framework": row.framework,
            "model": "DeepMLP",
            "mode": row.form,
            "residual_device_bytes": row.saved_bytes,
            "residual_host_bytes": 0,
            "peak_bytes": {PEAKS[row.framework]: row.peak_bytes},
            "relative_time": row.relative_time,
        }
        for row in found["rows"]
    ]
    paths = demo_pictures(drawn, folder)
    paths.append(chart(_depth_panels(found["depths"])).save(folder / "depth.svg"))
    return [*paths, chart(_rule_panels(found["rules"])).save(folder / "rules.svg")]


def _depth_panels(depths: dict[int, Any]) -> list[Panel]:
    names = list(next(iter(depths.values())))
    unit = byte_unit(max(one["measured"] for forms in depths.values() for one in forms.values()))

    def lines(framework: str) -> list[Series]:
        its_names = [name for name in names if name.startswith(framework)]
        return [
            Series(
                name.removeprefix(f"{framework}, "),
                COLOURS[at % len(COLOURS)],
                [(depth, scaled_bytes(forms[name]["closed_form"], unit)) for depth, forms in depths.items()],
                [(depth, scaled_bytes(forms[name]["measured"], unit)) for depth, forms in depths.items()],
                shape=SHAPES[at % len(SHAPES)],
                # Later marks are smaller, so that equal values of two forms both show.
                size=max(3.0, 7.0 - at),
            )
            for at, name in enumerate(its_names)
        ]

    kept = f"kept between the passes, {unit}"
    return [
        Panel(f"{framework}: closed form, and measured", layers, kept, lines(framework), binary_x=True, binary_y=True)
        for framework, layers in (("PyTorch", "layers"), ("JAX", "layers, first and head not counted"))
    ]


def _rule_panels(rules: list[dict[str, float]]) -> list[Panel]:
    def line(label: str, key: str, *, claim: bool) -> Series:
        values = [(rule["num_layers"], rule[key]) for rule in rules]
        return Series(label, INK if claim else VERMILLION, values, () if claim else values, dashed=claim)

    return [
        Panel(
            "Memory that √L segments save",
            "layers",
            "share of what is kept",
            [line("rule: 1 − √L/L", "claimed_saving", claim=True), line("measured", "measured_saving", claim=False)],
            binary_x=True,
            from_zero=True,
            percent=True,
        ),
        Panel(
            "Work that √L segments add",
            "layers",
            "share of a step's FLOPs",
            [line("rule: 2√L/L", "claimed_increase", claim=True), line("measured", "measured_increase", claim=False)],
            binary_x=True,
            from_zero=True,
            percent=True,
        ),
    ]


def _slim(made: Table) -> Table:
    made.box, made.padding, made.pad_edge, made.title_justify = box.SIMPLE_HEAD, (0, 1, 0, 0), False, "left"
    return made
