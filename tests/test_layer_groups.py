"""Groups of layers: the results do not change, each group has one checkpoint, and its layers keep their policies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import PlanningError, UnsupportedError
from remat_jax.planning.problem import describe, extra_seconds
from tests.small_models import Attention, Both, First, Mlp, Second, assert_same, block_by_hand, equations, make_loss, values
from tests.test_checkpoint_layers import lengths
from tests.workloads import needs_gpu_compiler

INPUT = 2 * 3 * 4 * 4
"""The bytes of a layer's input in `make_loss`, and of the cosine after the layers."""


def products(loss: Any, policy: Any, *args: Any, block: Any = Mlp) -> int:
    return matmuls(jax.grad(rj.checkpoint_blocks(loss, {block: policy})), *args)


@pytest.mark.parametrize(
    ("policy", "again", "kept", "rounds"),
    [
        # An Mlp has two products, one of which its backward pass recomputes. A group recomputes its layers except the last,
        # whose result its backward pass does not read.
        ("6 x full", 0, 6, []),
        ("6 x full in groups of 1", 0, 6, []),
        ("6 x full in groups of 2", 3 * 2, 3, []),
        ("6 x full in groups of 4", 6 + 2, 2, []),
        ("6 x full in groups of 6", 10, 1, []),
        ("5 x full in groups of 2 | 1 x full", 2 * 2, 4, []),
        # The layers keep their products, or everything, while the backward pass of their group runs.
        ("6 x dots in groups of 3", 2 * 4 - 4, 2, []),
        ("6 x off in groups of 3", 2 * 4 - 4, 2, []),
        # In a scan all rounds are recomputed, the last included. The scan keeps its carry, also if it is the batch.
        ("6 x full in groups of 1", 0, 6, [6]),
        ("6 x full in groups of 2", 12, 3, [3, 2]),
        ("6 x full in groups of 4", 12, 1, [4, 2]),
        ("6 x full in groups of 6", 12, 0, [6]),
        ("5 x full in groups of 2 | 1 x full", 8, 4, [2, 2, 1, 1]),
        ("4 x full in groups of 2 || 2 x full in groups of 2", 12, 3, [2, 2, 2]),
        ("6 x dots in groups of 3", 12 - 6, 2, [2, 3]),
        ("6 x off in groups of 3", 12 - 6, 2, [2, 3]),
    ],
)
def test_layers_run_again_once_for_the_group_and_once_by_themselves(
    policy: str, again: int, kept: int, rounds: list[int]
) -> None:
    loss, params, x = make_loss(layers=6, scanned=bool(rounds))
    assert products(loss, policy, params, x) - products(loss, "full", params, x) == again
    assert lengths(rj.checkpoint_blocks(loss, {Mlp: policy}), params, x) == rounds
    table = rj.residuals(rj.Workload(loss, params, (x,), Mlp), policy)
    # The loss keeps a cosine. Unrolled, the first input is the batch, which is no residual.
    assert (table.device_bytes, table.host_bytes, table.warning) == ((kept + bool(rounds)) * INPUT, 0, None)


def test_no_parameter_and_nothing_inside_a_group_is_kept() -> None:
    loss, params, x = make_loss(Attention, layers=6, scanned=True)
    table = rj.residuals(rj.Workload(loss, params, (x,), Attention), "4 x full in groups of 2 | 2 x dots")
    kept = [(row.name.rpartition("/")[2], row.shape[0], row.layers) for row in table if row.action == "save"]
    assert sorted(entry for entry in kept if entry[2] == (0, 4)) == [("Stack:carry#0", 2, (0, 4))]
    loss, params, x = make_loss(layers=6)
    table = rj.residuals(rj.Workload(loss, params, (x,), Mlp), "6 x full in groups of 2")
    assert sorted(row.name for row in table if row.action == "save") == [":cos", "layer_1:add#0", "layer_3:add#0"]


@pytest.mark.usefixtures("x64")
def test_what_stands_between_the_layers_of_a_group() -> None:
    """A group recomputes arrays computed from one layer's result, whether the next layer reads them or not."""

    def loss(kernels: Any, x: Any, scale: Any) -> Any:
        seen, noise = jnp.zeros(()), jnp.zeros(())
        for index in range(4):
            x = block_by_hand(kernels[index], x)
            noise = noise + jnp.sum(jnp.exp(scale * index))
            seen = seen + jnp.sum(x * (x @ jnp.eye(4)))
            x = jnp.tanh(x @ (jnp.eye(4) * scale))
        return jnp.sum(jnp.sin(x)) + jnp.sin(seen) * noise

    args = values(4, 4, 3), values(2, 4, seed=1), values(seed=2)
    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)
    fn = rj.checkpoint_blocks(loss, {Mlp: "4 x full in groups of 2"})
    assert_same(jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2)))(*args), expected)
    # The two products of the first layer of each group, and the two between. The code that reads the last layer is in no group.
    assert products(loss, "4 x full in groups of 2", *args) - products(loss, "4 x full", *args) == 2 * 4
    job = rj.Workload(loss, args[0], args[1:], Mlp)
    grouped, full = (rj.residuals(job, policy).device_bytes for policy in ("4 x full in groups of 2", "4 x full"))
    assert full - grouped == 2 * 4 * args[1].nbytes, "what the first layer of each group gives, and three arrays behind it"


