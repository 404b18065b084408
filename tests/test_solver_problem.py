"""Errors of the solver's problems, budgets and policies."""

from __future__ import annotations

import math

import pytest

from remat_jax.errors import InfeasibleBudget, PlanningError
from remat_jax.solver import Block, BlockPolicy, HostLink, ResidualCosts, Stack, solve

X = ResidualCosts("x", 8)
LAYER = Block("layer", (X, ResidualCosts("up", 32, 0.5, ("x",))), 1, 2, repeats=3)
NAN, INF = float("nan"), math.inf


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResidualCosts("x", NAN), r"ResidualCosts 'x': bytes=nan; expected a finite number, at least 0"),
        (lambda: ResidualCosts("x", -1), r"bytes=-1; expected a finite number, at least 0"),
        (lambda: ResidualCosts("x", "8"), r"bytes='8'; expected a finite number"),
        (lambda: ResidualCosts("x", True), r"bytes=True; expected a finite number"),
        (lambda: ResidualCosts("x", 8, INF), r"ResidualCosts 'x': seconds=inf; expected a finite number"),
        (lambda: ResidualCosts("x", 8, parents="up"), r"parents='up'; expected a sequence of str"),
        (lambda: ResidualCosts("x", 8, parents=(3,)), r"parents: 3 is a int; expected str"),
        (lambda: ResidualCosts("x", 8, may_save=False, may_offload=False), "neither saved, offloaded nor recomputed"),
        (lambda: Block("b", (X, X), 1, 2), r"Block 'b': residuals: names \['x'\] are used twice"),
        (lambda: Block("b", (ResidualCosts("", 1),), 1, 2), r"names \[''\] are empty or not strings"),
        (lambda: Block("b", ("x",), 1, 2), r"residuals: 'x' is a str; expected ResidualCosts"),
        (lambda: Block("b", (X,), NAN, 2), r"Block 'b': forward_seconds=nan"),
        (lambda: Block("b", (X,), 1, -2), r"Block 'b': backward_seconds=-2"),
        (lambda: Block("b", (X,), 1, 2, working_bytes=INF), r"working_bytes=inf"),
        (lambda: Block("b", (X,), 1, 2, working_bytes=10**400), r"working_bytes=10{400}; expected a finite number"),
        (lambda: Block("b", (X,), 1, 2, repeats=0), r"Block 'b': repeats=0; expected an integer, at least 1"),
        (lambda: Block("b", (X,), 1, 2, repeats=2.0), r"repeats=2.0; expected an integer"),
        (lambda: Block("b", (X,), 1, 2, fetched_share=-1), r"fetched_share=-1"),
        (lambda: Block("b", (X, ResidualCosts("y", 1, 1, ("xx",))), 1, 2), r"'y' has the parent 'xx', .* Did you mean 'x'"),
        (
            lambda: Block("b", (ResidualCosts("y", 1, 1, ("z",)), ResidualCosts("z", 1, 1, ("y",))), 1, 2),
            r"in a circle: (y → z → y|z → y → z); remove one parent",
        ),
        (lambda: Block("b", (ResidualCosts("y", 1, 1, ("y",)),), 1, 2), r"in a circle: y → y"),
        (lambda: Stack(()), r"Stack: blocks is empty"),
        (lambda: Stack((LAYER, LAYER)), r"names \['layer'\] are used twice"),
        (lambda: Stack((LAYER,), fixed_bytes=NAN), r"Stack: fixed_bytes=nan"),
        (lambda: Stack((LAYER,), link=50e9), r"link=50000000000.0; expected a HostLink, or None"),
        (
            lambda: Stack((Block("b", (ResidualCosts("y", 1, may_save=False),), 1, 2),), HostLink(1, 1)),
            r"residuals \['y'\] of 'b' can only be offloaded, but the last block may not offload; .* offload_last=True",
        ),
        (lambda: Stack((Block("b", (ResidualCosts("y", 1, may_save=False),), 1, 2), LAYER)), "but there is no link"),
        (lambda: HostLink(0, 1), r"out_bytes_per_s=0; expected a finite number, greater than 0"),
        (lambda: HostLink(1, NAN), r"in_bytes_per_s=nan"),
        (lambda: HostLink(1, 1, 1.5), r"hidden_share=1.5; expected a share of the compute time, from 0 to 1"),
        (lambda: BlockPolicy(LAYER, ("save",)), r"1 choices for 2 residuals"),
        (lambda: BlockPolicy(LAYER, ("recompute", "save")), r"'x' of 'layer' cannot be 'recompute'"),
        (lambda: BlockPolicy(LAYER, ("unused", "save")), r"'x' of 'layer' cannot be 'unused'"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(PlanningError, match=message):
        make()


def test_a_policy_recomputes_only_from_what_is_there():
    block = Block("b", (ResidualCosts("x", 8, needed=False), ResidualCosts("up", 32, 0.5, ("x",))), 1, 2)
    with pytest.raises(PlanningError, match=r"recomputing 'up' needs its parents \['x'\], which the policy leaves unused"):
        BlockPolicy(block, ("unused", "recompute"))
    assert BlockPolicy(block, ("unused", "save")).saved_bytes == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), r"^budget=0; expected a number, greater than 0"),
        ((-1,), r"^budget=-1"),
        ((NAN,), r"^budget=nan"),
        (("40GiB",), r"^budget='40GiB'"),
        ((100, -1), r"^host_budget=-1; expected a number, at least 0"),
        ((100, NAN), r"^host_budget=nan"),
    ],
)
def test_budgets(arguments, message):
    with pytest.raises(PlanningError, match=message):
        solve(Stack((LAYER,)), *arguments)


def test_the_least_memory_is_named_with_the_host_budget_that_it_is_for():
    stack = Stack((LAYER,), HostLink(1, 1), fixed_bytes=1000)
    with pytest.raises(InfeasibleBudget, match=r"budget=1000 is too small: .* with host_budget=8 is 1048.0 bytes") as caught:
        solve(stack, 1000, 8)
    # One x is on the host; two are on the device, and everything of the last block, or of the block whose x returns.
    assert caught.value.least_bytes == 1048
    only = Stack((Block("b", (ResidualCosts("x", 8, may_save=False),), 1, 1),), HostLink(1, 1), offload_last=True)
    with pytest.raises(InfeasibleBudget, match="host_budget=5: the residuals that can only be offloaded do not fit") as caught:
        solve(only, 100, 5)
    assert caught.value.least_bytes is None
