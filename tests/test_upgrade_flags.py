"""What must hold in every version of JAX: policies do what they do, also under each flag that JAX marks as an upgrade."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj
from remat_jax import compat
from remat_jax.compat import versions as compat_versions
from remat_jax.core.walk import bodies
from remat_jax.cost.count import matmuls
from remat_jax.policy import NAMED
from tests.small_models import Mlp, Stack, assert_same, make_loss

pytestmark = pytest.mark.versions

UPGRADES = tuple(name for name in compat.upgrade_flags() if not getattr(jax.config, name))
"""The upgrade flags of this JAX that are off."""
TOGETHER = tuple(name for name in UPGRADES if name != "jax_scan3")
"""JAX itself cannot differentiate a scan with jax_scan3."""
CASES = [*((name,) for name in TOGETHER), TOGETHER]
IDS = [*TOGETHER, "together"]


@jax.custom_vjp
def kernel(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def _forward(x: Any, w: Any) -> Any:
    product = x @ w
    return jnp.tanh(product), (x, w, product)


def _backward(saved: Any, cotangent: Any) -> Any:
    x, w, product = saved
    change = cotangent * (1 - jnp.tanh(product) ** 2)
    return change @ w.T, x.T @ change


kernel.defvjp(_forward, _backward)


class Block(nn.Module):
    """A `custom_vjp` call, and two `custom_jvp` calls, one of which calls another in its rule."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(kernel(x, self.param("kernel", nn.initializers.lecun_normal(), (8, 8))))
        return x + nn.Dense(8, use_bias=False, name="down")(jax.nn.softmax(x))


def net(own: bool) -> Stack:
    return Stack(nn.remat(Block) if own else Block, 3)


X = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(4, 8)
PARAMS = {
    "params": {
        f"layer_{index}": {
            "kernel": np.random.default_rng(index).normal(size=(8, 8)).astype(np.float32),
            "down": {"kernel": np.random.default_rng(9 + index).normal(size=(8, 8)).astype(np.float32)},
        }
        for index in range(3)
    }
}


def loss_of(own: bool) -> Callable[[Any, Any], Any]:
    return lambda params, x: jnp.mean(net(own).apply(params, x) ** 2)


def kept(own: bool, policy: str) -> tuple[Any, ...]:
    """The rows of the residual table, and the matmuls of the gradient."""
    table = rj.residuals(rj.Workload(loss_of(own), PARAMS, (X,), blocks=Block), policy)
    rows = tuple((row.name, row.bytes, row.action) for row in table.rows)
    return rows, matmuls(jax.grad(rj.checkpoint_blocks(loss_of(own), {Block: policy})), PARAMS, X)


POLICIES = ("dots", "offload: *dot_general*; save: *custom_jvp_call*")


@pytest.fixture(scope="module")
def without() -> dict[str, tuple[Any, ...]]:
    """What each policy keeps without flags, in the model without checkpoints of its own."""
    return {policy: kept(False, policy) for policy in POLICIES}


@pytest.mark.parametrize("flags", CASES, ids=IDS)
def test_a_policy_keeps_what_it_keeps_without_the_flag(with_flags, without, flags):
    with_flags(flags)
    for policy in POLICIES:
        # This flag changes the program: the derivative of its softmax reads other arrays.
        expected = kept(False, policy) if "jax_softmax_custom_jvp" in flags else without[policy]
        assert kept(True, policy) == expected


@pytest.mark.parametrize("flags", CASES, ids=IDS)
def test_gradients_are_the_plain_ones_under_vmap_too(with_flags, flags):
    with_flags(flags)

    def mapped(params: Any, x: Any, policy: str) -> Any:
        each = rj.checkpoint_blocks(lambda x: net(True).apply(params, x), {Block: policy})
        return jnp.mean(jax.vmap(each)(x[None]) ** 2)

    expected = jax.jit(jax.grad(loss_of(False), (0, 1)))(PARAMS, X)
    for loss in (rj.checkpoint_blocks(loss_of(True), {Block: POLICIES[1]}), lambda p, x: mapped(p, x, "dots")):
        gradients = jax.jit(jax.grad(loss, (0, 1)))(PARAMS, X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), gradients, expected)


def _kinds(jaxpr: Any) -> list[Any]:
    return [
        (compat.kind(eqn), compat.given_name(eqn), compat.has_own_derivative(eqn), [_kinds(body) for body in bodies(eqn)])
        for eqn in jaxpr.jaxpr.eqns
    ]


@pytest.mark.parametrize("flags", [*CASES, ("jax_scan3",)], ids=[*IDS, "jax_scan3"])
def test_equations_are_recognised_by_what_they_do(with_flags: Callable[[Iterable[str]], None], flags: tuple[str, ...]) -> None:
    def program(x: Any, w: Any) -> Any:
        return checkpoint_name(jax.jit(jnp.sin)(jax.checkpoint(jnp.tanh)(jax.nn.relu6(kernel(x, w)))), "last")

    def kinds() -> list[Any]:
        # A new function, so that JAX traces it anew although some flags are not in the keys of its caches.
        return _kinds(jax.make_jaxpr(lambda x, w: program(x, w))(X, np.eye(8, dtype=np.float32)))

    before = kinds()
    with_flags(flags)
    assert kinds() == before
    names = [(kind, name, own) for kind, name, own, _ in before]
    assert names == [
        ("custom_vjp_call", None, True),
        ("custom_jvp_call", None, True),
        ("checkpoint", None, False),
        ("jit", None, False),
        ("name", "last", False),
    ]


def test_every_upgrade_flag_of_this_jax_is_known() -> None:
    assert compat.versions._TESTED_FLAGS >= set(compat.upgrade_flags())


@pytest.mark.skipif("jax_scan3" not in UPGRADES, reason="this JAX has no such flag, or it is on")
def test_the_limits_of_a_flag_are_told(with_flags: Callable[[Iterable[str]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> list[str]:
        return [text for text in compat.limits() if "=True" in text]

    before = told()
    with_flags(["jax_scan3"])
    (text,) = set(told()) - set(before)
    assert text.startswith("jax_scan3=True") and text.endswith('jax.config.update("jax_scan3", False)')
    monkeypatch.setattr(compat.versions, "_TESTED_FLAGS", compat.versions._TESTED_FLAGS - {"jax_scan3"})
    assert any("jax_scan3=True: remat_jax is not tested with this flag" in text for text in told())


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_gradients_under_every_named_policy_are_the_plain_ones(x64: None, scanned: bool) -> None:
    plain, params, x = make_loss(Mlp, scanned=scanned)
    expected = jax.jit(jax.grad(plain, (0, 1)))(params, x)
    for policy in NAMED:
        grads = jax.jit(jax.grad(rj.checkpoint_blocks(plain, {Mlp: policy}), (0, 1)))(params, x)
        assert_same(grads, expected)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.10.2", (0, 10, 2)), ("0.13.0rc1", (0, 13, 0)), ("0.13.0.dev20261122", (0, 13, 0)), ("0.12.0+local", (0, 12, 0))],
)
def test_a_candidate_and_a_nightly_build_have_the_numbers_of_their_release(version: str, numbers: tuple[int, ...]) -> None:
    assert compat_versions._numbers(version) == numbers
