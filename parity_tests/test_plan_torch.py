"""Plans against PyTorch's `activation_memory_budget`, as the benchmark of both computes them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import plan_torch
from benchmarks.plan_torch import Plans, Sizes, Training, of_torch
from examples.models import linen
from remat_jax.errors import InfeasibleBudget

SIZES = Sizes(layers=2, d_model=16, heads=2, length=8, batch=2)
TOKENS = SIZES.batch * SIZES.length
LAYER = 2 * TOKENS * 12 * SIZES.d_model**2 + 2 * 2 * TOKENS * SIZES.length * SIZES.d_model
FORWARD = SIZES.layers * LAYER + 2 * TOKENS * SIZES.d_model * 256


@pytest.fixture(scope="module")
def theirs() -> list[dict[str, Any]]:
    return of_torch(SIZES, (0.0, 0.5, 1.0))


@pytest.fixture(scope="module")
def whole() -> Plans:
    return Plans(SIZES, Training)


def test_pytorch_computes_everything_again_at_0_and_no_product_at_1(theirs: list[dict[str, Any]]) -> None:
    none, half, most = theirs
    assert {row["step_flops"] for row in theirs} == {3 * FORWARD}
    assert (none["saved_bytes"], none["again_flops"]) == (0, FORWARD)
    assert 0 < half["saved_bytes"] < most["saved_bytes"] and 0 < half["again_flops"] < FORWARD and most["again_flops"] == 0
    # In each layer at least queries, keys, values, attention's weights and the wide layer; and the logits.
    stream, weights = TOKENS * SIZES.d_model * 4, SIZES.batch * SIZES.heads * SIZES.length**2 * 4
    assert most["saved_bytes"] > SIZES.layers * (7 * stream + weights) + TOKENS * 256 * 4


def test_the_whole_loss_as_a_block_computes_no_more_again(theirs: list[dict[str, Any]], whole: Plans) -> None:
    assert whole.step_flops == 3 * FORWARD
    for row in theirs:
        kept = whole.within(row["saved_bytes"])
        assert kept is not None and kept[0] <= row["saved_bytes"] and kept[1] <= row["again_flops"]
    assert whole.within(0) == (0, FORWARD)


def test_layers_as_blocks_keep_what_is_outside_of_them() -> None:
    layers = Plans(SIZES, linen.DecoderLayer)
    assert layers.within(0) is None
    with pytest.raises(InfeasibleBudget):
        plan_torch.solver.solve(layers.stack, layers.stack.fixed_bytes)
    # Not the logits' product, whatever is kept: its result is outside the layers.
    choice = layers.within(10**9)
    assert choice is not None and choice[1] == 0
