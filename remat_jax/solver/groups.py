"""Groups of layers: one checkpoint around k equal layers, which keeps their first input; how few groups meet a budget.

The method is from Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174): with layers that are no
checkpoints inside the group, its segments; with layers that are, its recursion of depth two. `segments.py` has the first
without a budget, as plans of single actions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from remat_jax.solver.checks import check_count, check_number


@dataclass(frozen=True)
class GroupedLayer:
    """One of a stack's equal layers, under the policy that it has inside a group, and outside of all groups.

    Attributes:
        input_bytes: of its input.
        saved_bytes: of what its policy keeps besides: of `full` nothing, of `off` all that its backward pass reads, its output
            among it, which is the next layer's input.
        working_bytes: of what its backward pass needs while it runs, besides what is kept.
        forward_seconds: of its forward pass.
        extra_seconds: of what its policy computes again: of `off` nothing.
        gradient_bytes: of its parameters' gradients. In a scan of groups those of a group are stacked by themselves first.
        checkpointed: whether it keeps its input as a checkpoint does; False for `off`.

    Raises:
        PlanningError: a number is negative or none.
    """

    input_bytes: float
    saved_bytes: float
    working_bytes: float
    forward_seconds: float = 1.0
    extra_seconds: float = 0.0
    gradient_bytes: float = 0.0
    checkpointed: bool = True

    def __post_init__(self) -> None:
        for name in (
            "input_bytes",
            "saved_bytes",
            "working_bytes",
            "forward_seconds",
            "extra_seconds",
            "gradient_bytes",
        ):
            check_number(name, getattr(self, name))


@dataclass(frozen=True)
class Grouping:
    """A stack whose first layers are in groups.

    Attributes:
        layers: of the stack.
        size: the layers of a group; the last group has fewer where all layers are in groups and `size` does not divide them.
        grouped: how many layers are in groups, the first ones. The others follow under the same policy without groups.
        peak_bytes: the most that is there at once, the fixed bytes among it.
        kept_bytes: what is kept between the passes.
        extra_seconds: what is computed again.
    """

    layers: int
    size: int
    grouped: int
    peak_bytes: float
    kept_bytes: float
    extra_seconds: float

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The first layer of each group and the one after its last, as `LayerPolicies.groups` has them."""
        return tuple((start, min(start + self.size, self.grouped)) for start in range(0, self.grouped, self.size))


def grouping(
    layers: int, size: int, grouped: int, layer: GroupedLayer, *, fixed_bytes: float = 0.0, scanned: bool = False
) -> Grouping:
    """What it needs to have the first ``grouped`` layers in groups of ``size``.

    A group of n layers keeps its input, a. While its backward pass runs there are the inputs of the other n - 1 layers, n times
    what a layer saves, and what one of them works with. Groups stand nearest the input: all layers behind are gone by then. So
    with g groups before the others, r, the peak is the larger of g a + (n - 1) a + n s + w and g a + r (a + s) + w. A scan of
    two groups or more needs the input of a group besides, taken out of the stack of inputs, and the gradients of n layers
    (`docs/notes/groups_of_layers.md` has what was compiled).

    A group is computed again: of a scan all n layers, of an unrolled stack all but the last, whose result nobody reads; where
    layers are no checkpoints of their own, all n. A group of one layer is that layer as a checkpoint.

    Args:
        fixed_bytes: what is there all the time.
        scanned: whether the layers are rounds of a scan.

    Raises:
        PlanningError: an argument is wrong.

    >>> full = GroupedLayer(input_bytes=1.0, saved_bytes=0.0, working_bytes=17.0, extra_seconds=1.0)
    >>> [(one.peak_bytes, one.extra_seconds) for one in (grouping(64, size, 64, full) for size in (1, 8))]
    [(81.0, 64.0), (32.0, 120.0)]
    """
    check_count("layers", layers)
    check_count("size", size, most=layers)
    check_count("grouped", grouped, least=0, most=layers)
    check_number("fixed_bytes", fixed_bytes)
    if grouped % size and grouped != layers:
        # The rest of a run in the middle would be a group of another size.
        check_count("grouped", grouped, least=layers)
    lengths = [size] * (grouped // size) + ([grouped % size] if grouped % size else [])
    rest = layers - grouped
    looped = scanned and lengths.count(size) > 1
    peaks = [
        place * layer.input_bytes + _inside(length, layer, looped=looped and length == size)
        for place, length in enumerate(lengths, 1)
    ]
    kept = len(lengths) * layer.input_bytes + rest * _kept(layer)
    peaks += [kept + layer.working_bytes] if rest else []
    again = sum(_again(length, layer, scanned) for length in lengths) + rest * layer.extra_seconds
    return Grouping(layers, size, grouped, fixed_bytes + max(peaks), kept, again)


def groupings(
    layers: int, layer: GroupedLayer, budget: float = math.inf, *, fixed_bytes: float = 0.0, scanned: bool = False
) -> tuple[Grouping, ...]:
    """The groupings within a budget that none beats in both peak and time, the fastest first; empty where none fits.

    Of each size of groups, from 2 to all layers: the fewest groups with which the budget is met. Without a budget, the stack in
    groups as a whole.

    Args:
        budget: the most bytes at once.
        fixed_bytes, scanned: as for `grouping`.

    Raises:
        PlanningError: an argument is wrong.

    >>> full = GroupedLayer(input_bytes=1.0, saved_bytes=0.0, working_bytes=17.0, extra_seconds=1.0)
    >>> [(one.size, one.grouped, one.peak_bytes, one.extra_seconds) for one in groupings(64, full, 34.0, scanned=True)]
    [(13, 52, 34.0, 116.0), (9, 54, 33.0, 118.0), (8, 56, 32.0, 120.0)]
    """
    check_count("layers", layers)
    check_number("budget", budget, infinite=True)
    found = []
    for size in range(2, layers + 1):
        for grouped in (layers,) if budget == math.inf else (*range(size, layers, size), layers):
            one = grouping(layers, size, grouped, layer, fixed_bytes=fixed_bytes, scanned=scanned)
            if one.peak_bytes <= budget:
                found.append(one)
                break
    unbeaten: list[Grouping] = []
    for one in sorted(found, key=lambda one: (one.extra_seconds, one.peak_bytes, one.size)):
        if not unbeaten or one.peak_bytes < unbeaten[-1].peak_bytes:
            unbeaten.append(one)
    return tuple(unbeaten)


def _inside(length: int, layer: GroupedLayer, *, looped: bool) -> float:
    """What is there at once while the backward pass of a group runs, in a scan of groups or not, besides the groups' inputs."""
    inputs = (length - 1) * layer.input_bytes if layer.checkpointed else 0.0
    taken = layer.input_bytes + length * layer.gradient_bytes if looped and length > 1 else 0.0
    return inputs + length * layer.saved_bytes + layer.working_bytes + taken


def _kept(layer: GroupedLayer) -> float:
    """What a layer outside of all groups keeps."""
    return layer.saved_bytes + (layer.input_bytes if layer.checkpointed else 0.0)


def _again(length: int, layer: GroupedLayer, scanned: bool) -> float:
    """The seconds that a group computes again."""
    if length == 1:
        return max(layer.forward_seconds, layer.extra_seconds)
    rounds = length if scanned or not layer.checkpointed else length - 1
    return rounds * layer.forward_seconds + length * layer.extra_seconds
