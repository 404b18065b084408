"""The cost model against closed forms: operations, and bytes that cross a fusion."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from remat_jax import compat
from remat_jax.cost.cost import Cost, jaxpr_cost, materialised, shares
from remat_jax.cost.flat import Array, FlatEqn, flatten
from remat_jax.cost.kernels import own_kernel
from remat_jax.cost.pallas import kernel_flops
from remat_jax.hardware.rates import Rates

M, K, N = 4, 6, 10
A, B = jnp.ones((M, K)), jnp.ones((K, N))


def cost(fn: Any, *args: Any) -> Cost:
    return jaxpr_cost(jax.make_jaxpr(fn)(*args))


def of(fn: Any, *args: Any) -> tuple[float, float]:
    total = cost(fn, *args)
    return total.flops, total.bytes


@pytest.mark.parametrize(("dtype", "size", "units"), [(jnp.float32, 4, "tensorfloat32"), (jnp.bfloat16, 2, "bfloat16")])
def test_a_product_reads_its_operands_and_writes_its_result(dtype, size, units):
    total = cost(lambda a, b: a @ b, A.astype(dtype), B.astype(dtype))
    ((work, times),) = total.kernels
    assert (dict(work.flops), work.bytes, times) == ({units: 2 * M * K * N}, size * (M * K + K * N + M * N), 1)


def test_float32_runs_in_its_own_units_where_precision_is_asked_for():
    ((work, _),) = cost(lambda a, b: jnp.dot(a, b, precision="highest"), A, B).kernels
    assert list(work.flops) == ["float32"]


def test_a_chain_reads_its_inputs_and_writes_its_outputs_once():
    x = jnp.ones((M, N))
    # Three equations, one kernel: x is read once, and intermediate arrays are not in memory.
    assert of(lambda x: jnp.tanh(jnp.sin(x) * x), x) == (3 * M * N, 2 * 4 * M * N)
    # A result that is read outside the chain is written, and only that one.
    assert of(lambda x: (lambda y: (y, jnp.tanh(y) * y))(jnp.sin(x)), x) == (3 * M * N, 4 * (M * N) * 3)
    # A broadcast operand costs its stored bytes.
    assert of(lambda x, b: x + b, x, jnp.ones(N)) == (M * N, 4 * (2 * M * N + N))


def test_a_normalisation_is_one_kernel():
    x = jnp.ones((M, N))
    assert of(lambda x: x - x.max(-1, keepdims=True), x) == (M * N + M * N, 4 * 2 * M * N)
    assert cost(lambda x: jax.nn.softmax(x), x).bytes == 4 * 2 * M * N


def test_a_chain_does_not_reach_across_a_product():
    x, w = jnp.ones((M, M)), jnp.ones((M, M))

    def fn(x, w):
        y = jnp.sin(x)
        return y + jnp.cos(y @ w)

    # sin: x → y; the product: y, w → p; cos and add: p, y → result.
    assert of(fn, x, w) == (2 * M**3 + 3 * M * M, 4 * M * M * (2 + 3 + 3))


def test_views_cost_nothing_and_parts_what_is_read_of_them():
    x = jnp.ones((M, N))
    assert of(lambda x: x.reshape(N, M).T, x) == (0, 0)
    assert of(lambda x: jnp.sin(x[:, :2]), x) == (2 * M, 4 * 2 * (2 * M))
    # Both halves of an array are the array.
    assert of(lambda x: jnp.sin(x[:, : N // 2]) * x[:, N // 2 :], x) == (M * N, 4 * (M * N + M * N // 2))
    # A gather reads its rows and their indices.
    rows = jnp.zeros(3, jnp.int32)
    assert cost(lambda x, rows: x.at[rows].get(mode="clip"), x, rows).bytes == 4 * (2 * 3 * N + 3)


def test_a_scatter_touches_what_it_falls_on():
    table, rows, updates = jnp.ones((100, N)), jnp.zeros(3, jnp.int32), jnp.ones((3, N))
    places = jax.lax.ScatterDimensionNumbers((1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
    total = cost(lambda t, r, u: jax.lax.scatter_add(t, r[:, None], u, places), table, rows, updates)
    assert total.bytes == 3 * 4 * 3 * N + 4 * 3


def test_loops_and_branches():
    w = jnp.ones((M, M))
    one_round = cost(lambda x, w: jnp.sin(x @ w), w, w)
    many = cost(lambda x, w: jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=7)[0], w, w)
    assert (many.flops, many.bytes) == (7 * one_round.flops, 7 * one_round.bytes)
    chosen = cost(lambda i, x: jax.lax.switch(i, (lambda x: x @ x, lambda x: jnp.sin(x @ x)), x), 1, w)
    clamped = 8  # the index, read and written
    assert (chosen.flops, chosen.bytes) == (one_round.flops + 1, one_round.bytes - 4 * M * M + clamped)
    looped = cost(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x), w)
    assert looped.flops == 2 * M**3, "a loop of unknown length counts once"


def test_calls_and_derivative_rules_are_no_border():
    x = jnp.ones((M, N))
    plain = lambda x: jnp.tanh(jnp.sin(x) * 2)  # noqa: E731
    for wrapped in (jax.jit(plain), jax.checkpoint(plain), lambda x: jnp.tanh(jax.jit(jnp.sin)(x) * 2)):
        assert of(wrapped, x) == of(plain, x)
    assert of(lambda x: jax.nn.relu(x), x) == (M * N, 2 * 4 * M * N)


@pytest.mark.parametrize(
    ("fn", "flops"),
    [
        (lambda a: jax.lax.linalg.cholesky(a, symmetrize_input=False), 8**3 / 3),
        (lambda a: jax.lax.linalg.eigh(a)[1], 9 * 8**3),
        (lambda a: jax.lax.linalg.triangular_solve(a, jnp.ones((8, 3)), left_side=True, lower=True), 8 * 8 * 3),
    ],
)
def test_factorisations(fn, flops):
    total = cost(fn, jnp.eye(8))
    assert flops <= total.flops <= flops + 4 * 8 * 8


def test_of_what_is_not_known_only_the_operands_count():
    assert of(lambda x: jax.lax.linalg.hessenberg(x)[0], jnp.ones((8, 8))) == (0, 4 * (2 * 64 + 7))


def test_grouped_products_cost_one_product():
    rows, kernels, sizes = jnp.ones((M, K)), jnp.ones((2, K, N)), jnp.array([1, M - 1], jnp.int32)
    assert cost(jax.lax.ragged_dot, rows, kernels, sizes).flops == 2 * M * K * N
    gradient = jax.grad(lambda r, k: jax.lax.ragged_dot(r, k, sizes).sum(), (0, 1))
    assert 2 * 2 * M * K * N <= cost(gradient, rows, kernels).flops < 2 * 2 * M * K * N + 300


def double(x_ref: Any, y_ref: Any) -> None:
    y_ref[...] = x_ref[...] @ x_ref[...]


@pytest.mark.parametrize("has_estimate", [False, True])
def test_pallas_kernels(has_estimate):
    block = pl.BlockSpec((1, M, M), lambda i: (i, 0, 0))
    kernel = pl.pallas_call(
        lambda x, y: double(x.at[0], y.at[0]),
        jax.ShapeDtypeStruct((5, M, M), jnp.float32),
        grid=(5,),
        in_specs=[block],
        out_specs=block,
        cost_estimate=pl.CostEstimate(flops=123, bytes_accessed=45, transcendentals=0) if has_estimate else None,
    )
    expected = (123, 45) if has_estimate else (5 * 2 * M**3, 2 * 4 * 5 * M * M)
    assert of(kernel, jnp.ones((5, M, M))) == expected


def test_a_loop_in_a_kernel_is_taken_to_read_its_arrays_through():
    def attend(q_ref: Any, k_ref: Any, o_ref: Any) -> None:
        q, last = q_ref[...], q_ref[0, 0].astype(jnp.int32)
        step = lambda i, acc: acc + q @ k_ref[pl.ds(i * 4, 4), :].T @ k_ref[pl.ds(i * 4, 4), :]  # noqa: E731
        o_ref[...] = jax.lax.fori_loop(0, last, step, jnp.zeros_like(q))

    kernel = pl.pallas_call(attend, jax.ShapeDtypeStruct((M, K), jnp.float32), name="attend")
    jaxpr = jax.make_jaxpr(kernel)(jnp.ones((M, K)), jnp.ones((16, K)))
    body = next(eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call")
    assert kernel_flops(compat.closed(body)) == 2 * 2 * M * K * 16
    assert jaxpr_cost(jaxpr).flops == 4 * M * K * 16


@pytest.mark.parametrize(("name", "products"), [("fwd", 2), ("bwd", 5)])
def test_cudnn_attention_has_no_array_of_scores(name, products):
    """cuDNN's primitives cannot be traced without cuDNN, so the test builds their equation as JAX does."""
    b, s, t, h, d = 2, 1024, 2048, 4, 64
    q, k, v, out = (Array(jax.core.ShapedArray((b, length, h, d), jnp.bfloat16)) for length in (s, t, t, s))
    primitive = SimpleNamespace(name=f"dot_product_attention_{name}_wrapper")
    work = own_kernel(FlatEqn(SimpleNamespace(primitive=primitive, params={"layout": 0}), (q, k, v), (out,)))
    assert work.flops == {"bfloat16": products * 2 * b * s * t * h * d}
    assert work.bytes == 2 * 2 * b * h * d * (s + t) < b * h * s * t * 2


