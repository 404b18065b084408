"""What a search found, as the plain data of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat_jax.errors import SolverError
from remat_jax.planner import BlockPolicy, Choice, Stack, frontier, solve_counts
from remat_jax.planning.point import Part, Point, Row, unbeaten
from remat_jax.planning.problem import Described
from remat_jax.planning.search import MOST_RUNS, Candidate, Search, Tried, own_candidate, runs
from remat_jax.planning.translate import name_of, policy_text

POINTS = 12
_GIB = 2**30
_GAP, _TIME_LIMIT = 1e-3, 5.0


def outcome(described: Described, search: Search, best: Tried, remarks: Sequence[Point]) -> dict[str, Any]:
    """The fields of a `Plan` that a search decides."""
    stack = search.stack
    base = stack.base_seconds + described.outside_seconds

    def point(candidate: Candidate) -> Point:
        known = search.known(candidate)
        return Point(
            candidate.name,
            search.expected(candidate, stack),
            known.compiled.host_bytes if known else round(candidate.host_bytes),
            base + candidate.seconds,
            known is not None,
            parts_of(described, stack, candidate),
            "" if known is None or known.compiled.sound else "what is compiled of it must not be run",
        )

    tried = [point(one.candidate) for one in search.tried]
    named = [point(one) for one in search.named]
    predicted, notes = _frontier(search, stack)
    beside = [one for one in (*tried, *named, *map(point, predicted)) if not one.remark]
    return {
        "device_bytes": best.compiled.device_bytes,
        "predicted_bytes": best.predicted_bytes,
        "host_bytes": best.compiled.host_bytes,
        "seconds": base + best.candidate.seconds,
        "base_seconds": base,
        "frontier": unbeaten(beside),
        "named": (*named, *remarks),
        "parts": parts_of(described, stack, best.candidate),
        "next_gib_seconds": _next_gib(search, stack, best),
        "tried": tuple((one.candidate.name or "a plan", one.compiled.device_bytes) for one in search.tried),
        "notes": notes,
    }


def parts_of(described: Described, stack: Stack, candidate: Candidate) -> tuple[Part, ...]:
    """What the layers do, a part for each run of equal ones."""
    starts: dict[str, int] = {}
    position = 0
    for block in stack.blocks:
        starts[block.name] = position
        position += block.repeats
    kinds = {block.name: kind for block, kind in zip(stack.blocks, described.kinds, strict=True)}
    found = []
    for start, stop, block in runs(stack, candidate.choices):
        kind, policy = kinds[block.name], BlockPolicy(block, candidate.choices[start])
        extra = policy.extra_seconds(stack.link)
        found.append(
            Part(
                block=name_of(kind),
                first=kind.layers[start - starts[block.name]],
                layers=stop - start,
                policy="off" if candidate.name == "off" else policy_text(kind, policy),
                rows=tuple(
                    Row(one.name, choice.value, round(one.bytes), one.seconds)
                    for one, choice in zip(block.residuals, policy.choices, strict=True)
                    if choice is not Choice.UNUSED or one.bytes
                ),
                forward_seconds=block.forward_seconds,
                backward_seconds=block.backward_seconds,
                recompute_seconds=policy.recompute_seconds,
                copy_seconds=max(0.0, extra - policy.recompute_seconds),
            )
        )
    return tuple(found)


def _frontier(search: Search, stack: Stack) -> tuple[list[Candidate], list[str]]:
    """The planner's plans from the least memory to that of the fastest, by the stack as it was fitted."""

    def solve(budget: float) -> Any:
        return solve_counts(
            stack, budget, search.host_budget, most_policies=MOST_RUNS, gap=_GAP, time_limit=_TIME_LIMIT
        )

    try:
        return [own_candidate(stack, one) for one in frontier(solve, POINTS)], []
    except SolverError as error:
        return [], [f"The frontier has only what was compiled: {error}"]


def _next_gib(search: Search, stack: Stack, best: Tried) -> float | None:
    if best.candidate.seconds <= 0:
        return None
    found = search.solve(stack, search.budget + _GIB)
    return max(0.0, best.candidate.seconds - found.seconds) if found else 0.0
