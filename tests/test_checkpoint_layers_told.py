"""Policies by layer: reports, offload and errors by layer, and scans of one round, which the compiler removes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.cost.count import matmuls
from remat_jax.errors import NoEffectError, UnsupportedError
from remat_jax.memory.hlo.live import module_path
from remat_jax.memory.measure import measure_many
from tests.gpu_text import compile_for_h200
from tests.small_models import Mlp, assert_same, block_by_hand, equations, make_loss, to_host, values
from tests.workloads import perceptrons


def test_offloaded_layers_and_their_neighbours_are_linked() -> None:
    loss, params, x = make_loss(layers=5)

    def links(policies: str) -> list[int]:
        fn = rj.checkpoint_blocks(loss, {Mlp: policies})
        traced_equations = equations(lambda *args: jax.jvp(fn, args, args), params, x)
        return [len(eqn.params["before"]) for eqn, _ in traced_equations if eqn.primitive.name == "tied_linear"]

    assert links("5 x offload_inputs") == [0, 1, 1, 1, 1]
    # The first block that keeps its residuals fetches for the block before it; the next block has nothing to fetch.
    assert links("3 x offload_inputs | 2 x full") == [0, 1, 1, 1, 0]
    assert links("2 x full | 3 x offload_inputs") == [0, 1, 1]
    assert links("2 x offload_inputs | 3 x offload: *tanh*") == [0, 1, 1, 1, 1]


def test_scanned_layers_are_on_the_host_where_their_policy_says() -> None:
    loss, params, x = make_loss(layers=5, scanned=True)
    job = rj.Workload(loss, params, (x,), blocks=Mlp)
    input_bytes = 4 * x.size
    tables = {text: rj.residuals(job, text) for text in ("offload_inputs", "2 x full | 3 x offload_inputs", "5 x full")}
    assert [table.host_bytes for table in tables.values()] == [5 * input_bytes, 3 * input_bytes, 0]
    assert {row.shape for row in tables["2 x full | 3 x offload_inputs"] if row.action == "offload"} == {(3, *x.shape)}
    fn = rj.checkpoint_blocks(loss, {Mlp: "2 x full | 3 x offload_inputs"})
    assert to_host(jax.grad(fn), params, x) == [x.shape]


def test_cutting_a_scan_copies_no_parameters_on_a_gpu() -> None:
    job = perceptrons(8, 256, scanned=True, optimizer=optax.sgd(0.1))
    whole, cut = measure_many(job, ("full", "4 x offload_inputs | 2 x dots"), "h200")
    kept = cut.residual_device_bytes - whole.residual_device_bytes
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(job.params))
    assert size > 20 * abs(kept)
    # As slices, the arrays of the offloading layers would exist twice.
    assert cut.temp_bytes - whole.temp_bytes - kept < size / 10
    assert cut.host_bytes == cut.residual_host_bytes == 4 * 4 * 8 * 256


@pytest.mark.parametrize("scanned", [False, True])
def test_residuals_say_which_layers(scanned: bool) -> None:
    loss, params, x = make_loss(layers=4, scanned=scanned)
    job = rj.Workload(loss, params, (x,), blocks=Mlp)
    table = rj.residuals(job, "1 x full | 3 x save: *tanh*")
    saved = {row.layers: row.bytes for row in table if "tanh" in row.name and row.action == "save"}
    hidden = 4 * x.size // 4 * 3
    assert saved == ({(1, 4): 3 * hidden} if scanned else {(layer, layer + 1): hidden for layer in (1, 2, 3)})
    assert [row.layers for row in table if "tanh" in row.name and row.action == "recompute"] == [(0, 1)]
    # The kept bytes are the sum of the parts; no part contains the stacked parameters.
    parts = [rj.residuals(job, text).device_bytes for text in ("full", "save: *tanh*")]
    assert table.device_bytes == parts[0] + (parts[1] - parts[0]) * 3 // 4
    assert "1–3" in str(table) if scanned else "│      3 │" in str(table)
    assert table.to_dict()["rows"][0]["layers"] is None or len(table.to_dict()["rows"][0]["layers"]) == 2


def test_a_run_without_effect_is_named_with_its_layers() -> None:
    for scanned in (False, True):
        loss, params, x = make_loss(layers=4, scanned=scanned)
        with pytest.raises(NoEffectError, match=r"policy='save: \*exp\*' of layers 1–3: the selector '\*exp\*' matches no"):
            rj.checkpoint_blocks(loss, {Mlp: "1 x full | 3 x save: *exp*"})(params, x)
        with pytest.raises(NoEffectError, match=r"of layer 3 offloads nothing"):
            rj.checkpoint_blocks(loss, {Mlp: "3 x full | 1 x recompute: *tanh*; offload: *tanh#0"})(params, x)
        # The same selector has an effect in another run; it is still an error.
        with pytest.raises(NoEffectError, match=r"of layers 0–1"):
            rj.checkpoint_blocks(loss, {Mlp: "2 x save: *tanh*, *exp* | 2 x save: *tanh*"})(params, x)


def test_what_has_no_layers_to_tell_apart_is_refused() -> None:
    def while_loop(kernel: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 3, lambda x: block_by_hand(kernel, x), x).sum()

    args = values(4, 3), values(2, 4, seed=1)
    with pytest.raises(UnsupportedError, match="in a while loop"):
        rj.checkpoint_blocks(while_loop, {Mlp: "1 x full"})(*args)


@pytest.mark.versions
@pytest.mark.parametrize("scanned", [False, True])
def test_a_gradient_may_be_taken_inside(scanned: bool) -> None:
    loss, params, x = make_loss(layers=2, scanned=scanned)
    policies = {Mlp: "1 x full | 1 x dots"}
    inside, outside = rj.checkpoint_blocks(jax.grad(loss), policies), jax.grad(rj.checkpoint_blocks(loss, policies))
    assert matmuls(inside, params, x) == matmuls(outside, params, x) == matmuls(jax.grad(loss), params, x) + 1


def test_workloads_take_policies_by_layer() -> None:
    loss, params, x = make_loss(layers=3, scanned=True)
    job = rj.Workload(loss, params, (x,), blocks=Mlp, optimizer=optax.sgd(0.1))
    text = "2 x full | 1 x dots"
    report = rj.measure(job, text)
    assert report.policy == "2 × full | 1 × dots"
    assert rj.measure(job, rj.LayerPolicies.parse(text)) is report, "the same question"
    tables = [rj.residuals(job, policy) for policy in ({Mlp: text}, "full")]
    assert tables[0].device_bytes == report.residual_device_bytes > tables[1].device_bytes
    assert rj.doctor(job, text).ok
    diagnosis = rj.doctor(job, "2 x full | 1 x save: *exp*").findings
    assert [finding.trap for finding in diagnosis] == ["unmatched_name"]


def test_the_layers_of_an_equation_are_no_part_of_its_path() -> None:
    loss, params, x = make_loss(layers=3)
    fn = rj.checkpoint_blocks(loss, {Mlp: "2 x full | 1 x dots"})
    blocks = [eqn for eqn, _ in equations(fn, params, x) if compat.is_block(eqn)]
    assert [compat.layers_of(eqn) for eqn in blocks] == [range(0, 1), range(1, 2), range(2, 3)]
    assert not any("[" in part for eqn in blocks for part in compat.scopes(eqn))
    name = "jit(step)/transpose(jvp(layers[0:2]))/Model/while/body/layers[0:2]/layers/up/dot_general"
    assert module_path(name) == ("Model/layers/up", "dot_general", "backward")


SINGLE_ROUNDS = """
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


@pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")
def test_a_layer_that_is_a_scan_by_itself_computes_again_and_offloads(tmp_path: Path) -> None:
    compiled = compile_for_h200(tmp_path, SINGLE_ROUNDS)
    # Each of three layers computes its tanh twice; merged with the forward pass there would be three.
    assert len(re.findall(r"(?<![\w-])tanh\(", compiled["full"].text)) == 6
    # Only its input, which stayed on the device when no barrier separated the passes.
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
