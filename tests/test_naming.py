"""The names of residuals: their parts, where they can be given, and that keeping a name keeps its array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj
from remat_jax import compat
from remat_jax.core import block_under_policy
from remat_jax.cost.count import matmuls
from remat_jax.errors import NoEffectError, UnsupportedError
from remat_jax.policy import Policy
from tests.small_models import Attention, assert_bit_equal, assert_same, make_loss, times, to_host

# NumPy arrays are float64 if JAX's 64-bit types are on.
W, X = np.random.default_rng(0).normal(size=(4, 4)) / 2, np.random.default_rng(1).normal(size=(3, 4))


def names(fn: Callable[..., Any], *args: Any, path: str = "b", linearised: bool = False) -> list[str]:
    """The names in the block `fn`; with `linearised` only those that its derivative rules add."""
    block = block_under_policy(jax.make_jaxpr(fn)(*args), Policy.parse("full"), path, [True] * len(args))
    candidates = list(block.named.candidates)
    return [name for name in block.linearised.candidates if name not in candidates] if linearised else candidates


def again(fn: Callable[..., Any], policy: str, *args: Any) -> int:
    """The matmuls that the backward pass of `fn` recomputes under `policy`."""

    def count(f: Any) -> int:
        return matmuls(jax.value_and_grad(lambda *args: jnp.sum(f(*args)), tuple(range(len(args)))), *args)

    return count(rj.remat(fn, policy)) - count(fn)


def test_a_name_is_path_primitive_and_number() -> None:
    def block(w: Any, x: Any) -> Any:
        with jax.named_scope("ffn"):
            with jax.named_scope("up"):
                h = x @ w
            h = jnp.exp(h) * jnp.exp(x)
        return h @ w

    assert names(block, W, X) == [
        "b:input#0",
        "b:input#1",
        "b/ffn/up:dot_general#0",
        "b/ffn:exp#0",
        "b/ffn:exp#1",
        "b/ffn:mul#0",
        "b:dot_general#0",
    ]
    assert names(block, W, X, path="net/b")[3] == "net/b/ffn:exp#0"


def test_linen_paths_are_in_the_names_and_the_blocks_own_is_there_once() -> None:
    loss, params, x = make_loss(Attention)
    with pytest.raises(NoEffectError) as error:
        rj.checkpoint_blocks(loss, {Attention: "save: nothing"})(params, x)
    message = str(error.value)
    assert "layer_0/q:dot_general#0" in message and "layer_0:input#0" in message and "layer_0/layer_0" not in message
    scanned, params, x = make_loss(Attention, scanned=True)
    # A block has the same names unrolled and scanned: `layers` is the stack's name for it.
    for policy, moved in (("offload: layers/v:dot_general#0", (2, 3, 4)), ("offload: layers:exp#0", (2, 3, 3))):
        assert to_host(jax.grad(rj.checkpoint_blocks(scanned, {Attention: policy})), params, x) == [moved]


def test_a_derivative_rule_names_only_what_the_block_has_not() -> None:
    def block(x: Any) -> Any:
        return jax.nn.relu(jnp.exp(x)) * jnp.sin(x)

    assert "b:exp#0" in names(block, X) and "b:cos#0" not in names(block, X)
    added = names(block, X, linearised=True)
    assert "b:cos#0" in added and not any("exp" in name or "sin" in name for name in added)


def test_a_users_name_wins() -> None:
    def block(w: Any, x: Any) -> Any:
        x = checkpoint_name(x, "given")
        h = checkpoint_name(jnp.exp(x @ w), "mine")
        return checkpoint_name(h @ w, "out") @ w

    block_names = names(block, W, X)
    assert {"given", "mine", "out"} <= set(block_names) and not any("exp" in name for name in block_names)
    # The rule of exp reads `mine` too, so saving it avoids recomputing the dot before it.
    policies = {"full": 2, "save: mine": 1, "save: out": 1, "save: mine, out": 0, "dots": 0, "save: @primitive:exp": 1}
    assert {policy: again(block, policy, W, X) for policy in policies} == policies
    assert to_host(jax.grad(lambda x: jnp.sum(rj.remat(block, "offload: given")(W, x))), X) == [(3, 4)]


@jax.custom_jvp
def rooted(x: Any) -> Any:
    return jnp.sqrt(x)


@rooted.defjvp
def _(primals: Any, tangents: Any) -> Any:
    with jax.named_scope("rule"):
        half = jnp.power(primals[0] + 0.0, -0.5) / 2
    return rooted(*primals), half * tangents[0]


@jax.custom_vjp
def kernel(q: Any, k: Any) -> Any:
    return jnp.tanh(q @ k)


def _kernel_fwd(q: Any, k: Any) -> Any:
    scores = q @ k
    with jax.named_scope("statistics"):
        lse = jax.nn.logsumexp(scores @ k, axis=-1)
    return jnp.tanh(scores), (q, k, scores, lse)


def _kernel_bwd(saved: Any, ct: Any) -> Any:
    q, k, scores, lse = saved
    d = ct * (1 - jnp.tanh(scores) ** 2) + 0 * lse[:, None]
    return d @ k.T, q.T @ d


kernel.defvjp(_kernel_fwd, _kernel_bwd)

SPEC = jax.sharding.PartitionSpec
sharded = functools.partial(
    jax.shard_map,
    mesh=jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,)),
    in_specs=(SPEC(), SPEC("i")),
    out_specs=SPEC(),
)

INSIDE: dict[str, tuple[Callable[..., Any], str, int]] = {
    # how: (block, selector, recomputed matmuls that saving avoids, recomputed under `full`)
    "jit": (lambda w, x: jax.jit(lambda x: jnp.exp(x @ w))(x) @ w, "*:exp#0", 1),
    "jit in jit": (lambda w, x: jax.jit(jax.jit(lambda x: jnp.exp(x @ w)))(x) @ w, "*:exp#0", 1),
    "scan": (
        lambda w, x: jax.lax.scan(lambda x, _: (jnp.exp(-((x @ w) ** 2)) @ w, None), x, None, length=3)[0] @ w,
        "*:exp#0, *:dot_general#*",
        6,
    ),
    "cond": (lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda x: jnp.exp(x @ w), jnp.sin, x) @ w, "*:exp#0, *:sin#0, *:cond#*", 1),
    "custom_jvp": (lambda w, x: rooted(jnp.exp(x @ w)) @ w, "*rule:*, *:custom_jvp_call#0, *:exp#0", 1),
    # Only the backward pass reads the log-sum-exp: recomputing drops its matmul from the forward pass.
    "custom_vjp": (lambda w, x: kernel(x, w) @ w, "*:dot_general#*, *statistics*", 1),
    "shard_map": (lambda w, x: sharded(lambda w, x: jax.lax.psum(jnp.exp(x @ w), "i") @ w)(w, x), "*exp*", 1),
    "vmap": (lambda w, x: jax.vmap(lambda row: jnp.exp(row @ w))(x) @ w, "*:exp#0", 1),
    # Its own checkpoint recomputes the dot even without ours.
    "checkpoint": (lambda w, x: jax.checkpoint(lambda x: jnp.exp(x @ w))(x) @ w, "*:exp#0", 2),
}


@pytest.mark.parametrize("how", INSIDE)
def test_what_is_inside_can_be_named_and_kept(x64: None, how: str) -> None:
    fn, selector, kept = INSIDE[how]
    assert again(fn, "full", W, X) - again(fn, f"save: {selector}", W, X) == kept
    plain, *grads = (
        jax.jit(jax.grad(lambda w, x, f=f: jnp.sum(jnp.sin(f(w, x))), (0, 1)))(W, X)
        for f in (fn, rj.remat(fn, f"save: {selector}"), rj.remat(fn, "offload: *"))
    )
    for ours in grads:
        assert_same(ours, plain)


def test_a_while_loop_is_kept_as_a_whole() -> None:
    def block(w: Any, x: Any) -> Any:
        start = (0, jax.lax.stop_gradient(x))
        _, steps = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), start)
        return (steps * x) @ w

    assert [name for name in names(block, W, X) if "while" in name] == ["b:while#0", "b:while#1"]
    assert not any("tanh" in name for name in names(block, W, X))
    loops = [
        times("while", jax.value_and_grad(lambda x, policy=policy: jnp.sum(rj.remat(block, policy)(W, x))), X)
        for policy in ("save: *:while#1", "full")
    ]
    assert loops == [1, 2]


READ_BY_RULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "exp": (jnp.exp, "*:exp#0"),
    "tanh": (jnp.tanh, "*:tanh#0"),
    "sigmoid": (jax.nn.sigmoid, "*:logistic#0"),
    "sqrt": (jnp.sqrt, "*:sqrt#0"),
    "softmax": (jax.nn.softmax, "*:div#*, *:exp#*"),
    "silu": (jax.nn.silu, "*:mul#*, *:logistic#0, *:dot_general#0"),
    "relu": (jax.nn.relu, "*"),
    "sort": (jnp.sort, "*"),
    "gather": (lambda x: x[jnp.argsort(x[:, 0])], "*"),
}


@pytest.mark.parametrize("op", READ_BY_RULES)
def test_what_is_saved_is_not_computed_again_for_a_rule_that_reads_it(op: str) -> None:
    function, selector = READ_BY_RULES[op]

    def block(w: Any, x: Any) -> Any:
        return function(x @ w) @ w

    assert again(block, "full", W, X) == 1 and again(block, f"save: {selector}", W, X) == 0


def test_the_values_are_those_of_the_unnamed_block_to_the_bit() -> None:
    def block(w: Any, x: Any) -> Any:
        return jax.nn.softmax(jnp.where(x > 0, x, jnp.exp(x)) @ w), x.astype(jnp.bfloat16), x > 0

    jaxpr = jax.make_jaxpr(block)(W, X)
    named = block_under_policy(jaxpr, Policy.parse("dots"), "b", [False, True]).named
    with jax.disable_jit():
        assert_bit_equal(compat.jaxpr_function(named.jaxpr)(W, X), compat.jaxpr_function(jaxpr)(W, X))
    assert named.jaxpr.in_avals == jaxpr.in_avals and named.jaxpr.out_avals == jaxpr.out_avals
    assert "b:input#0" in named.candidates and "b:input#1" not in named.candidates


@pytest.mark.parametrize(("policy", "prints"), [("full", 2), ("everything", 1)])
def test_a_print_in_a_block_runs(policy: str, prints: int, capfd: pytest.CaptureFixture[str]) -> None:
    def block(x: Any) -> Any:
        jax.debug.print("first {}", x[0, 0] * 2)
        return jnp.tanh(x)

    x = jnp.ones((2, 3))
    jax.block_until_ready(jax.jit(jax.grad(lambda x: jnp.sum(rj.remat(block, policy)(x))))(x))
    jax.effects_barrier()
    # JAX recomputes it with the rest.
    assert capfd.readouterr().out.count("first 2.0") == prints


def test_a_mutable_array_is_refused() -> None:
    def block(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = jnp.tanh(ref[...])
        return ref[...]

    with pytest.raises(UnsupportedError, match=r"block 'block' uses a mutable array .*as an argument and a result"):
        rj.remat(block, "full")(jnp.ones(3))


@pytest.mark.parametrize(("policy", "products"), [("full", 1), ("save: *exp#0", 0), ("offload: *exp#0", 0)])
def test_a_complex_array_is_kept_as_its_two_parts(x64: None, policy: str, products: int) -> None:
    """Both under one name; exp reads its own output, hence the parts."""

    def block(w: Any, x: Any) -> Any:
        turned = jnp.exp(1j * (x @ w))
        return jnp.real(turned * jnp.conj(turned + x))

    grads = [jax.jit(jax.grad(lambda w, x, f=f: jnp.sum(f(w, x) ** 2), (0, 1)))(W, X) for f in (rj.remat(block, policy), block)]
    assert_same(*grads)
    assert again(block, policy, W, X) == products
    assert not [name for name in names(block, W, X) if ":complex#" in name]
