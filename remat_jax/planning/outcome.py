"""The result of a search as the plain data of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from remat_jax.hardware import Target
from remat_jax.hardware.rates import Rates
from remat_jax.planning.candidate import FAILED, StepCandidate, Tried, runs, singles
from remat_jax.planning.choose_fastest import Times
from remat_jax.planning.point import Part, Point, next_bytes, unbeaten
from remat_jax.planning.problem import Described, busy_seconds, copy_seconds
from remat_jax.planning.propose_candidates import Proposals
from remat_jax.planning.translate import name_of, price_at, rows_of, text_of
from remat_jax.solver import Stack

POINTS = 12


def outcome(
    described: Described,
    target: Target,
    proposals: Proposals,
    times: Times,
    searched: Tried,
    best: Tried,
    remarks: Sequence[Point],
    is_over: Callable[[], bool],
) -> dict[str, Any]:
    """The fields of a `Plan` that a search decides; no further problem is solved once `is_over`.

    `searched` is the best step by the traced estimate; `best` is the plan.
    """
    fit = times.fit
    stack = fit.stack

    def point(candidate: StepCandidate) -> Point:
        known, (seconds, timed) = fit.known(candidate), times.of(candidate)
        return Point(
            candidate.name,
            None if known and known.compiled.device_bytes == FAILED else fit.shown(candidate),
            known.compiled.host_bytes if known else round(candidate.host_bytes),
            seconds,
            known is not None,
            parts_of(described, stack, candidate),
            "" if known is None or known.compiled.sound else "its compiled step must not be run",
            timed,
        )

    failed = [one for one in fit.tried if one.compiled.device_bytes == FAILED]
    tried = [point(one.candidate) for one in fit.tried]
    named = [point(one) for one in proposals.named]
    bound = None if is_over() else _lower_bound(proposals, times, best)
    next_gib = None if is_over() else _next_gib(proposals, times, searched, best)
    predicted = proposals.frontier(stack, POINTS, is_over)
    seconds, timed = times.of_compiled(best)
    beside = [one for one in (*tried, *named, *map(point, predicted)) if not one.remark]
    return {
        "device_bytes": best.compiled.device_bytes,
        "predicted_bytes": best.predicted_bytes,
        "host_bytes": best.compiled.host_bytes,
        "seconds": seconds,
        "timed": timed,
        "base_seconds": times.base,
        "lower_bound": bound,
        "frontier": unbeaten(beside),
        "named": (*named, *remarks),
        "parts": parts_of(described, stack, best.candidate),
        "assumed_rates": _assumed(best, target),
        "next_bytes": next_bytes(proposals.fit.budget),
        "next_gib_seconds": next_gib,
        "tried": tuple((one.candidate.name or "a plan", one.compiled.device_bytes) for one in fit.tried if one not in failed),
    }


def parts_of(described: Described, stack: Stack, candidate: StepCandidate) -> tuple[Part, ...]:
    """The layers' actions, a part for each run of equal layers."""
    kinds = {block.name: kind for block, kind in zip(stack.blocks, described.kinds, strict=True)}
    blocks = singles(stack)
    first = {block.name: at for at, block in reversed(list(enumerate(blocks)))}
    found = []
    for start, stop in runs(stack, candidate.choices or candidate.loads, candidate.cuts):
        block, load = blocks[start], candidate.loads[start]
        kind, layers = kinds[block.name], stop - start
        rows = rows_of(kind, block, candidate, start)
        price = price_at(described, kind, block, candidate, start)
        busy = busy_seconds(stack.link, price)
        each = [copy_seconds(stack.link, block, load.offloaded, busy, last=at == len(blocks) - 1) for at in range(start, stop)]
        found.append(
            Part(
                block=name_of(kind),
                first=kind.layers[start - first[block.name]],
                layers=layers,
                every=kind.layers.step,
                policy=text_of(kind, block, candidate, start),
                saved_bytes=layers * load.saved,
                offloaded_bytes=layers * load.offloaded,
                recomputed_bytes=layers * load.recomputed,
                rows=rows,
                forward_seconds=block.forward_seconds,
                backward_seconds=block.backward_seconds,
                recompute_seconds=price.seconds,
                copy_seconds=sum(each) / layers,
            )
        )
    return tuple(found)


def _assumed(best: Tried, target: Target) -> tuple[str, ...]:
    """The assumed rates behind the plan's time; if its schedule was not timed, only rates of products and memory."""
    time = best.compiled.sizes.time
    return time.assumed if time is not None else Rates.of(target).assumed(Rates.of(target).flops)[:2]


_ALIKE = 1 + 1e-9
"""The tolerance for equal numbers that were summed in another order."""


def _lower_bound(proposals: Proposals, times: Times, best: Tried) -> float | None:
    """A lower bound on a step's seconds under any plan; None if the solver's problem does not contain `best`.

    The problem contains no groups of layers, no rematerialisation by XLA under a memory limit, and not every array that a
    named policy may keep. The bound is for the traced estimate, and is scaled like the plan's own time.
    """
    candidate, sizes = best.candidate, best.compiled.sizes
    limited = sizes is not None and bool(sizes.limit_options)
    if limited or (candidate.effective_choices is None and candidate.name != "off"):
        return None
    extra = proposals.bound()
    # A policy priced as a whole may cost less than the sum of its residuals, and a step may need less than predicted.
    if extra > candidate.seconds * _ALIKE:
        return None
    seconds, _ = times.of_compiled(best)
    return seconds * (times.traced_base + min(extra, candidate.seconds)) / times.traced(candidate)


def _next_gib(proposals: Proposals, times: Times, searched: Tried, best: Tried) -> float | None:
    """The seconds gained by more memory, from the traced estimate scaled by the pace of the search's step.

    None if no step is faster, however much memory there is.
    """
    any_size = [*filter(None, [proposals.solve(times.fit.stack, math.inf)]), *proposals.named]
    if all(one.seconds * _ALIKE >= best.candidate.seconds for one in any_size):
        return None
    found = proposals.solve(times.fit.stack, proposals.fit.budget + next_bytes(proposals.fit.budget))
    if found is None:
        return 0.0
    (seconds, _), (start, _) = times.of_compiled(best), times.of_compiled(searched)
    return max(0.0, seconds - start * times.traced(found) / times.traced(searched.candidate))
