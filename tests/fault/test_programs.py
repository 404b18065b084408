"""Random programs under random policies, a part of `python -m tests.fault`; and its former finds, by name."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import NoEffectError
from tests.fault import __main__ as command
from tests.fault.checks import RUNS, TRANSFORMS, Case, cases, check
from tests.fault.evaluate import traced
from tests.fault.ops import OPS
from tests.fault.programs import NESTINGS, Program, Step, programs
from tests.fault.stacks import LOOPS, OUTER, WAYS, Stack
from tests.fault.tally import Tally

TALLY = Tally.empty()


@settings(
    max_examples=15,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_random_programs_keep_values_and_gradients(case: Case) -> None:
    check(case, TALLY)


def test_most_of_them_were_compared() -> None:
    assert TALLY.checked >= 8 and len(set(WAYS) & set(TALLY.kinds)) >= 4, TALLY


def test_every_operation_is_drawn() -> None:
    drawn: Counter[str] = Counter()
    wanted = OPS.keys() | NESTINGS.keys()
    # In slices with a seed each, as in the command: within one slice Hypothesis repeats itself.
    for number in range(40):

        @seed(number)
        @settings(
            max_examples=25, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
        @given(programs())
        def count(program: Program) -> None:
            drawn.update({step.op for step in program.every()})

        count()
        if drawn.keys() >= wanted:
            break
    assert drawn.keys() == wanted, wanted ^ drawn.keys()


def test_every_way_loop_and_run_is_drawn() -> None:
    drawn: Counter[str] = Counter()
    wanted = {*WAYS, *LOOPS, *RUNS, *TRANSFORMS, *(f"outer {outer}" for outer in OUTER)}
    for number in range(25):

        @seed(number)
        @settings(
            max_examples=25, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
        @given(cases())
        def count(case: Case) -> None:
            drawn.update([case.stack.way, case.stack.loop, case.run, case.transform])
            drawn.update([f"outer {case.stack.outer}"] if case.stack.way == "inner" else [])

        count()
        if drawn.keys() >= wanted:
            break
    assert drawn.keys() == wanted, wanted ^ drawn.keys()


TWO_DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
from tests.fault import ops
from tests.fault.checks import Case, check
from tests.fault.tally import Tally
from tests.fault.programs import Program, Step
from tests.fault.stacks import Stack
ops.DEVICES = 2
steps = (Step("dense", (0, 0), 0), Step("constrained", (0,), 1), Step("tanh", (0,), 0), Step("constrained", (0,), 0))
tally = Tally.empty()
ways = ("linen", "none", "everything"), ("remat", "scan", "save: @dots"), ("nnx", "none", "offload: *tanh*")
for way, loop, policy in ways:
    check(Case(Stack(Program(steps), 2, way, loop), (policy,), "grad", "jit", 0), tally)
print(tally.checked, len(jax.devices()))
"""


def test_constraints_over_two_devices_keep_values_and_gradients(in_a_hurry: dict[str, str]) -> None:
    root = pathlib.Path(__file__).parents[2]
    environment = in_a_hurry | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", TWO_DEVICES], cwd=root, env=environment, capture_output=True, text=True)
    assert done.stdout == "3 2\n", done.stderr[-2000:]


SMALL = Program((Step("dense", (0, 0), 0), Step("tanh", (0,), 0)))


@pytest.mark.parametrize(
    ("run", "number"), [("eager", 0), ("traced", 1), ("jit", 2)], ids=["eager-float32", "traced-bfloat16", "jit-float16"]
)
def test_what_is_in_low_precision_and_has_integers_and_old_keys_is_right(run: str, number: int) -> None:
    steps = (
        Step("narrow", (0,), number),
        Step("dense_low", (0, 0), 0),
        Step("low_sin", (0,), 0),
        Step("widen", (0, 0), 0),
        Step("donated", (0, 1), 1, (Program((Step("dropout", (0, 0), 1),)),)),
    )
    stack, tally = Stack(Program(steps, ("k", "l", "none", "unit")), 2, "remat", "scan"), Tally.empty()
    check(Case(stack, ("full",), "grad of integers", run, 0, old_keys=True), tally)
    assert tally.checked == 1


def test_a_program_may_donate_more_than_it_gives_back() -> None:
    donated, tally = Step("donated", (0, 1), 1, (Program((Step("add", (0, 1), 0),)),)), Tally.empty()
    check(Case(Stack(Program((donated,)), 1, "remat", "none"), ("full",), "grad", "eager", 0), tally)
    assert tally.checked == 1


@pytest.mark.parametrize(("run", "factor"), [("traced", 1 + 1e-9), ("eager", 1 - 1e-9), ("traced", -1.0)])
def test_a_gradient_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, run: str, factor: float) -> None:
    case = Case(Stack(SMALL, 2, "remat", "scan"), ("full",), "grad", run, 0)
    check(case)
    under = Stack.under

    def wrong(stack: Stack, policy: Any) -> Any:
        return scaled(under(stack, policy), factor)

    monkeypatch.setattr(Stack, "under", wrong)
    with pytest.raises(AssertionError, match="is off by"):
        check(case)


def scaled(loss: Any, factor: float) -> Any:
    """The value, and the gradient with respect to parameters and input times the factor."""
    still = jax.lax.stop_gradient

    def changed(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: still(leaf) + factor * (leaf - still(leaf)), tree)

    return lambda p, x, *rest: loss(changed(p), changed(x), *rest)


