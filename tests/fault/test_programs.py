"""Random programs under random policies, a part of `python -m tests.fault`; and its former finds, by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from remat_jax import compat
from tests.fault.checks import Case, cases
from tests.fault.evaluate import traced
from tests.fault.programs import Program, Step
from tests.fault.stacks import WAYS, Stack
from tests.fault.tally import Tally, for_each

SMALL = Program((Step("dense", (0, 0), 0), Step("tanh", (0,), 0)))


def test_random_programs_keep_values_and_gradients() -> None:
    tally = Tally.empty()
    for_each(cases(), 12, 0, lambda case: case.check(tally))
    assert tally.checked >= 6 and len(set(WAYS) & set(tally.kinds)) >= 3, tally


@pytest.mark.parametrize("way", ["linen_jit", "inner_jit"])
def test_decorated_blocks_and_decorated_modules_around_blocks_keep_values_and_gradients(way: str) -> None:
    tally = Tally.empty()
    Case(Stack(SMALL, 2, way, "scan", "offload: *sin*"), ("offload_inputs",), "grad", "jit", 0).check(tally)
    assert tally.checked == 1, tally


@pytest.mark.parametrize(("loop", "offloaded"), [("reverse", 2), ("unroll", 2), ("none", 2), ("scan", 0)])
def test_groups_of_layers_keep_values_and_gradients(loop: str, offloaded: int) -> None:
    program = Program((*SMALL.steps, Step("dropout", (0, 0), 1)))
    policies = ("full",) * 5 + ("offload_inputs",) * offloaded
    tally = Tally.empty()
    Case(Stack(program, len(policies), "linen", loop), policies, "grad", "traced", 0, group=2).check(tally)
    assert tally.checked == 1, tally


@pytest.mark.parametrize(("run", "number"), [("traced", 1), ("jit", 2)], ids=["traced-bfloat16", "jit-float16"])
def test_what_is_in_low_precision_and_has_integers_and_old_keys_is_right(run: str, number: int) -> None:
    steps = (
        Step("narrow", (0,), number),
        Step("dense_low", (0, 0), 0),
        Step("low_sin", (0,), 0),
        Step("widen", (0, 0), 0),
        Step("donated", (0, 1), 1, (Program((Step("dropout", (0, 0), 1),)),)),
    )
    stack, tally = Stack(Program(steps, ("k", "l", "none", "unit")), 2, "remat", "scan"), Tally.empty()
    Case(stack, ("full",), "grad of integers", run, 0, old_keys=True).check(tally)
    assert tally.checked == 1


def with_gradient_times(factor: float) -> Any:
    """Changes a loss: the same value, and the gradient with respect to parameters and input times the factor."""
    still = jax.lax.stop_gradient

    def changed(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: still(leaf) + factor * (leaf - still(leaf)), tree)

    return lambda loss: lambda p, x, *rest: loss(changed(p), changed(x), *rest)


@pytest.mark.parametrize("factor", [1 + 1e-9, -1.0])
def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    case, under = Case(Stack(SMALL, 2, "remat", "scan"), ("full",), "grad", "traced", 0), Stack.under
    case.check(Tally.empty())
    monkeypatch.setattr(Stack, "under", lambda stack, policy: with_gradient_times(factor)(under(stack, policy)))
    with pytest.raises(AssertionError, match="is off by"):
        case.check(Tally.empty())


@pytest.mark.skipif(compat.remat3() and compat.JAX_VERSION < (0, 12, 0), reason="there policies by hand are refused")
def test_a_complex_number_is_kept_by_hand_too() -> None:
    rotated = Program((Step("complex", (0, 0), 0), Step("complex_exp", (0,), 0), Step("modulus", (0,), 0)))
    tally = Tally.empty()
    for way in ("by_hand", "remat"):
        Case(Stack(rotated, 1, way, "none"), ("everything",), "grad", "traced", 0).check(tally)
    assert not tally.refused and tally.checked == 2


# --- what was found ---------------------------------------------------------------------------------------------------


def branches(x: Any) -> Any:
    return jax.lax.cond(x[0] > 0.1, jax.nn.sigmoid, lambda x: 2 * x, jnp.cos(x)) * x


@pytest.mark.parametrize("policy", ["full", "offload_inputs"])
def test_a_branch_whose_choice_differs_along_a_vmap_is_refused_by_jax(policy: str) -> None:
    """A transpose of `stop_gradient` would suffice; it would also turn other people's wrong `custom_jvp` into a silent 0."""
    rows = jnp.array([[0.3, 0.5], [-0.3, 0.7]])
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(lambda rows: jax.vmap(rj.remat(branches, policy))(rows).sum())(rows)
    # The gradient first, then the map.
    gradient = jax.vmap(jax.grad(lambda x: rj.remat(branches, policy)(x).sum()))(rows) if policy != "offload_inputs" else None
    wanted = jax.vmap(jax.grad(lambda x: branches(x).sum()))(rows)
    assert gradient is None or np.allclose(gradient, wanted, rtol=1e-6)


