"""The compiled time decides among compiled steps that fit; other steps are estimated at their pace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.hardware import target
from remat_jax.planning import make_plan
from remat_jax.planning.candidate import Compiled, Load, StepCandidate, Tried
from remat_jax.planning.choose_fastest import TIME_ERROR, Times, as_written, choose_fastest, counted_flops
from remat_jax.planning.fit_memory import Fit
from remat_jax.planning.plan_data import Point, next_bytes
from remat_jax.planning.problem import describe
from remat_jax.planning.translate import named_candidate
from tests.plan_by_hand import plan
from tests.plan_models import MlpLayer, job
from tests.test_plan_search import STACK


def tried(name: str, traced: float, seconds: float | None, away: int = 0) -> Tried:
    sizes = SimpleNamespace(seconds=seconds)
    return Tried(
        StepCandidate(name, (Load(round(100 * traced), 0, away),) * 6, traced), Compiled(1000, 6 * away, sizes=sizes), 0
    )


def test_what_is_compiled_fastest_is_the_plan_whatever_was_traced() -> None:
    full, dots, off = tried("full", 3.0, 26.0), tried("dots", 1.0, 28.0), tried("off", 0.0, 31.0)
    chosen, notes = choose_fastest(off, [full, dots, off])
    assert chosen is full, "a named policy that was compiled, fits and is faster as compiled"
    assert notes == ["As compiled, full is 16.1 % faster than off, which the traced estimate ranks first"]
    assert choose_fastest(full, [full]) == (full, [])


def test_where_a_step_has_no_compiled_time_the_search_decides() -> None:
    full, dots = tried("full", 3.0, 26.0), tried("dots", 1.0, None)
    assert choose_fastest(dots, [full, dots]) == (dots, [])


@pytest.mark.parametrize(
    ("simple", "mixed"),
    [
        (tried("full", 2.0, 100.0), tried("", 1.0, 97.0)),
        (tried("full", 2.0, 100.0), tried("dots", 1.0, 97.0, away=9)),
        (tried("", 2.0, 100.0), tried("", 1.0, 97.0, away=9)),
    ],
)
def test_the_simpler_step_is_the_plan_where_the_estimate_cannot_tell_them_apart(simple: Tried, mixed: Tried) -> None:
    chosen, notes = choose_fastest(mixed, [mixed, simple])
    assert (
        chosen is simple
        and notes[0].startswith("As compiled, ")
        and "3.0 % faster. The estimate cannot tell apart times within 4 %" in notes[0]
    )
    far = tried(simple.candidate.name, 2.0, 97.0 / (1 - 1.1 * TIME_ERROR))
    assert choose_fastest(mixed, [mixed, far]) == (mixed, [])


def test_what_was_not_compiled_is_estimated_at_the_pace_of_what_was() -> None:
    fit = Fit(STACK, 1e6)
    fit.tried = [tried("full", 2.0, 24.0), tried("dots", 0.5, 31.5), tried("off", 0.0, 20.0)]
    times = Times(fit, 10.0, 1.0)
    assert (times.pace, times.base) == (2.0, 20.0)
    without_off = Fit(STACK, 1e6)
    without_off.tried = fit.tried[:1]
    assert Times(without_off, 10.0, 1.0).base == 2.0 * 11.0
    assert times.of(fit.tried[1].candidate) == (31.5, True)
    assert times.of(tried("other", 4.0, None).candidate) == (28.0, False)
    fit.tried.append(tried("everything", 0.1, None))
    times = Times(fit, 10.0, 1.0)
    assert (times.pace, times.of(fit.tried[0].candidate)) == (1.0, (12.0, False)), "of a kind, or none"


def test_the_text_tells_compiled_times_from_estimates() -> None:
    named = (Point("full", 9, 0, 0.011, True, timed=True), Point("dots", 10, 0, 0.012, False))
    made = plan(named=named, seconds=0.0105, base_seconds=0.0125, timed=True, assumed_rates=("flops",), next_bytes=2**28)
    text = made.explain()
    assert "Estimated 8.9 ms to 14 ms per step (compiled schedule), 1.7 ms to 2.7 ms less than keeping everything" in text
    assert "The best named policy that fits, full, takes 9.3 ms to 15 ms." in text and "256 MiB more would save" in text
    assert [next_bytes(size * 2**30) / 2**30 for size in (2, 4, 16, 80)] == [0.125, 0.25, 1, 1]


def test_a_model_as_written_lies_between_keeping_everything_and_full(monkeypatch) -> None:
    """By the products that its own checkpoints recompute: half of those of `full` here."""
    monkeypatch.setattr(f"{as_written.__module__}.counted_flops", lambda workload, policy: 50 if policy == "off" else 100)
    times = SimpleNamespace(compiled=False, pace=2.0, traced_base=10.0, keeping_everything=1.0)
    point = as_written(
        SimpleNamespace(blocks=("Layer",)), times, StepCandidate("full", (), 3.0), lambda *_: [Compiled(7, 0)], None
    )
    assert (point.seconds, point.device_bytes, point.timed) == (2.0 * (10.0 + 0.5 * 1.0 + 0.5 * 3.0), 7, False)


@pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")
def test_full_is_compiled_too_where_the_traced_estimate_is_near(monkeypatch) -> None:
    """In a scan keeping may cost more than the traced estimate says: `full` is the fastest of the compiled steps here."""
    work, searched = job(scanned=True), []
    monkeypatch.setattr(
        make_plan, "choose_fastest", lambda first, tried: searched.append(first) or choose_fastest(first, tried)
    )
    made = rj.plan(work, "16 MiB", "h200")
    (best,) = searched
    # The derivative of tanh, and so the traced time of `dots`, depends on JAX: `dots` is compiled only if it is near too.
    described = describe(work, target("h200"))
    traced = {name: described.base_seconds + named_candidate(described, name).seconds for name in ("full", "dots")}
    lowest = described.base_seconds + best.candidate.seconds
    near = {name for name, seconds in traced.items() if seconds <= 1.1 * lowest}
    assert not best.candidate.name and lowest < traced["full"] and "full" in near
    assert {name for name, _ in made.tried} == {"off", "a plan"} | near and len(made.tried) == 2 + len(near)
    assert made.timed and dict(made.policies) == {MlpLayer: rj.Policy.parse("recompute: *")}
    assert made.seconds == rj.measure(work, "full", "h200").seconds


def test_recomputed_flops_are_those_of_two_traced_steps() -> None:
    work = job(scanned=True)
    made = rj.plan(work, "9 MiB", "cpu")
    assert made.recompute_flops == counted_flops(work, dict(made.policies)) > 0