def test_a_program_that_magnifies_rounding_is_judged_by_how_much_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sine of a number of 1e9 turns its last digit into the seventh digit of the loss."""
    squared = Program((Step("scaled", (0, 0), 0), *[Step("transposed", (0, 0), 0)] * 5))
    case = Case(Stack(squared, 2, "remat", "none"), ("full",), "grad", "eager", 1)
    under, tally = Stack.under, Tally.empty()
    for factor, right in ((1.0, True), (1 + 1e-9, True), (1.001, False)):
        monkeypatch.setattr(Stack, "under", lambda stack, policy, factor=factor: scaled(under(stack, policy), factor))
        if right:
            check(case, tally)
            continue
        with pytest.raises(AssertionError, match=r"is off by 0\.00\d+, rounding alone by \d"):
            check(case, tally)
    assert tally.checked == 3


@pytest.mark.skipif(compat.remat3() and compat.JAX_VERSION < (0, 12, 0), reason="there policies by hand are refused")
def test_a_complex_number_is_kept_by_hand_too() -> None:
    rotated = Program((Step("complex", (0, 0), 0), Step("complex_exp", (0,), 0), Step("modulus", (0,), 0)))
    tally = Tally.empty()
    for way in ("by_hand", "remat"):
        check(Case(Stack(rotated, 1, way, "none"), ("everything",), "grad", "eager", 0), tally)
    assert not tally.refused and tally.checked == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaf: leaf + 1, "Mismatched elements: 3 / 3"),
        (lambda leaf: leaf.astype(jnp.int64), "int64.*not.*int32"),
        (lambda leaf: leaf.astype(jnp.float64), "float64.*not.*int32"),
    ],
    ids=["value", "int64", "float64"],
)
def test_an_output_of_another_value_or_dtype_is_seen(monkeypatch: pytest.MonkeyPatch, change: Any, message: str) -> None:
    case = Case(Stack(Program(SMALL.steps, ("i", "x")), 1, "remat", "none"), ("dots",), "grad", "eager", 0)
    under = Stack.under

    def wrong(stack: Stack, policy: Any) -> Any:
        def loss(*args: Any) -> Any:
            value, given = under(stack, policy)(*args)
            return value, jax.tree.map(lambda leaf: change(leaf) if leaf.dtype == jnp.int32 else leaf, given)

        return loss

    monkeypatch.setattr(Stack, "under", wrong)
    with pytest.raises(AssertionError, match=message):
        check(case)


@pytest.mark.parametrize("policies", [("off",), ("full",), ("everything", "full")])
def test_a_refusal_that_cannot_be_right_is_seen(monkeypatch: pytest.MonkeyPatch, policies: tuple[str, ...]) -> None:
    def refuse(stack: Stack, policy: Any) -> Any:
        raise NoEffectError("refused")

    monkeypatch.setattr(Stack, "under", refuse)
    stack, tally = Stack(SMALL, 2, "linen", "scan"), Tally.empty()
    with pytest.raises(NoEffectError, match="refused"):
        check(Case(stack, policies, "grad", "eager", 0), tally)
    check(Case(stack, (*policies, "offload: @dots"), "grad", "eager", 0), tally)
    assert tally.refused == {"no effect": 1} and tally.checked == 0


@pytest.mark.parametrize(("compared", "status"), [(8, 1), (9, 0)])
def test_a_run_that_compares_fewer_than_a_third_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compared: int, status: int
) -> None:
    def some(case: Case, tally: Tally) -> None:
        tally.checked += tally.checked < compared

    monkeypatch.setattr(command, "check", some)
    monkeypatch.setattr(command.sys, "argv", ["fault", "--programs", "25"])
    assert command.main() == status
    assert capsys.readouterr().out.count("TOO FEW: 8 of 25 programs were compared\n") == status


# --- what was found ---------------------------------------------------------------------------------------------------


def branches(x: Any) -> Any:
    return jax.lax.cond(x[0] > 0.1, jax.nn.sigmoid, lambda x: 2 * x, jnp.cos(x)) * x


@pytest.mark.parametrize("policy", ["full", "everything", "offload_inputs"])
def test_a_branch_whose_choice_differs_along_a_vmap_is_refused_by_jax(policy: str) -> None:
    """A transpose of `stop_gradient` would suffice; it would also turn other people's wrong `custom_jvp` into a silent 0."""
    rows = jnp.array([[0.3, 0.5], [-0.3, 0.7]])
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(lambda rows: jax.vmap(rj.remat(branches, policy))(rows).sum())(rows)
    # The gradient first, then the map.
    gradient = jax.vmap(jax.grad(lambda x: rj.remat(branches, policy)(x).sum()))(rows) if policy != "offload_inputs" else None
    wanted = jax.vmap(jax.grad(lambda x: branches(x).sum()))(rows)
    assert gradient is None or np.allclose(gradient, wanted, rtol=1e-6)


def test_jax_alone_says_that_a_tangent_was_stopped() -> None:
    stopped = jax.custom_jvp(lambda x: x * x)
    stopped.defjvp(lambda primals, tangents: (stopped(*primals), 2 * jax.lax.stop_gradient(tangents[0])))
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(lambda x: stopped(x).sum())(jnp.ones(2))


@pytest.mark.parametrize("policy", ["full", "everything", "offload_inputs"])
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
@pytest.mark.parametrize("scanned", [False, True])
def test_a_kernel_with_a_rule_of_its_own_is_mapped(policy: str, scanned: bool) -> None:
    """Under a `vmap` inside the gradient: over its rows, with a scale that is the same for all."""
    rows, scale = jnp.array([[0.3, 0.5], [-0.3, 0.7]]), jnp.float32(1.5)

    def block(x: Any, scale: Any) -> Any:
        return attention_like(x, scale, jnp.arange(2)) * x

    def total(function: Any) -> Any:
        def of_row(x: Any, scale: Any) -> Any:
            x = jax.lax.scan(lambda x, _: (function(x, scale), None), x, None, length=2)[0] if scanned else function(x, scale)
            return x.sum()

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
