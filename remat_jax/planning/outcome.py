"""Converts the result of a search to the plain data of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from remat_jax.hardware import Target
from remat_jax.hardware.rates import Rates
from remat_jax.memory.step_time.schedule import StepTime
from remat_jax.planning.candidate import FAILED, StepCandidate, Tried, runs, singles
from remat_jax.planning.generators import more, without_host
from remat_jax.planning.generators.groups import INSIDE
from remat_jax.planning.known import Known
from remat_jax.planning.model import block_name
from remat_jax.planning.plan_data import LayerRow, Part, Point, next_bytes, unbeaten
from remat_jax.planning.problem import KEEP_ALL, Described, Kind, busy_seconds, copy_seconds
from remat_jax.planning.translate import choices_of, policy_of
from remat_jax.policy import Policy
from remat_jax.report.tables import format_estimate
from remat_jax.solver import Block, BlockPolicy, Choice, Stack

POINTS = 12


def outcome(
    described: Described, target: Target, known: Known, best: Tried, remarks: Sequence[Point], is_over: Callable[[], bool]
) -> dict[str, Any]:
    """The fields of a `Plan` that a search decides. Once `is_over` returns True, no further problem is solved.

    `best` is the plan's step, and `remarks` are further points for `named`.
    """
    fit, times = known.fit, known.times
    stack = fit.stack

    def point(candidate: StepCandidate) -> Point:
        tried, (seconds, timed) = fit.known(candidate), times.of(candidate)
        failed, shown = tried is not None and tried.compiled.device_bytes == FAILED, fit.shown(candidate)
        too_large = fit.within(candidate) < shown <= fit.budget and candidate != best.candidate
        is_sure = tried is not None and tried.compiled.more is not None
        return Point(
            candidate.name,
            None if failed else shown,
            tried.compiled.host_bytes if tried else round(candidate.host_bytes),
            seconds,
            tried is not None,
            parts_of(described, stack, candidate),
            _remark(tried) or too_large * f"{'' if is_sure else 'probably '}too large with cuBLAS",
            timed,
        )

    tried = [point(step.candidate) for step in fit.tried]
    shown = [*known.named, *([] if known.as_written is None else [known.as_written])]
    named = [point(candidate) for candidate in shown]
    bound = None if is_over() else _lower_bound(known, best)
    next_gib = None if is_over() else gain_of_more_memory(known, best)
    predicted = known.solved.frontier(stack, POINTS, is_over)
    seconds, timed = times.of(best.candidate)
    # The promises are about the plan's step, which may be a simpler one than the fastest.
    is_best = known.best is best
    return {
        "device_bytes": best.compiled.device_bytes,
        "predicted_bytes": best.predicted_bytes,
        "host_bytes": best.compiled.host_bytes,
        "seconds": seconds,
        "timed": timed,
        "base_seconds": base_seconds(known),
        "lower_bound": bound,
        "frontier": unbeaten([step_point for step_point in (*tried, *named, *map(point, predicted)) if not step_point.remark]),
        "named": (*named, *remarks),
        "parts": parts_of(described, stack, best.candidate),
        "assumed_rates": assumed_rates(best.compiled.sizes.time, target),
        "next_bytes": next_bytes(fit.budget),
        "next_gib_seconds": next_gib,
        "tried": tuple((step.candidate.name or "a plan", step.compiled.device_bytes) for step in fit.compiled),
        "is_maximal": is_best and more.is_maximal(known),
        "offload_needed": without_host.offload_needed(known, best.candidate),
    }


def base_seconds(known: Known) -> float:
    """The seconds of a step that keeps everything, as the table of named policies shows it: compiled if one was compiled."""
    everything = [known.times.of(candidate) for candidate in known.named if candidate.name in KEEP_ALL]
    return min([seconds for seconds, timed in everything if timed] or [seconds for seconds, _ in everything])


def _remark(tried: Tried | None) -> str:
    """Why the plan cannot be this compiled step; empty if it can."""
    if tried is None or tried.compiled.sound:
        return ""
    if tried.compiled.device_bytes == FAILED:
        return "it was not compiled in time" if tried.compiled.late else "it could not be compiled"
    return "the compiler refuses it: too large" if tried.compiled.refused else "its compiled step must not be run"


def parts_of(described: Described, stack: Stack, candidate: StepCandidate) -> tuple[Part, ...]:
    """The layers' actions, with one `Part` per run of equal layers. Calls of another block may be between them."""
    kinds = {block.name: kind for block, kind in zip(stack.blocks, described.kinds, strict=True)}
    blocks = singles(stack)
    first = {block.name: at for at, block in reversed(list(enumerate(blocks)))}
    parts: list[Part] = []
    before = None
    grouped = max((end for _, end in candidate.groups), default=0)
    for start, stop in runs(stack, [(kept, at < grouped) for at, kept in enumerate(candidate.kept)], candidate.cuts):
        block, load = blocks[start], candidate.loads[start]
        kind, layers = kinds[block.name], stop - start
        policy, text, choices = _policy_at(kind, block, candidate, start)
        # Price the whole policy: a named policy may also keep arrays that are not residuals of the solver.
        price = kind.program.price(policy)
        if start < grouped:
            # The backward pass first recomputes the whole group, then each layer.
            price = replace(price, seconds=price.seconds + block.forward_seconds)
        busy = busy_seconds(stack.link, price)
        each = [copy_seconds(stack.link, block, load.offloaded, busy, last=at == len(blocks) - 1) for at in range(start, stop)]
        part = Part(
            block=block_name(kind.block),
            first=kind.layers[start - first[block.name]],
            layers=layers,
            every=kind.layers.step,
            policy=text,
            saved_bytes=layers * load.saved,
            offloaded_bytes=layers * load.offloaded,
            recomputed_bytes=layers * load.recomputed,
            rows=_rows(kind, block, choices),
            forward_seconds=block.forward_seconds,
            backward_seconds=block.backward_seconds,
            recompute_seconds=price.seconds,
            copy_seconds=sum(each) / layers,
        )
        # Adjacent runs of one kind that act alike are separate because the scan is cut between them. Layers of several kinds,
        # such as Haiku's, which draw different keys, may act alike too.
        _add(part, parts, may_extend=before is not kind)
        before = kind
    return tuple(parts)


