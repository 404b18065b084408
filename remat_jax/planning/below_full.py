"""Candidates that keep less than `full`: groups of layers, each one checkpoint, where the blocks' inputs alone are too much."""

from __future__ import annotations

from dataclasses import replace

from remat_jax import compat
from remat_jax.planning.candidate import FAILED, StepCandidate
from remat_jax.planning.problem import Described
from remat_jax.policy import LayerPolicies, Policy
from remat_jax.solver.groups import GroupedLayer, Grouping, groupings
from remat_jax.workload import Workload

_INSIDE = "full"
"""What each layer of a group is under, while the group's backward pass runs."""

MOST_GROUPED = 2
"""So many ways to group the layers are compiled."""


def grouped_candidates(
    workload: Workload, described: Described, full: StepCandidate, full_bytes: int, budget: int
) -> list[StepCandidate]:
    """Ways to group the layers that are predicted to fit, the fastest and the leanest; the leanest where none is.

    Empty where the blocks are of several kinds or in nested loops.

    Args:
      full, full_bytes: the policy, and the device bytes of the step under it, as compiled or as predicted.
    """
    (kind, *others), (block, *_) = described.kinds, described.stack.blocks
    if others or kind.program.call.nested or kind.program.call.stride != 1 or full_bytes >= FAILED:
        return []
    layers, load = block.repeats, full.loads[0]
    gradients = compat.tree_bytes(workload.params) / layers
    layer = GroupedLayer(load.saved, 0.0, 0.0, block.forward_seconds, full.seconds / layers, gradients if kind.scanned else 0.0)
    # All that is there under `full` besides the layers' inputs is there in groups, too.
    fixed = max(0.0, full_bytes - layers * load.saved)
    found = groupings(layers, layer, float(budget), fixed_bytes=fixed, scanned=kind.scanned)
    chosen = [*found[:1], *found[-1:]] or groupings(layers, layer, fixed_bytes=fixed, scanned=kind.scanned)[-1:]
    return [_candidate(full, one) for one in dict.fromkeys(chosen)][:MOST_GROUPED]


def _candidate(full: StepCandidate, grouping: Grouping) -> StepCandidate:
    policies = LayerPolicies.of([Policy.parse(_INSIDE)] * grouping.layers, groups=grouping.groups)
    # A group keeps one input: each of its layers counts with its part of that.
    kept = round(full.loads[0].saved * len(grouping.groups) / grouping.grouped)
    grouped = tuple(replace(load, saved=kept) for load in full.loads[: grouping.grouped])
    return StepCandidate(
        name=str(policies),
        loads=grouped + full.loads[grouping.grouped :],
        seconds=grouping.extra_seconds,
        inside=_INSIDE,
        grouped=grouping.grouped,
        expected_bytes=round(grouping.peak_bytes),
    )
