"""Pictures of what the modes cost: memory and step time as bars, and memory against step time."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from remat_jax.report.chart import Panel, Series, chart
from remat_jax.report.stacked_bars import BarPanel, BarSegment, PanelBar, bars_picture
from remat_jax.report.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, SHAPES, SKY, VERMILLION, Key, Picture
from remat_jax.report.tables import MISSING, byte_unit, format_ratio, scaled_bytes

Row = Mapping[str, Any]

ROW_KEYS = ("framework", "model", "mode", "residual_device_bytes", "residual_host_bytes", "peak_bytes")
PEAK_KINDS = ("torch", "cpu", "h200")

_LONGEST_MODE = 34
_FRAMEWORKS = {"PyTorch": VERMILLION, "JAX Linen": BLUE, "JAX NNX": GREEN}
_SPARE = (PURPLE, ORANGE, SKY)
_PEAKS = {
    "torch": ("PyTorch, tracked", VERMILLION),
    "cpu": ("JAX, compiled for CPU", ORANGE),
    "h200": ("JAX, compiled for H200", GREEN),
}


def demo_pictures(rows: Iterable[Any], folder: str | Path) -> list[str]:
    """Draw memory, time and trade-off of `rows` into `folder` as SVG; returns the paths.

    A row is a mapping or a dataclass instance with the keys `framework`, `model`, `mode`, `residual_device_bytes`,
    `residual_host_bytes`, `peak_bytes` (by `torch`, `cpu`, `h200`) and, for times, `relative_time`; a value of `None` is drawn
    as missing, never as zero. Creates `folder` if it does not exist. Models differ in size, so each model has its own pictures;
    with several models their file names end in the model's name (`memory-decoder.svg`). The trade-off is drawn only
    if a row has both residual bytes and a time.

    Raises `ValueError` for rows that cannot be drawn.

    >>> import tempfile
    >>> row = {"framework": "PyTorch", "model": "toy", "mode": "off", "residual_device_bytes": 4096,
    ...        "residual_host_bytes": 0, "peak_bytes": {"torch": 8192}, "relative_time": 1.0}
    >>> [Path(path).name for path in demo_pictures([row], tempfile.mkdtemp())]
    ['memory.svg', 'time.svg', 'trade_off.svg']
    """
    models = group(plain_rows(rows), "model")
    pictures: dict[str, Callable[[Sequence[Row]], Picture]] = {
        "memory": memory_picture,
        "time": time_picture,
        "trade_off": trade_off_picture,
    }
    paths = []
    for model, its_rows in models.items():
        suffix = f"-{re.sub(r'[^A-Za-z0-9]+', '-', model).strip('-').lower()}" if len(models) > 1 else ""
        has_places = any(_place(row, "B") for row in its_rows)
        paths += [
            draw(its_rows).save(Path(folder) / f"{name}{suffix}.svg")
            for name, draw in pictures.items()
            if name != "trade_off" or has_places
        ]
    return paths


def memory_picture(rows: Iterable[Any]) -> Picture:
    """Every row's residual bytes, on the device and on the host, and its peak memory.

    The bars of a panel share the unit at its axis. `rows` are those of `demo_pictures` for one model.
    """
    rows = plain_rows(rows)
    keys = [Key("on the device", BLUE), Key("on the host", SKY, hatched=True)]
    frameworks = group(rows, "framework")
    # A kind of peak that no row of a framework has is left out; a kind that only some rows lack is drawn as missing.
    kinds = {
        name: [kind for kind in PEAK_KINDS if any(peak(row, kind) is not None for row in its_rows)]
        for name, its_rows in frameworks.items()
    }
    keys += [Key(*_PEAKS[kind]) for kind in PEAK_KINDS if any(kind in present for present in kinds.values())]
    residual_unit = _unit(row[key] for row in rows for key in ("residual_device_bytes", "residual_host_bytes"))
    peak_unit = _unit(peak(row, kind) for row in rows for kind in PEAK_KINDS)
    residuals = BarPanel(
        "Residuals", f"kept for the backward pass, {residual_unit}", _slots(rows, lambda row: [_residuals(row, residual_unit)])
    )
    peaks = BarPanel(
        "Peak memory",
        f"of one training step, {peak_unit}",
        _slots(rows, lambda row: _peak_bars(row, kinds[row["framework"]], peak_unit)),
    )
    return bars_picture(_names(rows), [residuals, peaks], keys)


def time_picture(rows: Iterable[Any]) -> Picture:
    """Every row's step time relative to the same framework without checkpointing.

    `rows` are those of `demo_pictures` for one model.
    """
    rows = plain_rows(rows)
    colours = framework_colours(rows)

    def bars(row: Row) -> list[PanelBar]:
        return [_bar(row.get("relative_time"), format_ratio, colours[row["framework"]], f"{row['framework']}, {row['mode']}")]

    label = "relative to the same framework without checkpointing (dashed)"
    return bars_picture(_names(rows), [BarPanel("Step time", label, _slots(rows, bars), mark=1.0)])


def trade_off_picture(rows: Iterable[Any]) -> Picture:
    """Residual bytes on the device against relative step time, one named point per row.

    A line joins the points of one framework in order of time. Hollow points have residuals in host memory. Rows without a time
    or residual bytes are listed below the picture. `rows` are those of `demo_pictures` for one model.
    """
    rows = plain_rows(rows)
    drawn = [row for row in rows if _place(row, "B")]
    unit = _unit(row["residual_device_bytes"] for row in drawn)
    colours = framework_colours(rows)
    series = []
    for number, (framework, its_rows) in enumerate(group(drawn, "framework").items()):
        ordered = sorted(its_rows, key=lambda row: (row["relative_time"], row["residual_device_bytes"]))
        places = [place for row in ordered if (place := _place(row, unit))]
        hollow, names = [bool(row["residual_host_bytes"]) for row in ordered], [mode_label(row) for row in ordered]
        # Frameworks often agree to the byte: later points are smaller and on top, so that all are visible.
        look = {"shape": SHAPES[(number + 1) % len(SHAPES)], "size": max(3.5, 8 * 0.68**number), "faint": True}
        series.append(Series(framework, colours[framework], places, places, hollow, names, **look))
    lost = ", ".join(f"{row['framework']} {mode_label(row)}" for row in rows if row not in drawn)
    note = f"Not measured, so not drawn: {lost}" if lost else ""
    label = "step time relative to the same framework without checkpointing"
    hollow_key = Key("hollow: residuals on the host", GREY, "circle", hollow=True)
    panel = Panel("Trade-off", label, f"residuals on the device, {unit}", series, keys=[hollow_key])
    return chart([panel], 600, note)


def plain_rows(rows: Iterable[Any]) -> list[Row]:
    """`rows` as mappings: a mapping as it is, a dataclass instance as its fields. Values may be `None`.

    Raises `ValueError` if there is no row, a row lacks one of `ROW_KEYS`, `peak_bytes` has a key outside `PEAK_KINDS` or
    `relative_time` is not a positive number, and `TypeError` for a row that is neither a mapping nor a dataclass instance.

    >>> plain_rows([{"framework": "PyTorch"}])
    Traceback (most recent call last):
    ...
    ValueError: rows[0] lacks model, mode, residual_device_bytes, residual_host_bytes, peak_bytes: ...
    """
    result: list[Row] = []
    for position, given in enumerate(rows):
        row = _mapping(given, position)
        missing = [key for key in ROW_KEYS if key not in row]
        if missing:
            raise ValueError(f"rows[{position}] lacks {', '.join(missing)}: give them, as None where there is no value")
        unknown = sorted(set(row["peak_bytes"] or ()) - set(PEAK_KINDS))
        if unknown:
            raise ValueError(f"rows[{position}]['peak_bytes'] has {unknown}: expected only {', '.join(PEAK_KINDS)}")
        time = row.get("relative_time")
        if time is not None and not (math.isfinite(time) and time > 0):
            raise ValueError(f"rows[{position}]['relative_time']={time!r}: expected a ratio above 0, or None")
        result.append(row)
    if not result:
        raise ValueError("rows is empty: expected at least one row, for one framework and mode")
    return result


def group(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """The rows grouped by their value of `key`, in order of appearance.

    >>> list(group([{"m": "b"}, {"m": "a"}, {"m": "b"}], "m"))
    ['b', 'a']
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[key]), []).append(row)
    return groups


