"""Every array of random blocks, selected alone by its name: it is kept, or the selector is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import jax
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

import remat_jax as rj
from remat_jax.errors import NoEffectError
from tests.fault.programs import Program, arguments, programs
from tests.fault.stacks import LinenBlock, Stack

SLICE = 25
"""Blocks drawn with one seed."""


def check_selectors(blocks: int, seed: int, say: Callable[[str], None]) -> int:
    """How many selectors of so many random blocks keep nothing, and are no error."""
    counts: Counter[str] = Counter()
    for number, begin in enumerate(range(0, blocks, SLICE)):

        @seeded(10_000 * seed + number)
        @settings(
            max_examples=min(SLICE, blocks - begin),
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(programs())
        def every(program: Program) -> None:
            found = outcomes(program)
            counts.update(found.values())
            for name in (name for name, outcome in found.items() if outcome == "wrong"):
                say(f"WRONG: 'save: {name}' keeps nothing of {program}")

        every()
        say(f"{begin + SLICE} blocks: {counts['kept']} selectors keep what they name, {counts['refused']} are errors")
    return counts["wrong"]


def outcomes(program: Program) -> dict[str, str]:
    """By the name of each array that the backward pass may read: `kept`, `refused` or `wrong`."""
    with jax.enable_x64(True):
        params, x, ids, keys = jax.eval_shape(lambda: arguments(2))
        loss = Stack(program, 2, "linen", "none").plain()
        job = rj.Workload(lambda given, *batch: loss(*given, *batch)[0], (params, x), (ids, keys), LinenBlock)
        return {name: _outcome(job, name) for name in _saved(job, "everything") - _saved(job, "full")}


def _saved(job: rj.Workload, policy: str) -> set[str]:
    return {row.name for row in rj.residuals(job, policy).rows if row.action == "save" and ":" in row.name}


def _outcome(job: rj.Workload, name: str) -> str:
    try:
        return "kept" if name in _saved(job, f"save: {name}") else "wrong"
    except NoEffectError:
        return "refused"