def _add(part: Part, parts: list[Part], may_extend: bool) -> None:
    """Append the part; or extend the earlier part that it continues."""
    for at in range(len(parts) - 1, -1, -1) if may_extend else ():
        earlier = parts[at]
        step = part.first - earlier.first - (earlier.layers - 1) * earlier.every
        steps = {each.every for each in (earlier, part) if each.layers > 1} | {step}
        if earlier.block == part.block and steps in ({1}, {2}) and _of_one(earlier) == _of_one(part):
            layers = earlier.layers + part.layers
            copies = earlier.layers * earlier.copy_seconds + part.layers * part.copy_seconds
            sums = {name: getattr(earlier, name) + getattr(part, name) for name in _SUMS}
            parts[at] = replace(earlier, layers=layers, every=step, copy_seconds=copies / layers, **sums)
            return
    parts.append(part)


_SUMS = ("saved_bytes", "offloaded_bytes", "recomputed_bytes")


def _of_one(part: Part) -> Part:
    """The part of one of its layers, at position 0; the time of its copies left out."""
    sums = {name: getattr(part, name) // part.layers for name in _SUMS}
    return replace(part, first=0, layers=1, every=1, copy_seconds=0.0, **sums)


def _policy_at(kind: Kind, block: Block, candidate: StepCandidate, at: int) -> tuple[Policy, str, Sequence[Choice]]:
    """The policy of the block at index `at` of the stack, its text, and its choices."""
    if candidate.name:
        policy = Policy.parse(INSIDE if candidate.groups else candidate.name if candidate.checkpoints else "off")
        return policy, candidate.name, choices_of(kind, block, policy)
    assert candidate.choices is not None, "a mix is made of the solver's choices"
    choices = candidate.choices[at]
    policy = policy_of(kind, BlockPolicy(block, choices))
    return policy, policy.name or str(policy), choices


def _rows(kind: Kind, block: Block, choices: Sequence[Choice]) -> tuple[LayerRow, ...]:
    """The action for each residual of a block; unused residuals are left out."""
    rows = []
    for residual, choice in zip(block.residuals, choices, strict=True):
        # Remove the block's path, which differs in each layer.
        name = residual.name.removeprefix(kind.paths[0]).lstrip("/:") or residual.name
        if choice is not Choice.UNUSED:
            rows.append(LayerRow(name, choice.value, round(residual.bytes), residual.seconds))
    return tuple(rows)


def assumed_rates(time: StepTime | None, target: Target) -> tuple[str, ...]:
    """The names of the assumed rates that a time uses. A traced estimate, None, uses only the rates of matmuls and memory."""
    return time.assumed if time is not None else Rates.of(target).assumed(Rates.of(target).flops)[:2]


def time_of(tried: Tried, seconds: float, target: Target) -> str:
    """The estimated seconds of a compiled step as text, as the plan's tables show them."""
    return format_estimate(seconds, bool(assumed_rates(getattr(tried.compiled.sizes, "time", None), target)))


_ALIKE = 1 + 1e-9
"""Two sums count as equal up to this factor, because the same numbers may be added in different orders."""


def _lower_bound(known: Known, best: Tried) -> float | None:
    """A lower bound on a step's seconds under any plan; None if the solver's bound does not apply to `best`.

    The solver's problem lacks groups of layers, XLA's rematerialisation under a memory limit, and some arrays that a named
    policy may keep. The solver bounds the traced estimate; this bound is scaled to the plan's time.
    """
    candidate, times = best.candidate, known.times
    if candidate.choices is None and (candidate.name != "off" or candidate.memory_limit is not None):
        return None
    # What other kernels need more is different for each step, so the whole budget bounds them all.
    extra = known.solved.bound(known.fit.budget)
    # The plan may be faster than the bound, because a whole policy may cost less than the sum of its residuals, or because the
    # step needs less memory than predicted.
    if extra > candidate.seconds * _ALIKE:
        return None
    seconds, _ = times.of(candidate)
    return seconds * (times.traced_base + min(extra, candidate.seconds)) / times.traced(candidate)


def gain_of_more_memory(known: Known, best: Tried) -> float | None:
    """The seconds by which a step is faster with `next_bytes` more memory; None if no plan is faster.

    A step that was compiled counts with its compiled memory and time, any other with its estimates. A faster plan within the
    budget, which a longer search may find, needs no more memory.
    """
    stack, fit, seconds = known.fit.stack, known.fit, known.seconds(best.candidate)
    anything = known.solved.plan(stack, math.inf)
    of_any_size = [*([] if anything is None else [anything]), *known.named]
    if all(known.seconds(candidate) * _ALIKE >= seconds for candidate in of_any_size):
        return None
    more = next_bytes(fit.budget)
    larger = known.solved.plan(stack, fit.compiled_budget + more)
    sound = [step for step in fit.compiled if step.compiled.sound]
    within = [step.candidate for step in sound if step.compiled.device_bytes <= fit.within(step.candidate) + more]
    if larger is not None and fit.known(larger) is None:
        within.append(larger)
    now = known.solved.plan(stack, fit.compiled_budget)
    if now is not None and fit.known(now) is None:
        seconds = min(seconds, known.seconds(now))
    return max([0.0, *(seconds - known.seconds(candidate) for candidate in within)])