def test_seconds_are_the_longer_of_operations_and_bytes_kernel_by_kernel():
    rates = Rates({"tensorfloat32": 100.0, "float32": 50.0}, 10.0)
    # The product is bound by its operations, the chain by its bytes.
    x = jnp.ones((100, 100))
    total = cost(lambda x: jnp.sin(x @ x), x)
    assert total.seconds(rates) == pytest.approx(2e6 / 100 + 8e4 / 10)


def test_shares_add_up_and_what_another_has_read_is_free():
    rates = Rates({"tensorfloat32": 1e9, "float32": 1e9}, 10.0)
    x = jnp.ones((M, M))
    jaxpr = jax.make_jaxpr(lambda x, w: jnp.cos(jnp.sin(x @ w) * (x @ w)))(x, x)
    flat = flatten(jaxpr)
    seconds_by_equation = shares(flat.eqns, flat.outputs, rates)
    assert sum(seconds_by_equation.values()) == pytest.approx(jaxpr_cost(jaxpr).seconds(rates))
    by_name = {eqn.primitive: seconds for eqn, seconds in seconds_by_equation.items()}
    assert by_name["sin"] == pytest.approx(4 * M * M / 10) and by_name["cos"] == pytest.approx(4 * M * M / 10)
    stored, _ = materialised(flat.eqns, flat.outputs)
    assert [eqn.primitive for eqn in flat.eqns if stored.intersection(eqn.outputs)] == ["dot_general", "dot_general", "cos"]


def test_names_barriers_and_dead_code_leave_no_equation():
    def fn(x: Any) -> Any:
        jnp.cos(x @ x.T)
        return jax.ad_checkpoint.checkpoint_name(jax.lax.optimization_barrier(jnp.sin(x)), "kept")

    flat = flatten(jax.make_jaxpr(fn)(A))
    assert [eqn.primitive for eqn in flat.eqns] == ["sin"] and flat.outputs[0].names == ["kept"]