@pytest.mark.parametrize("policy", ["everything", "offload_inputs"])
def test_the_rule_of_a_custom_jvp_may_read_a_constant(policy: str) -> None:
    slopes = jnp.array([1.0, 2.0, 3.0])

    @jax.custom_jvp
    def bent(x: Any) -> Any:
        return jnp.sin(x)

    bent.defjvp(lambda primals, tangents: (bent(*primals), slopes * tangents[0]))
    gradient = jax.grad(lambda x: rj.remat(lambda x: bent(x) * x, policy)(x).sum())(jnp.ones(3))
    np.testing.assert_allclose(gradient, np.sin(1.0) + np.arange(1.0, 4.0), rtol=1e-6)


@jax.custom_vjp
def attention_like(x: Any, scale: Any, index: Any) -> Any:
    return jnp.sin(x) * scale + index


attention_like.defvjp(
    lambda x, scale, index: (attention_like(x, scale, index), (x, scale)),
    # Not the derivative, to see that the rule is mapped.
    lambda kept, ct: (3.0 * ct * jnp.cos(kept[0]) * kept[1], 5.0 * (ct * jnp.sin(kept[0])).sum(), None),
)


@pytest.mark.parametrize("policy", ["full", "everything", "offload_inputs"])
def test_a_kernel_with_a_rule_of_its_own_is_mapped(policy: str) -> None:
    """Under a `vmap` inside the gradient: over its rows, with a scale that is the same for all."""
    rows, scale = jnp.array([[0.3, 0.5], [-0.3, 0.7]]), jnp.float32(1.5)

    def block(x: Any, scale: Any) -> Any:
        return attention_like(x, scale, jnp.arange(2)) * x

    def total(function: Any) -> Any:
        def of_row(x: Any, scale: Any) -> Any:
            return jax.lax.scan(lambda x, _: (function(x, scale), None), x, None, length=2)[0].sum()

        return lambda rows, scale: jax.vmap(of_row, in_axes=(0, None))(rows, scale).sum()

    grads, wanted = (jax.grad(total(function), argnums=(0, 1))(rows, scale) for function in (rj.remat(block, policy), block))
    for gradient, expected in zip(grads, wanted, strict=True):
        assert gradient.shape == expected.shape
        np.testing.assert_allclose(gradient, expected, rtol=2e-6)


def test_running_a_branch_that_offloads_leaves_no_array_that_is_said_to_be_on_the_host() -> None:
    """It appeared as another test's `float64<host>[4]` where `float64[4]` was expected, an hour later in the same process."""
    block = rj.remat(lambda x: jnp.sin(jnp.cos(x[:, None] * x)).sum(), "offload: *")

    def loss(x: Any) -> Any:
        return jax.lax.cond(x[0] > 0, block, lambda x: (x**2).sum(), x)

    x = -jnp.linspace(0.5, 1.5, 23)
    np.testing.assert_allclose(traced(jax.grad(loss))(x), 2 * x, rtol=1e-6)
    spread = traced(lambda scalar: jax.lax.broadcast_in_dim(scalar, (23, 1), ()))(jnp.float32(2.0))
    assert jax.typeof(spread).memory_space is jax.memory.Space.Device
