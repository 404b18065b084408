"""Groups of layers that share one checkpoint, for layers whose inputs do not fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from remat_jax.planning.candidate import FAILED, StepCandidate
from remat_jax.planning.known import Known
from remat_jax.policy import LayerPolicies, Policy
from remat_jax.solver.groups import GroupedLayer, Grouping, groupings

INSIDE = "full"
"""The policy of each layer of a group during the group's backward pass."""


def propose(known: Known) -> Iterable[StepCandidate]:
    """The fastest grouping that is predicted to fit, and the one of least memory, if nothing fits or the best step offloads.

    The memory is predicted from the step under `full`: except for the layers' inputs, groups need the same. There are none if
    that step could not be compiled, if there are several kinds of blocks, or if calls are in nested scans or alternate in one
    scan.
    """
    full, best = known.named_policy(INSIDE), known.best
    if len(known.kinds) != 1 or full is None or (best is not None and not best.candidate.host_bytes):
        return []
    tried = known.fit.known(full)
    if tried is None or tried.compiled.device_bytes >= FAILED:
        return []
    (kind,), (block,) = known.kinds, known.fit.guess.blocks
    if kind.program.call.nested or kind.program.call.stride != 1:
        return []
    layers, load = block.repeats, full.loads[0]
    layer = GroupedLayer(load.saved, 0.0, block.forward_seconds, full.seconds / layers, block.late_bytes)
    fixed = max(0.0, tried.compiled.device_bytes - layers * load.saved)
    fitting = groupings(layers, layer, known.fit.compiled_budget, fixed_bytes=fixed, scanned=kind.scanned)
    chosen = [*fitting[:1], *fitting[-1:]] or groupings(layers, layer, fixed_bytes=fixed, scanned=kind.scanned)[-1:]
    return [_grouped(full, grouping) for grouping in dict.fromkeys(chosen)]


def _grouped(full: StepCandidate, grouping: Grouping) -> StepCandidate:
    # A group saves one input. Its bytes are divided equally among the layers of the group.
    kept = round(full.loads[0].saved * len(grouping.groups) / grouping.grouped)
    loads = tuple(replace(load, saved=kept) for load in full.loads[: grouping.grouped]) + full.loads[grouping.grouped :]
    return StepCandidate(
        full.kept,
        groups=grouping.groups,
        source="groups",
        name=str(LayerPolicies.of([Policy.parse(INSIDE)] * grouping.layers, groups=grouping.groups)),
        loads=loads,
        seconds=grouping.extra_seconds,
        expected_bytes=round(grouping.peak_bytes),
    )
