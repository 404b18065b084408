"""Placing the labels of points so that none covers another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""

_DISTANCES = (9, 12, 16, 22, 30, 40, 52, 66, 82, 100, 122, 148, 178)
_DIRECTIONS = 24
_CLEARANCE, _RADIUS, _STEP = 2.0, 6.0, 6.0


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    area: Box,
    *,
    taken: Sequence[Box] = (),
) -> list[Box]:
    """A box of each size near its point, inside `area`, clear of the other boxes, all points and `taken`.

    Boxes are tried in rings around each point, the most crowded points first. Without a free place a label gets the box with
    the least overlap.
    """
    obstacles = [(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y in points] + list(taken)
    placed: dict[int, Box] = {}

    def nearness(index: int) -> float:
        return sum(1 / (1 + math.dist(points[index], other)) for other in points)

    for index in sorted(range(len(points)), key=nearness, reverse=True):
        best, least = (0.0, 0.0, 0.0, 0.0), math.inf
        for box in _candidates(points[index], sizes[index]):
            overlap = sum(_shared(box, other) for other in [*obstacles, *placed.values()]) + _outside(box, area)
            if overlap < least:
                best, least = box, overlap
            if overlap == 0:
                break
        placed[index] = best
    return [placed[index] for index in range(len(points))]


def boxes_along(path: Sequence[Sequence[float]]) -> list[Box]:
    """Small boxes along the line through `path`, close to each other, as obstacles for labels."""
    boxes: list[Box] = []
    for (x0, y0), (x1, y1) in itertools.pairwise(path):
        parts = max(1, math.ceil(math.dist((x0, y0), (x1, y1)) / _STEP))
        for part in range(parts + 1):
            x, y = x0 + (x1 - x0) * part / parts, y0 + (y1 - y0) * part / parts
            boxes.append((x - 1, y - 1, x + 1, y + 1))
    return boxes


def _candidates(point: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Boxes around the point, the nearest first, beginning at the right."""
    (x, y), (width, height) = point, size
    for distance in _DISTANCES:
        for step in range(_DIRECTIONS):
            # 0, 1, -1, 2, -2, …: from the right, turning to both sides.
            turn = (step + 1) // 2 * (1 if step % 2 else -1)
            angle = 2 * math.pi * turn / _DIRECTIONS
            across, up = math.cos(angle), math.sin(angle)
            # The box's side that faces the point keeps the distance, whatever the direction.
            left = x + across * distance - width * (1 - across) / 2
            bottom = y + up * distance - height * (1 - up) / 2
            yield (left, bottom, left + width, bottom + height)


def _shared(first: Box, second: Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0]) + _CLEARANCE
    height = min(first[3], second[3]) - max(first[1], second[1]) + _CLEARANCE
    return width * height if width > 0 and height > 0 else 0.0


def _outside(box: Box, area: Box) -> float:
    across = max(0.0, area[0] - box[0]) + max(0.0, box[2] - area[2])
    up = max(0.0, area[1] - box[1]) + max(0.0, box[3] - area[3])
    return across * (box[3] - box[1]) + up * (box[2] - box[0])
