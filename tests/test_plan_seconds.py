"""The time of the compiled step is the last word of a plan; the traced estimate is brought to its pace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.graph.cost import flat_cost
from remat_jax.hardware.rates import Rates
from remat_jax.memory.shares import Shares
from remat_jax.planning.blocks import calls
from remat_jax.planning.candidate import Candidate, Compiled, Tried
from remat_jax.planning.division import divided
from remat_jax.planning.fit import Fit
from remat_jax.planning.fitting import Load, predicted
from remat_jax.planning.make import _Making
from remat_jax.planning.program import block_program
from tests.test_plan_search import NAMED, STACK, TRUTH, Searched, own


def compiled(size: int, seconds: float | None) -> Compiled:
    return Compiled(size, 0, sizes=SimpleNamespace(seconds=seconds))


def candidate(name: str, seconds: float) -> Candidate:
    return Candidate(name, (Load(round(100 * seconds), 0, 0),) * 6, seconds)


def fit(*tried: tuple[str, float, float | None]) -> Fit:
    """A fit of steps that all fit: name, traced seconds over the base of 10, compiled seconds."""
    found = Fit(STACK, 1e6, base_seconds=10.0)
    found.tried = [Tried(candidate(name, traced), compiled(1000, seconds), 0) for name, traced, seconds in tried]
    return found


def test_what_is_compiled_fastest_is_best_whatever_was_traced() -> None:
    found = fit(("full", 3.0, 26.0), ("dots", 1.0, 27.0))
    assert found.best is not None and found.best.candidate.name == "full"
    assert fit(("full", 3.0, None), ("dots", 1.0, None)).best.candidate.name == "dots"  # type: ignore[union-attr]


def test_what_is_not_compiled_is_estimated_at_the_pace_of_what_is() -> None:
    found = fit(("full", 2.0, 24.0), ("dots", 0.0, 30.0), ("off", 6.0, 32.0))
    assert found.pace == 2.0, "the median of 2, 3 and 2"
    assert found.seconds(candidate("other", 4.0)) == 28.0 and found.seconds(found.tried[1].candidate) == 30.0
    # In the terms of the traced estimate, to be compared with what was not compiled.
    assert [found.extra(one) for one in found.tried] == [2.0, 5.0, 6.0]
    assert Fit(STACK, 1.0).pace == 1.0


def test_a_named_policy_that_beats_the_compiled_best_is_compiled() -> None:
    """By the traced estimate the plan is faster than `dots`; compiled, it waits, and `dots`, which fits, is asked about."""
    asked: list[str] = []

    def compile_them(candidates: Any) -> list[Compiled]:
        asked.extend(one.name or "plan" for one in candidates)
        waits = [0.0 if one.name else 6.0 for one in candidates]
        return [
            compiled(round(predicted(TRUTH, one.loads)), STACK.base_seconds + one.seconds + wait)
            for one, wait in zip(candidates, waits, strict=True)
        ]

    able = [own((choices,) * 6, STACK, name) for name, choices in NAMED.items()]
    best = Searched(5700, able, compile_them).run()
    assert "plan" in asked and best.candidate.name == "dots" and best.compiled.seconds is not None


def making(found: Fit) -> Any:
    made = object.__new__(_Making)
    made.fit, made.notes = found, []
    return made


def test_a_named_policy_that_is_as_fast_takes_the_place_of_a_plan() -> None:
    found = fit(("", 1.0, 20.0), ("dots", 1.0, 20.05))
    assert making(found)._simpler(found.tried[0]).candidate.name == "dots"
    found = fit(("", 1.0, 20.0), ("dots", 1.0, 20.5))
    made = making(found)
    assert made._simpler(found.tried[0]).candidate.name == ""
    assert made.notes == [
        "Estimated 2.4 % faster than dots, which fits too: less than the 4 % that the estimate can tell apart"
    ]
    found = fit(("", 1.0, 20.0), ("dots", 1.0, 25.0))
    made = making(found)
    assert made._simpler(found.tried[0]).candidate.name == "" and made.notes == []


class Experts(nn.Module):
    """A block that adds up into zeros, as a dispatch to experts does."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        zeros = jnp.zeros((4, *x.shape))
        placed = zeros.at[1].add(nn.Dense(64, name="up")(x))
        return x + nn.Dense(x.shape[-1], name="down")(jnp.sin(placed).sum(0))


def test_a_constant_that_the_compiler_leaves_whole_does_not_make_its_block_slow() -> None:
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    model = Experts()
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    job = rj.Workload(lambda params, x: model.apply(params, x).sum(), params, (x,), Experts)
    program = block_program(calls(job)[0])
    before = flat_cost(program.flat.eqns, program.flat.outputs)
    names = {name for array in program.arrays for name in array.names}
    zeros = next(name for name in names if "broadcast_in_dim" in name and name not in program.inputs)
    everything = dict.fromkeys(names, 1 / 8)
    eighth, with_whole = (divided(program, Shares(shares, 1 / 8)) for shares in (everything, everything | {zeros: 1.0}))
    rates = Rates({"float32": 1e9, "tensorfloat32": 1e9}, 1e9)
    for one in (eighth.forward, eighth.backward):
        assert one.seconds(rates) < program.forward.seconds(rates) + program.backward.seconds(rates)
    assert with_whole.forward.seconds(rates) == pytest.approx(eighth.forward.seconds(rates))
    assert with_whole.backward.seconds(rates) == pytest.approx(eighth.backward.seconds(rates))
    assert flat_cost(program.flat.eqns, program.flat.outputs) == before, "the program that is given stays as it is"
    assert all(array.share == 1.0 for array in program.arrays)
