"""Candidates that keep less than `full`: several layers share one checkpoint, for when the blocks' inputs alone do not fit."""

from __future__ import annotations

from dataclasses import replace

from remat_jax import compat
from remat_jax.planning.candidate import FAILED, StepCandidate
from remat_jax.planning.problem import Described
from remat_jax.policy import LayerPolicies, Policy
from remat_jax.solver.groups import GroupedLayer, Grouping, groupings
from remat_jax.workload import Workload

_INSIDE = "full"
"""The policy of each layer of a group during the group's backward pass."""

MOST_GROUPED = 2
"""The most groupings that are compiled."""


def grouped_candidates(
    workload: Workload, described: Described, full: StepCandidate, full_bytes: int, budget: int
) -> list[StepCandidate]:
    """The fastest and the leanest grouping of the layers that are predicted to fit; only the leanest if none fits.

    Empty if the blocks are of several kinds or in nested loops.

    Args:
      full, full_bytes: the policy `full`, and the compiled or predicted device bytes of its step.
    """
    (kind, *others), (block, *_) = described.kinds, described.stack.blocks
    if others or kind.program.call.nested or kind.program.call.stride != 1 or full_bytes >= FAILED:
        return []
    layers, load = block.repeats, full.loads[0]
    gradients = compat.tree_bytes(workload.params) / layers
    layer = GroupedLayer(load.saved, 0.0, block.forward_seconds, full.seconds / layers, gradients if kind.scanned else 0.0)
    # Except for the layers' inputs, groups need the same memory as `full`.
    fixed = max(0.0, full_bytes - layers * load.saved)
    fitting = groupings(layers, layer, float(budget), fixed_bytes=fixed, scanned=kind.scanned)
    chosen = [*fitting[:1], *fitting[-1:]] or groupings(layers, layer, fixed_bytes=fixed, scanned=kind.scanned)[-1:]
    return [_candidate(full, grouping) for grouping in dict.fromkeys(chosen)][:MOST_GROUPED]


def _candidate(full: StepCandidate, grouping: Grouping) -> StepCandidate:
    policies = LayerPolicies.of([Policy.parse(_INSIDE)] * grouping.layers, groups=grouping.groups)
    # A group keeps one input, which is shared out among its layers.
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
