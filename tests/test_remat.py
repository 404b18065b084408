"""`rj.remat` and every policy: exact counts against handwritten code, gradients in float64, wrong use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, NoEffectError, PolicyError, UnsupportedError
from tests.small_models import Attention, Linear, Mlp, Stack, assert_bit_equal, assert_same, make_loss, times, to_host

JAX = jax.checkpoint_policies
BY_HAND = {
    "full": None,
    "offload_inputs": None,
    "dots": JAX.dots_saveable,
    "dots_with_no_batch_dims": JAX.dots_with_no_batch_dims_saveable,
    "offload_dot_with_no_batch_dims": JAX.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "everything": JAX.everything_saveable,
}


@pytest.mark.versions
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize(
    ("policy", "expected", "moved"),
    [
        # 6 matmuls of the attention forward, 12 backward, and the recomputed ones in each of 2 layers: q, k, v, q·k, weights·v.
        ("full", 46, 0),
        ("offload_inputs", 46, 1),
        ("dots", 36, 0),
        ("dots_with_no_batch_dims", 40, 0),
        ("offload_dot_with_no_batch_dims", 40, 3),
        ("everything", 36, 0),
    ],
)
def test_matmuls_are_those_of_nn_remat(policy: str, expected: int, moved: int, scanned: bool) -> None:
    loss, params, x = make_loss(rj.remat(Attention, policy), scanned=scanned)
    by_hand, _, _ = make_loss(nn.remat(Attention, policy=BY_HAND[policy]), scanned=scanned)
    grads = functools.partial(jax.grad, argnums=(0, 1))
    assert matmuls(grads(loss), params, x) == expected
    if not jax.config.jax_remat3:
        assert matmuls(grads(by_hand), params, x) == expected
    assert len(to_host(grads(loss), params, x)) == moved * (1 if scanned else 2)


@pytest.mark.parametrize(
    ("block", "policy", "expected", "moved"),
    [
        # JAX's dots policies see no names, so JAX cannot express these two.
        (Mlp, "save: @dots; offload: *tanh*", 12, [(2, 3, 3)] * 2),
        (Attention, "offload: */q:*; save: @dots; recompute: *", 36, [(2, 3, 4)] * 2),
        # The first rule that matches decides.
        (Mlp, "offload: *tanh*; save: *", 12, [(2, 3, 3)] * 2),
        (Mlp, "save: *tanh*; offload: @inputs, *tanh#0", 12, [(2, 3, 4)] * 2),
        # Policies of JAX are taken as they are.
        (Attention, BY_HAND["dots"], 36, []),
        (Attention, BY_HAND["offload_dot_with_no_batch_dims"], 40, [(2, 3, 4)] * 6),
    ],
)
def test_a_composed_policy_and_a_policy_of_jax(block: Any, policy: Any, expected: int, moved: list[Any]) -> None:
    loss, params, x = make_loss(rj.remat(block, policy))
    assert matmuls(jax.grad(loss, (0, 1)), params, x) == expected
    assert to_host(jax.grad(loss, (0, 1)), params, x) == moved


@pytest.mark.parametrize(("frozen", "count"), [(0, 10), (1, 11)])
def test_frozen_parameters_cost_what_they_cost_by_hand(frozen: int, count: int) -> None:
    kernels, x = [jnp.ones((4, 3)), jnp.ones((3, 4))], jnp.ones((2, 4))

    def counted(block: Any) -> int:
        def loss(trained: Any) -> Any:
            pair = [trained, kernels[1]] if frozen else [kernels[0], trained]
            return jnp.sum(block(pair, block(pair, x)))

        return matmuls(jax.value_and_grad(loss), kernels[1 - frozen])

    def block(kernels: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ kernels[0]) @ kernels[1]

    by_hand = counted(jax.checkpoint(block))
    assert counted(rj.remat(block, "full")) == counted(rj.remat(block, "offload_inputs")) == by_hand == count


WAYS: dict[str, Callable[..., Any]] = {
    "grad of jit": lambda f, p, x: jax.grad(jax.jit(f))(p, x),
    "vmap": lambda f, p, x: jax.vmap(jax.grad(f), (None, 0))(p, jnp.stack([x, 2 * x])),
    "grad of vmap": lambda f, p, x: jax.grad(lambda p: jax.vmap(f, (None, 0))(p, jnp.stack([x, x / 2])).sum())(p),
    "forward over reverse": lambda f, p, x: jax.jvp(jax.grad(f), (p, x), (p, x)),
}
MORE_WAYS: dict[str, Callable[..., Any]] = {
    "vmap over parameters": lambda f, p, x: jax.vmap(jax.grad(f), (0, None))(jax.tree.map(lambda a: jnp.stack([a, -a]), p), x),
    "jvp of jvp": lambda f, p, x: jax.jvp(lambda x: jax.jvp(lambda x: f(p, x), (x,), (x,)), (x,), (x,)),
    "linearize": lambda f, p, x: jax.linearize(f, p, x)[1](p, x),
    "jacfwd": lambda f, p, x: jax.jacfwd(f, 1)(p, x),
    "batched forward over reverse": lambda f, p, x: jax.vmap(lambda v: jax.jvp(lambda x: jax.grad(f, 1)(p, x), (x,), (v,))[1])(
        jnp.stack([x, x * x])
    ),
}
REVERSE_TWICE: dict[str, Callable[..., Any]] = {
    "reverse over forward": lambda f, p, x: jax.grad(lambda p: jax.jvp(lambda x: f(p, x), (x,), (x,))[1])(p),
    "reverse over reverse": lambda f, p, x: jax.grad(lambda x: jnp.sum(jax.jit(jax.grad(f, 1))(p, x) ** 2))(x),
}


def compute(ways: dict[str, Callable[..., Any]], f: Any, params: Any, x: Any) -> Any:
    return jax.jit(lambda: {name: way(f, params, x) for name, way in ways.items()})()


@pytest.mark.versions
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_gradients_are_the_plain_ones_in_every_way_of_taking_them(x64: None, scanned: bool) -> None:
    plain, params, x = make_loss(Mlp, scanned=scanned)
    ways = WAYS if scanned else WAYS | MORE_WAYS
    expected = compute(ways, plain, params, x)
    for policy in ("dots", "offload_inputs", "offload: *tanh*; save: @dots"):
        loss, _, _ = make_loss(rj.remat(Mlp, policy), scanned=scanned)
        actual = compute(ways, loss, params, x)
        for name in ways:
            assert_same(actual[name], expected[name])


@pytest.mark.versions
@pytest.mark.parametrize(("scanned", "policy"), [(False, "full"), (True, "dots")], ids=["unrolled", "scanned"])
def test_reverse_mode_twice_is_right_and_through_an_offload_refused(x64: None, scanned: bool, policy: str) -> None:
    plain, params, x = make_loss(Mlp, scanned=scanned)
    loss, _, _ = make_loss(rj.remat(Mlp, policy), scanned=scanned)
    assert_same(compute(REVERSE_TWICE, loss, params, x), compute(REVERSE_TWICE, plain, params, x))
    loss, _, _ = make_loss(rj.remat(Mlp, "offload_inputs"), scanned=scanned)
    for way in REVERSE_TWICE.values():
        for jitted in (False, True):
            with pytest.raises(UnsupportedError, match=r"differentiated again in reverse mode.*jax\.jvp.*or use a policy"):
                (jax.jit(way, static_argnums=0) if jitted else way)(loss, params, x)


def test_unrolled_op_by_op_the_bits_are_those_of_the_plain_function() -> None:
    plain, params, x = make_loss(Mlp)
    gradients = functools.partial(jax.value_and_grad, argnums=(0, 1))
    with jax.disable_jit():
        expected = gradients(plain)(params, x)
        for policy in ("full", "offload: *tanh*; save: @dots", "everything"):
            assert_bit_equal(gradients(make_loss(rj.remat(Mlp, policy))[0])(params, x), expected)


def test_an_offload_inside_a_vmap_over_everything_moves_the_whole_batch() -> None:
    loss, params, x = make_loss(rj.remat(Mlp, "offload: *tanh*"))
    batched = jax.vmap(jax.grad(loss), (None, 0))
    assert to_host(batched, params, jnp.stack([x] * 5)) == [(5, 2, 3, 3)] * 2


def test_arguments_of_any_kind_reach_a_function_as_they_are() -> None:
    seen = []

    def block(tree: Any, scale: float, *, mode: str, flag: bool, nothing: None, function: Any, index: Any) -> Any:
        seen.append((scale, mode, flag, nothing, function))
        return {"y": function(tree["a"] @ tree["b"]) * scale, "index": index + 1, "flag": index > 1}, mode

    tree = {"a": jnp.ones((2, 3)), "b": jnp.full((3, 2), 0.5)}
    options = {"mode": "m", "flag": True, "nothing": None, "function": jnp.sin, "index": jnp.arange(3)}

    def gradient(f: Any) -> Any:
        def loss(tree: Any) -> Any:
            outputs, mode = f(tree, 2.0, **options)
            assert mode == "m" and seen[-1] == (2.0, "m", True, None, jnp.sin)
            return outputs["y"].sum(), outputs

        (value, outputs), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(tree)
        assert outputs["index"].tolist() == [1, 2, 3] and outputs["flag"].tolist() == [False, False, True]
        return value, outputs["y"], grads

    plain = gradient(block)
    for policy in ("full", "offload: *dot*", "save: *"):
        assert_same(gradient(rj.remat(block, policy)), plain, 1e-6)


def test_what_a_function_closes_over_is_differentiated_and_is_no_input() -> None:
    def loss(w: Any, x: Any, policy: str) -> Any:
        return jnp.sum(rj.remat(lambda x: jnp.tanh(x @ w), policy)(x))

    w, x = jnp.eye(3) + 0.1, jnp.ones((2, 3))
    plain = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    assert_same(jax.grad(loss)(w, x, "full"), plain, 1e-6)
    assert_same(jax.jit(jax.grad(loss), static_argnums=2)(w, x, "offload_inputs"), plain, 1e-6)
    assert to_host(lambda w: jax.grad(loss)(w, x, "offload_inputs"), w) == [(2, 3)]


@pytest.mark.parametrize("inner", ["full", "dots", "everything"])
@pytest.mark.parametrize("outer", ["full", "dots", "everything"])
def test_a_block_inside_a_block_costs_what_it_costs_by_hand(inner: str, outer: str) -> None:
    def plain(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def nested(inner: Any, remat: Callable[..., Any]) -> Any:
        return remat(lambda w, x: jnp.sin(inner(w, x)) @ w)

    def gradient(f: Any) -> Any:
        return jax.value_and_grad(lambda w, x: jnp.sum(f(w, x)), (0, 1))

    w, x = jnp.eye(3) + 0.1, jnp.ones((2, 3))
    own = jax.checkpoint(plain, policy=BY_HAND[inner])
    ours = nested(rj.remat(plain, inner), functools.partial(rj.remat, policy=outer))
    by_hand = nested(own, functools.partial(jax.checkpoint, policy=BY_HAND[outer]))
    mixed = nested(own, functools.partial(rj.remat, policy=outer))
    expected = {"full": {"full": 13}.get(inner, 11)}.get(outer, 9)
    for f in (ours,) if jax.config.jax_remat3 else (ours, by_hand, mixed):
        assert matmuls(gradient(f), w, x) == expected
    if inner != outer:
        assert_same(*(jax.jit(gradient(f))(w, x) for f in (ours, nested(plain, lambda f: f))), 1e-6)


def test_a_policy_may_be_made_by_a_decorator_and_keeps_the_signature() -> None:
    @functools.partial(rj.remat, policy="full", static_argnames="n")
    def block(x: Any, n: int = 2) -> Any:
        """Doc."""
        return jnp.sin(x) * n

    assert block.__name__ == "block" and block.__doc__ == "Doc."
    assert float(block(jnp.float32(0.0), n=3)) == 0.0


class Net(nn.Module):
    block: Any

    @nn.compact
    def __call__(self, x: Any, **options: Any) -> Any:
        return self.block()(self.block()(x, **options), **options)


def test_a_class_keeps_its_name_and_so_its_parameters() -> None:
    x = jnp.ones((2, 4))
    plain = Net(Mlp).init(jax.random.key(0), x)
    assert_bit_equal(Net(rj.remat(Mlp, "full")).init(jax.random.key(0), x), plain)
    assert sorted(plain["params"]) == ["Mlp_0", "Mlp_1"]
    # Flax's own remat renames modules, and so cannot read them.
    renamed = jax.eval_shape(Net(nn.remat(Mlp)).init, jax.random.key(0), x)
    assert sorted(renamed["params"]) == ["CheckpointMlp_0", "CheckpointMlp_1"]


def test_static_arguments_by_name() -> None:
    class Gated(nn.Module):
        @nn.compact
        def __call__(self, x: Any, deterministic: bool, mode: str = "tanh") -> Any:
            y = Linear(4)(x)
            return y if deterministic else getattr(jnp, mode)(y)

    block = rj.remat(Gated, "full", static_argnames=("deterministic", "mode"))
    x = jnp.ones((2, 4))
    params = Net(Gated).init(jax.random.key(0), x, deterministic=True)
    for options in ({"deterministic": True}, {"deterministic": False, "mode": "sin"}):
        assert_bit_equal(Net(block).apply(params, x, **options), Net(Gated).apply(params, x, **options))
    with pytest.raises(ArgumentError, match=r"static_argnames='deterministic': got a traced value.*mark it static"):
        jax.jit(lambda flag: Net(block).apply(params, x, deterministic=flag))(True)
    with pytest.raises(ArgumentError, match=r"static_argnames='mode': got an array of shape \(2,\)"):
        Net(block).apply(params, x, deterministic=True, mode=jnp.ones(2))
    with pytest.raises(ArgumentError, match="static_argnames='deterministc': no argument.*Did you mean 'deterministic'"):
        rj.remat(Gated, "full", static_argnames="deterministc")


@pytest.mark.parametrize(
    ("target", "policy", "error", "message"),
    [
        (Mlp(), "full", ArgumentError, r"target=Mlp instance: expected a module class.*use remat\(Mlp, policy\)"),
        (3, "full", ArgumentError, "target=3: expected a Linen or NNX module class or a function"),
        (dict, "full", ArgumentError, "target=<class 'dict'>: a class must be a flax.linen or flax.nnx module"),
        (Mlp, None, PolicyError, "policy=None is read differently.*Write 'full'.*or 'off'"),
    ],
)
def test_what_is_no_target_or_no_policy_is_refused_at_once(target: Any, policy: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        rj.remat(target, policy)


@pytest.mark.parametrize(
    ("target", "policy", "message"),
    [
        (Mlp, "save: *tanhh*", r"selector '\*tanhh\*' matches no residual of Mlp. Did you mean 'Mlp:tanh#0'"),
        (Mlp, "save: @dots; offload: *Linear_0:dot*", "offloads nothing in Mlp"),
        (Mlp, "offload: @dots; save: *", "it selects Mlp/Linear_0:dot_general#0, .*the backward pass reads none of these"),
        (lambda x: jnp.tanh(x), "save: @primitive:cos", "'@primitive:cos'"),
        (lambda x: jnp.sin(x), "offload_inputs", "offloads nothing in lambda: .* select an array of rank 1 or"),
    ],
)
def test_a_policy_without_effect_is_an_error_when_it_runs(target: Any, policy: str, message: str) -> None:
    under, x = rj.remat(target, policy), jnp.ones((2, 4))
    with pytest.raises(NoEffectError, match=message):
        under().apply(Mlp().init(jax.random.key(0), x), x) if target is Mlp else under(1.0)


def test_arrays_that_only_a_derivative_rule_computes_can_be_selected() -> None:
    assert times("cos", jax.grad(lambda x: rj.remat(jnp.sin, "save: @primitive:cos")(x).sum()), jnp.ones(3)) == 1


def test_off_is_the_plain_function() -> None:
    loss, params, x = make_loss(rj.remat(Mlp, "off"))
    plain, _, _ = make_loss(Mlp)
    assert str(jax.make_jaxpr(jax.grad(loss))(params, x)) == str(jax.make_jaxpr(jax.grad(plain))(params, x))
    assert Stack(rj.remat(Mlp, "off")).init(jax.random.key(0), x).keys() == {"params"}