@pytest.mark.usefixtures("x64")
def test_layers_inside_jit_and_several_in_a_round() -> None:
    @jax.jit
    def layer(kernels: Any, x: Any) -> Any:
        return Mlp().apply({"params": {f"Linear_{nth}": {"kernel": kernel} for nth, kernel in enumerate(kernels)}}, x)

    def loss(kernels: Any, x: Any) -> Any:
        for layer_kernels in kernels[:2]:
            x = layer(layer_kernels, x)
        return jnp.sum(jnp.sin(jax.lax.scan(lambda x, row: (layer(row[1], layer(row[0], x)), None), x, kernels[2])[0]))

    def pair(*rows: int, seed: int) -> Any:
        return values(*rows, 3, 4, seed=seed), values(*rows, 4, 3, seed=seed + 1)

    args = (pair(seed=1), pair(seed=3), (pair(2, seed=5), pair(2, seed=7))), values(2, 4, seed=1)
    expected = jax.jit(jax.grad(loss))(*args)
    # The unrolled pair, and both rounds together; each round.
    for policy, groups in (
        ("2 x full in groups of 2 | 4 x full in groups of 4", [2]),
        ("2 x full | 2 x full in groups of 2 | 2 x dots in groups of 2", [1, 1]),
    ):
        fn = rj.checkpoint_blocks(loss, {Mlp: policy})
        assert_same(jax.jit(jax.grad(fn))(*args), expected)
        assert lengths(fn, *args) == groups
        kept = [row for row in rj.residuals(rj.Workload(loss, args[0], args[1:], Mlp), policy) if row.action == "save"]
        assert not [row for row in kept if set(row.shape[-2:]) == {4, 3}], "no parameter, and no row or slice of one"
    with pytest.raises(UnsupportedError, match="block=Mlp: the group of layers 0–2 begins or ends inside"):
        rj.checkpoint_blocks(loss, {Mlp: "6 x full in groups of 3"})(*args)
    with pytest.raises(UnsupportedError, match="block=Mlp: the group of layers 3–5 begins or ends inside"):
        rj.checkpoint_blocks(loss, {Mlp: "3 x full | 3 x full in groups of 3"})(*args)


PAIRS, ALL = "4 x full in groups of 2", "4 x full in groups of 4"


@pytest.mark.usefixtures("x64")
def test_blocks_of_two_classes() -> None:
    policies: dict[bool, list[dict[Any, str]]] = {
        False: [{First: ALL, Second: "dots"}, {Both: "4 x dots in groups of 2", Second: "full"}],
        True: [{First: PAIRS, Second: PAIRS}, {Both: PAIRS, First: PAIRS}],
    }
    for scanned, of_blocks in policies.items():
        loss, params, x = make_loss(Both, layers=4, scanned=scanned)
        expected = jax.jit(jax.grad(loss))(params, x)
        for of_block in of_blocks:
            assert_same(jax.jit(jax.grad(rj.checkpoint_blocks(loss, of_block)))(params, x), expected)


@pytest.mark.parametrize(
    ("scanned", "other", "says"),
    [
        # Unrolled, a group of one kind ends inside a group of the other.
        (False, PAIRS, "groups of layers of several blocks overlap: First layers 0–1; "),
        (True, "1 x full | 3 x dots", "block=First: iterations 0 to 1 of a scan are one group"),
        (True, "4 x full in groups of 3", "block=Second: iterations 0 to 2 of a scan are one group"),
    ],
)
def test_groups_of_two_classes_that_overlap_are_refused(scanned: bool, other: str, says: str) -> None:
    loss, params, x = make_loss(Both, layers=4, scanned=scanned)
    with pytest.raises(UnsupportedError, match=says):
        rj.checkpoint_blocks(loss, {First: PAIRS, Second: other})(params, x)


def test_groups_have_no_price() -> None:
    loss, params, x = make_loss(layers=4)
    with pytest.raises(PlanningError, match="groups of layers are not priced"):
        extra_seconds(describe(rj.Workload(loss, params, (x,), Mlp), "h200"), "4 x full in groups of 2")


@pytest.mark.parametrize(
    ("scanned", "policy", "expected"),
    [
        # The layers of a group, and the group: without a loop nothing separates forward pass and recomputation.
        (False, "4 x full in groups of 2", [True] * (4 + 2)),
        (True, "4 x full in groups of 2", [False, False]),
        (True, "4 x full in groups of 4", [False, True]),
        (True, "2 x full in groups of 2 | 2 x full", [False, False, True]),
    ],
)
def test_a_barrier_stands_where_no_loop_keeps_the_passes_apart(scanned: bool, policy: str, expected: list[bool]) -> None:
    loss, params, x = make_loss(layers=4, scanned=scanned)
    fn = rj.checkpoint_blocks(loss, {Mlp: policy})
    traced_equations = equations(lambda *args: jax.jvp(fn, args, args)[1], params, x)
    assert sorted(eqn.params["prevent_cse"] for eqn, _ in traced_equations if "prevent_cse" in eqn.params) == expected


@needs_gpu_compiler
def test_compiled_it_needs_less_than_full() -> None:
    """Of 16 inputs of 8 MiB a group of four keeps four, and has four more while its backward pass runs: 64 MiB less."""

    def body(x: Any, kernel: Any) -> Any:
        return block_by_hand(kernel, x), None

    def loss(kernels: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(jax.lax.scan(body, x, kernels)[0]))

    kernels, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 64, 3), (2**15, 64)))
    job = rj.Workload(loss, kernels, (x,), Mlp, optimizer=optax.sgd(1.0))
    full, grouped = (rj.measure(job, policy, "h200").temp_bytes for policy in ("full", "16 x full in groups of 4"))
    assert 56 * 2**20 < full - grouped < 72 * 2**20
