"""Groups of layers as mathematics: against known answers, and against a stack simulated step by step."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from remat_jax.errors import PlanningError
from remat_jax.solver.groups import GroupedLayer, grouping, groupings

CHEN = json.loads((Path(__file__).parent / "vectors" / "planner.json").read_text())["chen_two_level_uniform"]


def chen(full_bytes: float) -> GroupedLayer:
    """A layer that is no checkpoint inside its group."""
    return GroupedLayer(1.0, full_bytes, checkpointed=False)


@pytest.mark.parametrize(("full_bytes", "layers"), [(17, 32), (17, 64), (1, 64)])
def test_chen(full_bytes: int, layers: int) -> None:
    published = CHEN[f"a_full={full_bytes}*a_in" if full_bytes > 1 else "a_full=a_in"][f"L={layers}"]
    by_size = [grouping(layers, size, layers, chen(full_bytes)) for size in range(1, layers + 1)]
    assert min(result.peak_bytes for result in by_size) == by_size[published["g"] - 1].peak_bytes == published["peak"]
    assert {result.extra_seconds for result in by_size} == {layers}, "each layer runs forward once more"


def test_two_levels_of_checkpoints_need_two_roots() -> None:
    """⌈L / k⌉ + k - 1 inputs and the residuals of one layer, least at √L."""
    layer = GroupedLayer(1.0, 0.0, extra_seconds=1.0)
    peaks = {size: grouping(64, size, 64, layer, fixed_bytes=17.0).peak_bytes for size in range(1, 65)}
    assert peaks[8] == min(peaks.values()) == 8 + 7 + 17
    assert peaks[1] == peaks[64] == 64 + 17
    # Unrolled, the group does not run its last layer again; a scan runs all.
    assert grouping(64, 8, 64, layer).extra_seconds == 64 + 8 * 7
    assert grouping(64, 8, 64, layer, scanned=True).extra_seconds == 64 + 64


def walked(layers: int, size: int, grouped: int, layer: GroupedLayer, scanned: bool) -> tuple[float, float]:
    """Peak, and seconds of both passes less those of a plain step, one layer after the other."""
    layer_bytes = layer.saved_bytes + (layer.input_bytes if layer.checkpointed else 0.0)
    units = [range(start, min(start + size, grouped)) for start in range(0, grouped, size)]
    units += [range(number, number + 1) for number in range(grouped, layers)]
    kept = [layer.input_bytes if nth * size < grouped else layer_bytes for nth in range(len(units))]
    peak, seconds, alive = 0.0, 0.0, sum(kept)
    for unit, held in zip(reversed(units), reversed(kept), strict=True):
        if unit.start >= grouped:
            peak, seconds = max(peak, alive), seconds + layer.extra_seconds
            alive -= held
            continue
        inside = [layer_bytes - (layer.input_bytes if layer.checkpointed and number == unit.start else 0.0) for number in unit]
        computed = [number for number in unit if number + 1 < unit.stop or scanned or not layer.checkpointed]
        seconds += len(computed) * layer.forward_seconds if len(unit) > 1 else 0.0
        alike = sum(len(group) == size for group in units if group.start < grouped)
        taken = scanned and alike > 1 and len(unit) == size > 1
        gradients = len(unit) * layer.gradient_bytes + layer.input_bytes if taken else 0.0
        while inside:
            peak = max(peak, alive + sum(inside) + gradients)
            seconds += layer.extra_seconds if len(unit) > 1 else max(layer.extra_seconds, layer.forward_seconds)
            inside.pop()
        alive -= held
    return peak, seconds


def test_random_stacks_walked_through() -> None:
    draw = random.Random(0)
    for _ in range(300):
        sizes = [float(draw.randint(0, 9)) for _ in range(5)]
        layer = GroupedLayer(*sizes, checkpointed=draw.random() < 0.7)
        layers = draw.randint(1, 24)
        size = draw.randint(1, layers)
        grouped = draw.choice([*range(0, layers, size), layers])
        scanned = draw.random() < 0.5
        result = grouping(layers, size, grouped, layer, fixed_bytes=5.0, scanned=scanned)
        peak, seconds = walked(layers, size, grouped, layer, scanned)
        assert (result.peak_bytes, result.extra_seconds) == (5.0 + peak, seconds)
        assert sum(end - start for start, end in result.groups) == grouped


def test_of_each_size_the_fewest_groups_that_fit() -> None:
    layer = GroupedLayer(2.0, 1.0, extra_seconds=0.5, gradient_bytes=0.25)
    for budget in (36.0, 40.0, 60.0, 90.0, math.inf):
        every = [
            grouping(30, size, grouped, layer, fixed_bytes=15.0, scanned=True)
            for size in range(2, 31)
            for grouped in ((30,) if budget == math.inf else (*range(size, 30, size), 30))
        ]
        fits = [result for result in every if result.peak_bytes <= budget]
        results = groupings(30, layer, budget, fixed_bytes=15.0, scanned=True)
        assert bool(results) == bool(fits), budget
        if fits:
            assert results[0].extra_seconds == min(result.extra_seconds for result in fits)
        assert [result.extra_seconds for result in results] == sorted(result.extra_seconds for result in results)
        assert [result.peak_bytes for result in results] == sorted((result.peak_bytes for result in results), reverse=True)
    assert groupings(30, layer, 20.0, fixed_bytes=15.0) == ()


@pytest.mark.parametrize(("size", "measured"), [(2, 42.63), (4, 40.82), (6, 40.58), (8, 40.97), (16, 43.14), (32, 46.93)])
def test_what_was_compiled_for_a_decoder(size: int, measured: float) -> None:
    """`docs/notes/groups_of_layers.md`, GiB: inputs of 0.3125, gradients of 0.0366; the rest by `full`, which needs 46.93."""
    layer = GroupedLayer(0.3125, 0.0, gradient_bytes=0.0366, extra_seconds=1.0)
    result, alone = (grouping(32, each, 32, layer, fixed_bytes=46.93 - 10.0, scanned=True) for each in (size, 1))
    assert abs(result.peak_bytes - measured) < 0.02
    assert alone.peak_bytes == 46.93


def test_arguments_are_checked() -> None:
    layer = GroupedLayer(1.0, 0.0)
    for wrong in ((0, 1, 0), (4, 5, 4), (4, 2, 5), (4, 3, 2), (4, True, 4)):
        with pytest.raises(PlanningError):
            grouping(*wrong, layer)
    with pytest.raises(PlanningError, match="saved_bytes=-1"):
        GroupedLayer(1.0, -1)
    with pytest.raises(PlanningError, match="budget=nan"):
        groupings(4, layer, math.nan)