def peak(row: Row, kind: str) -> int | None:
    """The row's peak in bytes for one of `PEAK_KINDS`, or `None`.

    >>> peak({"peak_bytes": {"cpu": 3}}, "cpu"), peak({"peak_bytes": None}, "cpu")
    (3, None)
    """
    value: int | None = (row["peak_bytes"] or {}).get(kind)
    return value


def mode_label(row: Row) -> str:
    """The row's mode, shortened in the middle if it is too long for a picture.

    >>> mode_label({"mode": "save: block/attention/*, block/mlp/up*; recompute: *"})
    'save: block/atte…/up*; recompute: *'
    """
    mode = str(row["mode"])
    if len(mode) <= _LONGEST_MODE:
        return mode
    half = _LONGEST_MODE // 2
    return f"{mode[: half - 1]}…{mode[-half - 1 :]}"


def _mapping(row: Any, position: int) -> Row:
    if isinstance(row, Mapping):
        return row
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return dataclasses.asdict(row)
    raise TypeError(
        f"rows[{position}] is a {type(row).__name__}: expected a mapping or a dataclass instance with the keys "
        f"{', '.join(ROW_KEYS)}"
    )


def framework_colours(rows: Sequence[Row]) -> dict[str, str]:
    """The colour of every framework in `rows`; PyTorch, Linen and NNX have fixed colours.

    >>> framework_colours([{"framework": "PyTorch"}, {"framework": "Haiku"}])
    {'PyTorch': '#D55E00', 'Haiku': '#CC79A7'}
    """
    spare = iter(_SPARE * len(rows))
    return {name: _FRAMEWORKS.get(name) or next(spare) for name in group(rows, "framework")}


