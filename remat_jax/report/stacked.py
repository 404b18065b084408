"""Stacked bars: memory by module, one bar for each policy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat_jax.report.document import written_whole
from remat_jax.report.style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, new_figure, style
from remat_jax.report.tables import byte_unit, format_bytes, scaled_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Memory = Mapping[tuple[str, str], int]
"""(module path, phase) → bytes."""

FORMATS = (".png", ".svg", ".pdf")

_COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, "#F0E442")
_ARGUMENTS = {"parameters": "#4d4d4d", "frozen parameters": "#6e6e6e", "optimizer state": "#909090", "batch": "#b5b5b5"}
_OTHER, _NOWHERE = "other modules", "of no module"
_LIGHT = {_OTHER: "#d0d0d0", _NOWHERE: "#e8e8e8"}
KEPT, WORKING = "kept", "working set"
_PHASES = {"argument": KEPT, "forward": KEPT}
_HATCH = "////"
_HEIGHT = 0.66
_LONGEST_NAME = 34
MOST_MODULES = len(_COLOURS)
"""The most modules with a colour of their own."""


def module_memory_figure(memory: Mapping[str, Memory], title: str, modules: int = MOST_MODULES) -> Figure:
    """Device memory at the peak under each policy, by module, as a Matplotlib figure.

    The left panel has bytes, the right panel the shares of each bar, which make small bars readable. Plain parts are arguments
    and saved arrays of the forward pass. Hatched parts are the working set: recomputed arrays and those of the backward pass.

    Args:
      memory: policy → (module path, phase) → bytes, as in `MemoryReport.live_bytes_by_module`. Layers whose paths differ only
        in a number are one module; the arrays of one argument are one part.
      title: the title above the panels.
      modules: the number of modules with a colour of their own, at most 7: the modules with the largest share of any bar.

    Raises:
      ValueError: there is no policy, a policy has no bytes, or `modules` is out of range.
      ImportError: Matplotlib is not installed.

    >>> figure = module_memory_figure({"off": {("ffn/up", "forward"): 2048, ("parameters", "argument"): 512}}, "a model")
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['Bytes', 'Shares']
    """
    if not 1 <= modules <= len(_COLOURS):
        raise ValueError(f"modules={modules!r}: expected 1 to {len(_COLOURS)}, one for each colour")
    empty = [policy for policy, bytes_of in memory.items() if not sum(bytes_of.values())]
    if not memory or empty:
        raise ValueError(
            f"memory: {f'no array is alive under {empty[0]!r}' if empty else 'no policy'}; measure for a GPU target"
        )
    bars = grouped(memory, modules)
    colours = _colours(bars)
    with style():
        figure = new_figure(2.0 + 0.42 * len(bars) + 0.2 * (1 + len(colours) // _columns(map(_short, colours))))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        left, right = figure.subplots(1, 2, sharey=True)
        unit = byte_unit(max(sum(bar.values()) for bar in bars.values()))
        for y, bar in enumerate(bars.values()):
            total = sum(bar.values())
            _stack(left, y, {part: scaled_bytes(n, unit) for part, n in bar.items()}, colours)
            _stack(right, y, {part: 100 * n / total for part, n in bar.items()}, colours)
            left.annotate(
                format_bytes(total, unit),
                (scaled_bytes(total, unit), y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        _frame(left, "Bytes", f"on the device at the peak, {unit}", 1.24 * left.get_xlim()[1] / 1.05)
        _frame(right, "Shares", "of each bar, %", 100)
        left.set_yticks(range(len(bars)), [_short(name) for name in bars])
        left.set_ylim(len(bars) - 0.4, -0.6)
        _legend(figure, colours, bars)
    return figure


def save_picture(figure: Figure, path: str | Path) -> str:
    """Write `figure` to `path` in the format of its ending, and return the path. Creates the folder if needed.

    Raises `ValueError` for an ending that is not in `FORMATS`.

    >>> save_picture(None, "memory.gif")
    Traceback (most recent call last):
    ...
    ValueError: path='memory.gif' ends in '.gif': expected .png, .svg or .pdf
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"path={str(path)!r} ends in {path.suffix!r}: expected {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Leave out metadata that changes from run to run, so that equal figures give equal files.
    metadata: dict[str, Any] = {".png": {"Software": None}, ".svg": {"Date": None}}.get(
        path.suffix.lower(), {"CreationDate": None}
    )
    with style(), written_whole(path) as new:
        figure.savefig(new, metadata=metadata, format=path.suffix[1:].lower())
    return str(path)


def grouped(memory: Mapping[str, Memory], modules: int) -> dict[str, dict[tuple[str, str], int]]:
    """The bytes of each bar by (module or argument, `kept` or `working set`), with at most `modules` modules.

    >>> layers = {("Net/layer_0/up", "forward"): 8, ("Net/layer_1/up", "forward"): 8, ("Net/head", "backward"): 1}
    >>> grouped({"off": layers}, 1)
    {'off': {('layer_*/up', 'kept'): 16, ('other modules', 'working set'): 1}}
    """
    paths = dict.fromkeys(path for bar in memory.values() for path, phase in bar if _argument(path, phase) is None)
    names = dict(zip(paths, without_common_root(merged_layers(paths)), strict=True))
    bars: dict[str, dict[tuple[str, str], int]] = {}
    largest_share: dict[str, float] = {}
    for policy, bar in memory.items():
        parts: dict[tuple[str, str], int] = {}
        for (path, phase), n in bar.items():
            part = _argument(path, phase) or names[path] or _NOWHERE, _PHASES.get(phase, WORKING)
            parts[part] = parts.get(part, 0) + n
        bars[policy] = parts
        for module in {module for module, _ in parts}:
            share = sum(n for part, n in parts.items() if part[0] == module) / (sum(parts.values()) or 1)
            largest_share[module] = max(largest_share.get(module, 0.0), share)
    ranked = sorted(largest_share, key=lambda name: (-largest_share[name], name))
    coloured = [name for name in ranked if name not in (*_ARGUMENTS, _NOWHERE)]
    order = [*coloured[:modules], _OTHER, _NOWHERE, *_ARGUMENTS]
    for policy, bar in bars.items():
        merged: dict[tuple[str, str], int] = {}
        for (module, phase), n in bar.items():
            part = module if module in order else _OTHER, phase
            merged[part] = merged.get(part, 0) + n
        bars[policy] = dict(sorted(merged.items(), key=lambda entry: (order.index(entry[0][0]), entry[0][1])))
    return bars


