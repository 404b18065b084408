"""Slices of TPUs: their names, shapes and hosts.

A slice is a group of chips that are joined by their own links, as a grid or torus of two or three axes. Its name is the
accelerator type of Google Cloud (`v5p-128`, which counts cores, two on each chip) or its shape in chips (`v5p:4x4x4`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat_jax.errors import TargetError
from remat_jax.hardware.entries import TABLE, is_figure

CHIP = {
    "topology": 'libtpu\'s name of the chip, such as "v5e"',
    "config": 'libtpu\'s name of its configuration, "default" or "megacore"',
    "clock_rate_ghz": "the clock rate in GHz",
    "axes": "2 or 3, the axes of a slice",
    "devices_per_chip": "how many devices JAX sees on a chip",
    "counted_per_chip": "how many cores of a chip the names of accelerator types count",
    "largest_slice": "the chips of the largest slice",
}
"""The keys of the table `compiler` of a TPU, with their meanings."""

_NAME = re.compile(
    r"(?:(?P<slices>\d{1,6})x)?(?P<chip>[^:]+?)(?::(?P<shape>\d{1,4}(?:x\d{1,4})+)|-(?P<count>\d{1,7}))", re.DOTALL
)
_SHAPE = re.compile(r"\d{1,4}(?:x\d{1,4})+")
_SIZES = (1, 4, 8, 16, 32, 64, 128, 192, 256, 512)
"""Numbers of chips for which error messages list the slices."""
_SMALL: dict[int, dict[int, tuple[int, ...]]] = {
    2: {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)},
    3: {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)},
}
"""The shapes of slices by number of axes and of chips: all of two axes, and of three axes those with fewer than 64 chips."""
_CUBE = 4
"""A slice of three axes and at least 64 chips consists of cubes with this side."""
CHIPS_PER_HOST = 4


@dataclass(frozen=True)
class SliceName:
    """The parts of a slice's name: `[slices x]chip-count` or `[slices x]chip:shape`."""

    slices: int
    chip: str
    shape: tuple[int, ...]
    count: int


def slice_name(name: str) -> SliceName | None:
    """The parts of a name that has the form of a slice's name; None for other names.

    >>> slice_name("2xv5p-128")
    SliceName(slices=2, chip='v5p', shape=(), count=128)
    >>> slice_name("v5e:4x8").shape, slice_name("8xh200")
    ((4, 8), None)
    """
    match = _NAME.fullmatch(name)
    if match is None or not int(match["slices"] or 1):
        return None
    shape = tuple(int(length) for length in (match["shape"] or "").split("x") if length)
    return SliceName(int(match["slices"] or 1), match["chip"], shape, int(match["count"] or 0))


def split_path(name: str) -> tuple[str | None, str]:
    """The path of a target file, or None, and the rest of a target's name; the shape of a slice stays with its chip.

    >>> split_path("mine.toml:v5e:2x2"), split_path("v5e:2x2"), split_path("mine.toml:fast")
    (('mine.toml', 'v5e:2x2'), (None, 'v5e:2x2'), ('mine.toml', 'fast'))
    """
    rest, colon, last = name.rpartition(":")
    if colon and _SHAPE.fullmatch(last.lower()):
        path, colon, chip = rest.rpartition(":")
        return (path if colon else None), f"{chip}:{last}"
    return (rest if colon else None), last