def _place(row: Row, unit: str) -> tuple[float, float] | None:
    """Step time and residual bytes on the device; None if one of them is missing."""
    time, size = row.get("relative_time"), row["residual_device_bytes"]
    return None if time is None or size is None else (float(time), scaled_bytes(size, unit))


def _names(rows: Sequence[Row]) -> list[str]:
    return [
        name for framework, its_rows in group(rows, "framework").items() for name in (framework, *map(mode_label, its_rows))
    ]


def _slots(rows: Sequence[Row], bars: Callable[[Row], list[PanelBar]]) -> list[list[PanelBar]]:
    """The bars of each name of `_names`; a framework's heading has none."""
    return [slot for its_rows in group(rows, "framework").values() for slot in ([], *map(bars, its_rows))]


def _residuals(row: Row, unit: str) -> PanelBar:
    device, host = row["residual_device_bytes"], row["residual_host_bytes"]
    parts = [(device, BLUE, False, "on the device"), (host, SKY, True, "on the host")]
    texts = [MISSING if size is None else f"{scaled_bytes(size, unit):.1f}" for size in (device, host)]
    text = texts[0] if host == 0 or texts == [MISSING, MISSING] else f"{texts[0]} + {texts[1]}"
    drawn = [
        BarSegment(
            scaled_bytes(size, unit),
            colour,
            hatched,
            f"{row['framework']}, {row['mode']}: {scaled_bytes(size, unit):g} {where}",
        )
        for size, colour, hatched, where in parts
        if size
    ]
    return PanelBar(drawn, text, missing=text == MISSING)


def _peak_bars(row: Row, kinds: Sequence[str], unit: str) -> list[PanelBar]:
    bars = []
    for kind in kinds:
        size = peak(row, kind)
        name, colour = _PEAKS[kind]
        bars.append(_bar(None if size is None else scaled_bytes(size, unit), "{:.1f}".format, colour, name))
    return bars or [PanelBar([], MISSING, missing=True)]


def _bar(value: float | None, write: Callable[[float], str], colour: str, tooltip: str) -> PanelBar:
    if value is None:
        return PanelBar([], MISSING, missing=True)
    return PanelBar([BarSegment(value, colour, tooltip=f"{tooltip}: {value:g}")], write(value))


def _unit(sizes: Iterable[int | None]) -> str:
    return byte_unit(max((size for size in sizes if size is not None), default=0))