def merged_layers(paths: Iterable[str]) -> list[str]:
    """Each path with `*` for its layer's number, if other paths differ from it only in that number.

    Only the outermost numbered part is a layer; numbered parts inside it, such as `Dense_0`, stay distinct.

    >>> merged_layers(["Net/block_0/Dense_0", "Net/block_0/Dense_1", "Net/block_1/Dense_0", "Net/head_0"])
    ['Net/block_*/Dense_0', 'Net/block_*/Dense_1', 'Net/block_*/Dense_0', 'Net/head_0']
    """
    split = [path.split("/") for path in paths]
    numbers: dict[tuple[str, ...], set[str]] = {}
    for parts in split:
        for place, (stem, number, rest) in _numbered(parts):
            numbers.setdefault((*parts[:place], stem, rest), set()).add(number)
    merged = []
    for parts in split:
        layer = next(
            (
                numbered
                for numbered in _numbered(parts)
                if len(numbers[(*parts[: numbered[0]], numbered[1][0], numbered[1][2])]) > 1
            ),
            None,
        )
        if layer is not None:
            place, (stem, _, rest) = layer
            parts = [*parts[:place], f"{stem}*{rest}", *parts[place + 1 :]]
        merged.append("/".join(parts))
    return merged


def without_common_root(paths: Sequence[str]) -> list[str]:
    """The paths without the model's class, which is the first part of more than half of the paths.

    Some names of the compiled program lack the class; they stay as they are.

    >>> without_common_root(["Net/ffn/up", "Net/head", "Net", "head"]), without_common_root(["a/x", "b/x"])
    (['ffn/up', 'head', 'Net', 'head'], ['a/x', 'b/x'])
    """
    roots = Counter(path.split("/")[0] for path in paths if path)
    root, times = max(roots.items(), key=lambda entry: entry[1], default=("", 0))
    if 2 * times <= roots.total():
        return list(paths)
    return [path.removeprefix(f"{root}/") for path in paths]


def _numbered(parts: Sequence[str]) -> list[tuple[int, tuple[str, str, str]]]:
    """The positions of parts that end in a number, and (stem, number, rest); the rest is an array's suffix (`:input#0`)."""
    matches = [(place, re.fullmatch(r"(|.*?_)(\d+)(:.*)?", part)) for place, part in enumerate(parts)]
    return [(place, (match[1], match[2], match[3] or "")) for place, match in matches if match is not None]


def _argument(path: str, phase: str) -> str | None:
    """The step's argument that a buffer holds or copies; None for arrays that the step computes."""
    name = re.sub(r"\[\d+\]$", "", path)
    if name in _ARGUMENTS:
        return name
    return "batch" if phase == "argument" else None


def _colours(bars: Mapping[str, Mapping[tuple[str, str], int]]) -> dict[str, str]:
    """Each module's colour, in the order of the bars' parts."""
    present = {module for bar in bars.values() for module, _ in bar}
    fixed = {**_LIGHT, **_ARGUMENTS}
    modules = dict.fromkeys(module for bar in bars.values() for module, _ in bar if module not in fixed)
    colours = dict(zip(modules, _COLOURS, strict=False))
    return colours | {name: colour for name, colour in fixed.items() if name in present}


def _stack(axes: Axes, y: int, parts: Mapping[tuple[str, str], float], colours: Mapping[str, str]) -> None:
    start = 0.0
    for (module, phase), width in parts.items():
        hatch = _HATCH if phase == WORKING else None
        axes.barh(y, width, _HEIGHT, left=start, color=colours[module], hatch=hatch, edgecolor="white", linewidth=0.4)
        start += width


def _frame(axes: Axes, title: str, label: str, right: float) -> None:
    axes.set_title(title, pad=8)
    axes.set_xlabel(label)
    axes.set_xlim(0, right)
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _legend(figure: Figure, colours: Mapping[str, str], bars: Mapping[str, Mapping[tuple[str, str], int]]) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=colour, label=_short(module)) for module, colour in colours.items()]
    if any(phase == WORKING for bar in bars.values() for _, phase in bar):
        entries.append(Patch(facecolor="#777777", hatch=_HATCH, edgecolor="white", label="hatched: recomputed or backward"))
    figure.legend(
        handles=entries, loc="outside lower center", ncols=_columns(entry.get_label() for entry in entries), labelcolor=INK
    )


def _columns(labels: Iterable[object]) -> int:
    """The number of legend columns; a letter is about 0.075 inches wide, a patch half an inch."""
    return max(1, min(4, int(9.6 / (0.6 + 0.075 * max(len(str(label)) for label in labels)))))


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2 - 1]}…{name[-_LONGEST_NAME // 2 + 1 :]}"