def shape_of(chips: int, chip: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of the slice with this number of chips; None if there is no such slice.

    >>> shape_of(64, {"axes": 3, "largest_slice": 8960}), shape_of(3, {"axes": 2, "largest_slice": 256})
    ((4, 4, 4), None)
    """
    if chips > chip["largest_slice"]:
        return None
    if chips in _SMALL[chip["axes"]]:
        return _SMALL[chip["axes"]][chips]
    cubes, rest = divmod(chips, _CUBE**3)
    if chip["axes"] == 2 or rest or not cubes:
        return None
    # Of all shapes, Google Cloud offers the one that is closest to a cube.
    sides = min(_factors(cubes, 3), key=sum)
    return tuple(_CUBE * side for side in sides)


def _factors(number: int, count: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write `number` as a product of `count` factors that do not decrease."""
    if count == 1:
        if number >= least:
            yield (number,)
        return
    for first in range(least, math.isqrt(number) + 1):
        if number % first == 0:
            yield from ((first, *others) for others in _factors(number // first, count - 1, first))


def checked_shape(named: SliceName, chip: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The shape of the slice that a name asks for. Raises TargetError if there is no such slice."""
    if named.shape:
        known = shape_of(math.prod(named.shape), chip)
        large = len(named.shape) == 3 and all(length % _CUBE == 0 for length in named.shape)
        in_order = named.shape == tuple(sorted(named.shape)) or named.shape == known
        fits = 0 < math.prod(named.shape) <= chip["largest_slice"] and len(named.shape) == chip["axes"]
        if fits and in_order and (large or named.shape == known):
            return named.shape
        raise TargetError(f"target={name[:200]!r} is no slice of {named.chip}: the shapes are {listed(chip, _shape_text)}")
    each = chip["counted_per_chip"]
    chips, rest = divmod(named.count, each)
    shape = None if rest else shape_of(chips, chip)
    if shape is None:
        counted = f"{each} cores on each chip" if each > 1 else "chips"
        raise TargetError(
            f"target={name[:200]!r} is no slice of {named.chip}, whose names count {counted}: the slices are "
            f"{listed(chip, lambda shape: f'{named.chip}-{math.prod(shape) * each}')}"
        )
    return shape


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def listed(chip: Mapping[str, Any], written: Callable[[tuple[int, ...]], str]) -> str:
    """Some slices of a chip, each as `written`, separated by commas."""
    shapes = [shape for chips in _SIZES if (shape := shape_of(chips, chip)) is not None]
    return ", ".join(map(written, shapes)) + (", …" if math.prod(shapes[-1]) < chip["largest_slice"] else "")


def wraps(shape: tuple[int, ...]) -> tuple[bool, bool, bool]:
    """Whether each axis is closed to a ring: an axis of 16 chips of two, and all of three if they consist of cubes."""
    if len(shape) == 2:
        return shape[0] == 16, shape[1] == 16, False
    ring = all(length % _CUBE == 0 for length in shape)
    return ring, ring, ring


def axes_between(devices: Sequence[int], shape: tuple[int, ...], devices_per_chip: int) -> float:
    """The axes of a slice over which these devices exchange arrays: each that is closed to a ring counts 1, each other 1/2.

    Devices are numbered along the first axis first; those of one chip follow each other. The devices of a single chip count all
    axes.

    >>> axes_between([0, 1], (4, 4, 4), 1), axes_between([0, 1, 2, 3], (2, 2), 1)
    (1.0, 1.0)
    """
    places = [device // devices_per_chip for device in devices]
    coordinates = []
    for length in shape:
        coordinates.append({place % length for place in places})
        places = [place // length for place in places]
    spanned = [ring for ring, along in zip(wraps(shape), coordinates, strict=False) if len(along) > 1]
    return sum(1.0 if ring else 0.5 for ring in spanned or wraps(shape)[: len(shape)])


def checked_chip(chip: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The table `compiler` of a TPU, unchanged. Raises TargetError if it is invalid."""

    def is_right(key: str, value: Any) -> bool:
        if key in ("topology", "config"):
            return isinstance(value, str) and value.isalnum()
        is_number = is_figure(value) and (isinstance(value, int) or key == "clock_rate_ghz") and 0 < value < 2**31
        return is_number and (key != "axes" or value in _SMALL)

    wrong = {key: chip.get(key) for key in CHIP if not is_right(key, chip.get(key))}
    wrong |= {key: chip[key] for key in chip if key not in CHIP}
    if wrong:
        form = "; ".join(f"{key}: {meaning}" for key, meaning in CHIP.items())
        raise TargetError(f"target table [{name}.compiler]: {wrong!s:.400}; the keys, as in {TABLE}, are {form}")
    return dict(chip)
