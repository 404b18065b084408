"""Scans of one round, which the compiler removes: their layers still follow their policy and recompute."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

import remat_jax as rj
from remat_jax import compat
from tests.gpu_text import Compiled, compile_for_h200
from tests.small_models import Mlp, assert_same, block_by_hand, equations, make_loss, values

needs_gpu_compiler = pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")

ALONE = """
import remat_jax as rj
from tests.small_models import Mlp, make_loss

loss, params, x = make_loss(layers=3, scanned=True)
params, x = jax.tree.map(lambda one: struct(one.shape), (params, x))
for name, text in {"full": "1 x full || 1 x full || 1 x full", "away": "2 x full | 1 x offload_inputs"}.items():
    keep(name, jax.grad(rj.checkpoint_blocks(loss, {Mlp: rj.LayerPolicies.parse(text)})), params, x)
"""
INPUT_BYTES = 2 * 3 * 4 * 4


def barriers(policies: str, loss: Any, *args: Any) -> list[bool]:
    """For every checkpoint in the backward pass, whether a barrier separates its recomputation."""
    gradient = jax.grad(rj.checkpoint_blocks(loss, {Mlp: rj.LayerPolicies.parse(policies)}))
    return [eqn.params["prevent_cse"] for eqn, _ in equations(gradient, *args) if "prevent_cse" in eqn.params]


def stack(kernels: Any, x: Any, **options: Any) -> Any:
    return jax.lax.scan(lambda x, kernel: (block_by_hand(kernel, x), None), x, kernels, **options)[0]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    return compile_for_h200(tmp_path_factory.mktemp("alone"), ALONE)


@needs_gpu_compiler
def test_a_layer_that_is_a_scan_by_itself_computes_again(compiled: dict[str, Compiled]) -> None:
    """Each of three layers computes its tanh twice; merged with the forward pass there would be three."""
    assert len(re.findall(r"(?<![\w-])tanh\(", compiled["full"].text)) == 6


@needs_gpu_compiler
def test_a_layer_that_is_a_scan_by_itself_offloads(compiled: dict[str, Compiled]) -> None:
    """Only its input, which stayed on the device when no barrier separated the passes."""
    assert (compiled["away"].host_temp, compiled["full"].host_temp) == (INPUT_BYTES, 0)


@pytest.mark.parametrize(
    ("policies", "expected"),
    [("4 x full", [False]), ("2 x full || 2 x full", [False] * 2), ("3 x full | 1 x dots", [False, True])],
)
def test_a_barrier_stands_where_a_scan_runs_once(policies: str, expected: list[bool]) -> None:
    """And nowhere else, because it would cost memory in a loop."""
    loss, params, x = make_loss(layers=4, scanned=True)
    assert sorted(barriers(policies, loss, params, x)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, False), ({"unroll": 2}, False), ({"unroll": 3}, True), ({"unroll": 4}, True), ({"unroll": 0}, True)],
)
def test_a_barrier_stands_where_all_rounds_are_unrolled_into_one(options: dict[str, int], expected: bool) -> None:
    counts = barriers("4 x full", lambda kernels, x: stack(kernels, x, **options).sum(), values(4, 4, 3), values(2, 4))
    assert set(counts) == {expected}


def test_a_scan_of_one_round_in_a_loop_is_in_a_loop() -> None:
    def rounds(kernels: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, kernels: (stack(kernels, x), None), x, kernels)[0].sum()

    by_shape = [barriers("2 x full", rounds, values(*shape, 4, 3), values(2, 4)) for shape in ((2, 1), (1, 2))]
    assert [set(flags) for flags in by_shape] == [{False}, {False}]
    assert set(barriers("1 x full", rounds, values(1, 1, 4, 3), values(2, 4))) == {True}


@pytest.mark.usefixtures("x64")
def test_a_loop_around_the_gradient_is_none_and_one_inside_it_is() -> None:
    """Over micro-batches: if each takes its own gradient, both passes are in one body."""
    fn = rj.checkpoint_blocks(lambda kernels, x: stack(kernels, x).sum(), {Mlp: "1 x full || 1 x full"})
    kernels, batches = values(2, 4, 3), values(3, 2, 4)

    def inside(kernels: Any) -> Any:
        return jax.lax.map(lambda x: fn(kernels, x), batches).sum()

    def around(kernels: Any) -> Any:
        return jax.lax.map(lambda x: jax.grad(fn)(kernels, x), batches).sum(0)

    for function, expected in ((jax.grad(inside), False), (around, True)):
        flags = {eqn.params["prevent_cse"] for eqn, _ in equations(function, kernels) if "prevent_cse" in eqn.params}
        assert flags == {expected}
    plain = jax.grad(lambda kernels: sum(stack(kernels, x).sum() for x in batches))(kernels)
    assert_same(jax.jit(around)(kernels), plain)
    assert_same(jax.jit(jax.grad(inside))(kernels), plain)
