"""Stacked bars: memory by module, one bar for each policy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from remat_jax.report.bars import BarPanel, BarSegment, PanelBar, bars_picture
from remat_jax.report.svg import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, Key, Picture
from remat_jax.report.tables import byte_unit, format_bytes, scaled_bytes

Memory = Mapping[tuple[str, str], int]
"""(module path, phase) → bytes."""

_COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, "#F0E442")
_ARGUMENTS = {"parameters": "#4d4d4d", "frozen parameters": "#6e6e6e", "optimizer state": "#909090", "batch": "#b5b5b5"}
_OTHER, _NOWHERE = "other modules", "of no module"
_LIGHT = {_OTHER: "#d0d0d0", _NOWHERE: "#e8e8e8"}
KEPT, WORKING = "kept", "working set"
_PHASES = {"argument": KEPT, "forward": KEPT}
_LONGEST_NAME = 34
MOST_MODULES = len(_COLOURS)
"""The most modules with a colour of their own."""


def module_memory_figure(memory: Mapping[str, Memory], title: str, modules: int = MOST_MODULES) -> Picture:
    """Device memory at the peak under each policy, by module.

    The left panel has bytes, the right panel the shares of each bar, which make small bars readable. Plain parts are arguments
    and saved arrays of the forward pass. Hatched parts are the working set: recomputed arrays and those of the backward pass.

    Args:
      memory: policy → (module path, phase) → bytes, as in `MemoryReport.live_bytes_by_module`. Layers whose paths differ only
        in a number are one module; the arrays of one argument are one part.
      title: the title above the panels.
      modules: the number of modules with a colour of their own, at most 7: the modules with the largest share of any bar.

    Raises:
      ValueError: there is no policy, a policy has no bytes, or `modules` is out of range.

    >>> picture = module_memory_figure({"off": {("ffn/up", "forward"): 2048, ("parameters", "argument"): 512}}, "a model")
    >>> "<title>off: up, kept 2.0 KiB</title>" in picture.svg()
    True
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
    unit = byte_unit(max(sum(bar.values()) for bar in bars.values()))

    def drawn(policy: str, length: Callable[[int, int], float], *, total: bool) -> PanelBar:
        whole = sum(bars[policy].values())
        parts = [
            BarSegment(length(n, whole), colours[module], phase == WORKING, f"{policy}: {module}, {phase} {format_bytes(n)}")
            for (module, phase), n in bars[policy].items()
        ]
        return PanelBar(parts, format_bytes(whole, unit) if total else "")

    sizes = [[drawn(policy, lambda n, _: scaled_bytes(n, unit), total=True)] for policy in bars]
    shares = [[drawn(policy, lambda n, whole: 100 * n / whole, total=False)] for policy in bars]
    keys = [Key(_short(module), colour) for module, colour in colours.items()]
    if any(phase == WORKING for bar in bars.values() for _, phase in bar):
        keys.append(Key("hatched: recomputed or backward", "#777777", hatched=True))
    panels = [
        BarPanel("Bytes", f"on the device at the peak, {unit}", sizes),
        BarPanel("Shares", "of each bar, %", shares, end=100.0),
    ]
    return bars_picture([_short(name) for name in bars], panels, keys, title)


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


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2 - 1]}…{name[-_LONGEST_NAME // 2 + 1 :]}"
