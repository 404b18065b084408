"""The gallery's checks on a toy: right policies pass, planted faults do not, and float64 is float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from parity_tests.gallery.checking import Beside
from parity_tests.gallery.models import POLICIES
from parity_tests.gallery.widened import widened
from tests.workloads import mean_square, struct

LAYERS, ROWS, WIDTH = 2, 64, 8
AGAIN = {"full": LAYERS, "dots_with_no_batch_dims": 0, "offload_dot_with_no_batch_dims": 0}


class Layer(nn.Module):
    """A perceptron in bfloat16, whose last kernel is initialised with zeros."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        hidden = nn.Dense(4 * WIDTH, dtype=jnp.bfloat16)(x)
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16, kernel_init=nn.initializers.zeros)(jnp.tanh(hidden))


class Toy(nn.Module):
    """Scanned layers under their own checkpoint."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        scan = nn.scan(
            nn.remat(lambda layer, x, _: (layer(x), None), prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return scan(Layer(), x, None)[0]


@pytest.fixture(scope="module")
def beside() -> Beside:
    return Beside(mean_square(Toy(), struct(ROWS, WIDTH), Layer))


def test_right_policies_pass(beside: Beside) -> None:
    rows = [beside.row(policy, beside.workload, AGAIN[policy]) for policy in POLICIES]
    assert all(row.passed for row in rows), [row for row in rows if not row.passed]
    assert [row.again for row in rows] == list(AGAIN.values())
    # Of each layer the product in bfloat16, 4 times as wide as the stream; nobody reads the second product's result.
    full, dots, offload = rows
    product = LAYERS * ROWS * 4 * WIDTH * 2
    assert dots.kept[0] - full.kept[0] == product
    assert offload.kept == (full.kept[0], product)


def test_a_plan_passes_where_it_computes_again_what_it_says(beside: Beside) -> None:
    plan = rj.plan(beside.workload, "1 MiB", "cpu")
    right = beside.planned(plan, AGAIN["full"])
    wrong = beside.planned(dataclasses.replace(plan, recompute_flops=plan.recompute_flops + 1), AGAIN["full"])
    assert right.passed and right.policy.startswith("plan: ")
    assert not wrong.passed and wrong.error64 == right.error64


def test_a_wrong_gradient_a_wrong_count_and_other_residuals_fail(beside: Beside) -> None:
    wrong = beside.workload.with_loss(lambda params, x: beside.workload.loss(params, x) * (1 + 2**-20))
    row = beside.row("full", wrong, AGAIN["full"])
    assert not row.passed and row.error64 == pytest.approx(2**-20, rel=1e-6), "which bfloat16 could not show"
    assert row.again_is_right and row.ratio <= 1.0
    assert not beside.row("full", beside.workload, AGAIN["full"] + 1).passed
    table = rj.residuals(beside.workload, "dots")
    assert not beside.row("full", beside.workload, AGAIN["full"], table=table).passed


def test_a_widened_program_is_the_program_in_float64() -> None:
    def program(x: Any) -> Any:
        wave = jnp.real(jax.lax.complex(x, x) * jnp.exp(1j * x))
        total, rows = jax.lax.scan(lambda carry, row: (carry * row + 0.125, carry), x, jnp.arange(1, 4, dtype=x.dtype))
        grown = jax.lax.while_loop(lambda carry: carry < 5, lambda carry: carry * 1.75, x)
        chosen = jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)
        return wave + total + rows.sum() + grown + chosen + jnp.zeros(4, x.dtype).at[jnp.array([1, 1])].add(x / 3).sum()

    narrow = jax.make_jaxpr(lambda x: jax.jit(program)(x))(jnp.float32(1.5))
    with jax.enable_x64(True):
        (result,) = widened(narrow)(jnp.float32(1.5))
        # With constants that float32 holds exactly.
        np.testing.assert_allclose(result, program(jnp.float64(1.5)), rtol=1e-15)
        assert result.dtype == jnp.float64 and float(result) != float(jnp.float32(result))
