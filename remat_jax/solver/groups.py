"""Groups of layers for a memory budget: one checkpoint around k equal layers saves only the first layer's input.

The method is from Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174). A group of layers without
checkpoints is one of the paper's segments; a group of checkpointed layers is the paper's recursion of depth two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from remat_jax.solver.problem import check_count, check_number


@dataclass(frozen=True)
class GroupedLayer:
    """One layer of a stack of equal layers. All layers have the same policy, inside and outside groups.

    Attributes:
        input_bytes: size of the layer's input.
        saved_bytes: bytes that the policy saves in addition to the input: 0 for `full`; for `off` all residuals, including
            the layer's output, which is the next layer's input.
        forward_seconds: time of the forward pass.
        extra_seconds: time to keep and recompute residuals under the policy; 0 for `off`.
        gradient_bytes: size of the parameters' gradients. A scan of groups needs an additional stack of one group's gradients.
        checkpointed: whether the layer is a checkpoint, which saves its input; False for `off`.
    """

    input_bytes: float
    saved_bytes: float
    forward_seconds: float = 1.0
    extra_seconds: float = 0.0
    gradient_bytes: float = 0.0
    checkpointed: bool = True

    def __post_init__(self) -> None:
        for name in ("input_bytes", "saved_bytes", "forward_seconds", "extra_seconds", "gradient_bytes"):
            check_number(name, getattr(self, name))

    @property
    def kept_input_bytes(self) -> float:
        """The bytes of the layer's input if the layer saves it, else 0."""
        return self.input_bytes if self.checkpointed else 0.0


@dataclass(frozen=True)
class Grouping:
    """A stack whose first layers are in groups.

    Attributes:
        layers: the number of layers in the stack.
        size: the number of layers in a group. If all layers are in groups, the last group may be smaller.
        grouped: the number of layers in groups. The layers after them have the same policy, but are not in groups.
        peak_bytes: peak memory, including the `fixed_bytes` given to `grouping`.
        extra_seconds: time to keep and recompute residuals.
    """

    layers: int
    size: int
    grouped: int
    peak_bytes: float
    extra_seconds: float

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """For each group, its first layer and the first layer after it, as in `LayerPolicies.groups`."""
        return tuple((start, min(start + self.size, self.grouped)) for start in range(0, self.grouped, self.size))


def grouping(
    layers: int, size: int, grouped: int, layer: GroupedLayer, *, fixed_bytes: float = 0.0, scanned: bool = False
) -> Grouping:
    """The memory and time of a stack whose first ``grouped`` layers are in groups of ``size``.

    Let a layer have input bytes a and saved bytes s. A group of n layers saves its input. Its backward pass also needs the
    inputs of the other n - 1 layers, and n s saved bytes. The r ungrouped layers follow the g groups, so their residuals are
    freed before any group's backward pass. The peak is the larger of g a + (n - 1) a + n s and g a + r (a + s). A scan of two
    or more groups also needs a copy of one group's input, sliced from the stacked inputs, and the gradients of n layers
    (`docs/notes/groups_of_layers.md` has the compiled figures).

    To recompute a group, the backward pass runs all n layers again if they are scanned or are not checkpoints. In an unrolled
    stack of checkpoints it runs only the first n - 1 layers again, because nothing reads the last layer's output. Each layer's
    own recomputation (`extra_seconds`) comes in addition. A group of one layer is a checkpoint around that layer.

    Args:
        fixed_bytes: other memory in use, such as the working set of a layer's backward pass.
        scanned: whether the layers are iterations of a scan.

    >>> full = GroupedLayer(input_bytes=1.0, saved_bytes=0.0, extra_seconds=1.0)
    >>> stacks = [grouping(64, size, 64, full, fixed_bytes=17.0) for size in (1, 8)]
    >>> [(stack.peak_bytes, stack.extra_seconds) for stack in stacks]
    [(81.0, 64.0), (32.0, 120.0)]
    """
    check_count("layers", layers)
    check_count("size", size, most=layers)
    check_count("grouped", grouped, least=0, most=layers)
    check_number("fixed_bytes", fixed_bytes)
    if grouped % size and grouped != layers:
        # A smaller group is allowed only at the end of the stack.
        check_count("grouped", grouped, least=layers)
    lengths = [size] * (grouped // size) + ([grouped % size] if grouped % size else [])
    ungrouped = layers - grouped
    looped = scanned and lengths.count(size) > 1
    peaks = [
        place * layer.input_bytes + _inside(length, layer, looped=looped and length == size)
        for place, length in enumerate(lengths, 1)
    ]
    if ungrouped:
        peaks.append(len(lengths) * layer.input_bytes + ungrouped * (layer.saved_bytes + layer.kept_input_bytes))
    seconds = sum(_recomputed_seconds(length, layer, scanned) for length in lengths) + ungrouped * layer.extra_seconds
    return Grouping(layers, size, grouped, fixed_bytes + max(peaks), seconds)


def groupings(
    layers: int, layer: GroupedLayer, budget: float = math.inf, *, fixed_bytes: float = 0.0, scanned: bool = False
) -> tuple[Grouping, ...]:
    """The groupings within a budget that are Pareto-optimal in peak memory and time, fastest first; empty if none fits.

    For each group size from 2 to ``layers``, only the grouping with the fewest groups that fits ``budget`` bytes is considered.
    Without a budget, all layers are in groups.

    >>> full = GroupedLayer(input_bytes=1.0, saved_bytes=0.0, extra_seconds=1.0)
    >>> fitting = groupings(64, full, 34.0, fixed_bytes=17.0, scanned=True)
    >>> [(stack.size, stack.grouped, stack.peak_bytes, stack.extra_seconds) for stack in fitting]
    [(13, 52, 34.0, 116.0), (9, 54, 33.0, 118.0), (8, 56, 32.0, 120.0)]
    """
    check_count("layers", layers)
    check_number("budget", budget, infinite=True)
    fitting = []
    for size in range(2, layers + 1):
        for grouped in (layers,) if budget == math.inf else (*range(size, layers, size), layers):
            candidate = grouping(layers, size, grouped, layer, fixed_bytes=fixed_bytes, scanned=scanned)
            if candidate.peak_bytes <= budget:
                fitting.append(candidate)
                break
    optimal: list[Grouping] = []
    for candidate in sorted(fitting, key=lambda each: (each.extra_seconds, each.peak_bytes, each.size)):
        if not optimal or candidate.peak_bytes < optimal[-1].peak_bytes:
            optimal.append(candidate)
    return tuple(optimal)


def _inside(length: int, layer: GroupedLayer, *, looped: bool) -> float:
    """Bytes that a group's backward pass needs besides all groups' inputs. ``looped``: the group is in a scan of groups."""
    scan_copies = layer.input_bytes + length * layer.gradient_bytes if looped and length > 1 else 0.0
    return (length - 1) * layer.kept_input_bytes + length * layer.saved_bytes + scan_copies


def _recomputed_seconds(length: int, layer: GroupedLayer, scanned: bool) -> float:
    if length == 1:
        return max(layer.forward_seconds, layer.extra_seconds)
    rounds = length if scanned or not layer.checkpointed else length - 1
    return rounds * layer.forward_seconds + length * layer.extra_seconds
