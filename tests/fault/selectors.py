"""Selects every array of random blocks by its name alone: it is kept, or the selector is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.extend as jex
import jax.numpy as jnp

import remat_jax as rj
from remat_jax.apply.audit import check_differentiated
from remat_jax.apply.scope import tracing_anew
from remat_jax.core import noting_differentiated
from remat_jax.core.block import Differentiated
from remat_jax.errors import NoEffectError
from remat_jax.memory.residuals import kept_residuals
from remat_jax.policy import Candidate
from tests.fault.checks import CLOSED_OVER
from tests.fault.programs import Program, arguments, programs
from tests.fault.stacks import Stack
from tests.fault.tally import for_each
from tests.small_models import times

SLICE = 25
"""Blocks drawn with one seed."""


def check_selectors(blocks: int, seed: int, say: Callable[[str], None]) -> int:
    """The number of selectors of random blocks that keep nothing and are no error."""
    counts: Counter[str] = Counter()

    def count(program: Program) -> None:
        try:
            by_name = outcomes(program)
        except Exception as error:
            if CLOSED_OVER not in str(error):
                raise
            by_name = {"": "block"}
        counts.update(by_name.values())
        for name in (name for name, outcome in by_name.items() if outcome == "wrong"):
            say(f"WRONG: 'save: {name}' keeps nothing of {program}")

    for number, begin in enumerate(range(0, blocks, SLICE)):
        for_each(programs(), min(SLICE, blocks - begin), 10_000 * seed + number, count)
        by_jax = f", {counts['block']} blocks JAX refuses" if counts["block"] else ""
        say(f"{begin + SLICE} blocks: {counts['kept']} selectors keep what they name, {counts['refused']} are errors{by_jax}")
    return counts["wrong"]


def outcomes(program: Program) -> dict[str, str]:
    """For the name of each array of two layers, read by the backward pass or not: `kept`, `refused` or `wrong`.

    The first layer's input is not differentiated.
    """
    with jax.enable_x64(True):
        params, x, ids, keys = jax.eval_shape(lambda: arguments(2))
        block = _traced(program, *jax.tree.map(lambda leaf: leaf.update(shape=leaf.shape[1:]), (params, keys)), x, ids)
        loss = Stack(program, 2, "linen", "none").loss_of(lambda weights, *rest: block.apply({"params": weights}, *rest))
        job = rj.Workload(lambda given, *batch: loss(given, *batch)[0], params, (x, ids, keys), TracedBlock)
        with tracing_anew(), noting_differentiated() as blocks:
            full = _saved(job, "full")
        candidates = {candidate.name: candidate for block, _ in blocks for candidate in block.candidates}
        chosen = [candidate for name, candidate in candidates.items() if ":" in name and not candidate.is_input]
        refused = [candidate for candidate in chosen if _refused(blocks, f"save: {candidate.name}")]
        # The error comes from the existing trace; the first refused selector shows that the loss raises it too.
        asked = [candidate for candidate in chosen if candidate not in refused[1:]]
        return dict.fromkeys((candidate.name for candidate in refused), "refused") | {
            candidate.name: _outcome(job, candidate, full) for candidate in asked
        }


def _refused(blocks: Differentiated, text: str) -> bool:
    policy = rj.Policy.parse(text)
    try:
        check_differentiated([(replace(block, policy=policy), live) for block, live in blocks], [policy])
    except NoEffectError:
        return True
    return False


class TracedBlock(nn.Module):
    """A program that was traced once: hundreds of selectors use the same equations."""

    function: Callable[..., Any]

    @nn.compact
    def __call__(self, x: Any, ids: Any, key: Any) -> Any:
        weights = {name: self.variable("params", name, jnp.zeros, ()).value for name in "wz"}
        return self.function(weights, x, ids, key)


def _traced(program: Program, weights: Any, key: Any, x: Any, ids: Any) -> TracedBlock:
    layer = Stack(program, 1, "remat", "none")._layer
    jaxpr, shape = jax.make_jaxpr(layer, return_shape=True)(weights, x, ids, key)
    equations = jex.core.jaxpr_as_fun(jaxpr)

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(shape), equations(*jax.tree.leaves(args)))

    return TracedBlock(run)


def _saved(job: rj.Workload, policy: str) -> set[tuple[str, int, int]]:
    return {(row.name, row.count, row.bytes) for row in kept_residuals(job, policy).rows if row.action == "save"}


def _outcome(job: rj.Workload, candidate: Candidate, full: set[tuple[str, int, int]]) -> str:
    policy = f"save: {candidate.name}"
    try:
        if _saved(job, policy) != full:
            return "kept"
    except NoEffectError:
        return "refused"
    # A layer's result is kept for the next layer: if its own layer reads it too, it is not recomputed.
    steps = [job.step(policy), job.step("full")]
    made, again = (times(candidate.primitive, step.function, *step.arguments) for step in steps)
    return "kept" if made < again else "wrong"
