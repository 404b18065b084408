"""`rj.checkpoint_blocks`: cached traces, threads, a block's arguments, and Flax models inside a block."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, BlockError, NoEffectError, PolicyError
from tests.small_models import (
    Attention,
    First,
    Linear,
    Mlp,
    Second,
    Stack,
    assert_bit_equal,
    assert_same,
    block_by_hand,
    make_loss,
    times,
    to_host,
    values,
)

# Matmuls of value and gradient of two `Mlp`s: 4 forward, 8 backward minus 1 for the input, and 2 recomputed under `full`.
PLAIN, FULL = 11, 13


def counted(loss: Callable[..., Any], params: Any, x: Any) -> int:
    return matmuls(jax.value_and_grad(loss), params, x)


def full(loss: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return rj.checkpoint_blocks(loss, {Mlp: "full", **more})


def test_each_call_does_what_it_says_whatever_was_traced_before() -> None:
    loss, params, x = make_loss()
    jitted, step = jax.jit(loss), jax.jit(jax.value_and_grad(loss))
    of = {"plain": jitted} | {policy: rj.checkpoint_blocks(jitted, {Mlp: policy}) for policy in ("full", "off", "dots")}
    expected = {"plain": PLAIN, "full": FULL, "off": PLAIN, "dots": PLAIN}
    for name in ("full", "off", "plain", "dots", "full", "plain"):
        assert counted(of[name], params, x) == counted(jax.jit(of[name]), params, x) == expected[name], name
        jax.grad(of[name])(params, x)
    # A step that takes the gradient itself.
    assert [matmuls(fn, params, x) for fn in (step, full(step), jax.jit(full(step)), step)] == [PLAIN, FULL, FULL, PLAIN]
    assert_same(full(step)(params, x), step(params, x), 1e-6)


@pytest.mark.parametrize("mesh", [None, {"data": 1}])
def test_a_loss_without_blocks_is_told_apart_from_one_with_them(mesh: Any) -> None:
    """Both take the same arguments. What the first loss shows in a cached trace is no proof for the second."""
    loss, params, x = make_loss()
    jitted = jax.jit(loss)

    def traced(loss: Any) -> None:
        step = rj.Workload(loss, params, (x,), Mlp, mesh=mesh).step("full")
        jax.eval_shape(step.function, *step.arguments)

    for _ in range(3):
        traced(lambda params, x: jitted(params, x))
    with pytest.raises(BlockError, match="block=Mlp: this class was never called"):
        traced(lambda params, x: jnp.sum(x) + sum(map(jnp.sum, jax.tree.leaves(params))))


def test_an_error_comes_again_with_every_call() -> None:
    loss, params, x = make_loss()
    full(loss)(params, x)

    @functools.partial(jax.jit, static_argnames="use")
    def choose(params: Any, x: Any, use: bool) -> Any:
        return loss(params, x) if use else jnp.sum(x)

    # The same policies, but this block is never called, directly or in a cached trace.
    without = jax.jit(lambda params, x: jnp.sum(Linear(4).apply(params, x)))
    linear_params = {"params": {"kernel": jnp.ones((4, 4))}}
    sometimes, wrapped = full(choose), full(without)
    misspelt = rj.checkpoint_blocks(jax.jit(loss), {Mlp: "save: *tanhh*"})
    for _ in range(2):
        sometimes(params, x, use=True)
        for call in (
            lambda: full(without)(linear_params, x),
            lambda: wrapped(linear_params, x),
            lambda: sometimes(params, x, use=False),
        ):
            with pytest.raises(BlockError, match="block=Mlp: this class was never called"):
                call()
        with pytest.raises(NoEffectError, match=r"'\*tanhh\*' matches no residual of layer_\d, layer_\d"):
            misspelt(params, x)


def test_a_trace_that_another_wrapper_cached_is_accepted_without_running_the_model_each_time() -> None:
    loss, params, x = make_loss()
    traced = []

    @jax.jit
    def jitted(params: Any, x: Any) -> Any:
        traced.append(1)
        return loss(params, x)

    for _ in range(4):
        # A new function each time, as in a training loop without an outer jit.
        full(lambda params: jitted(params, x))(params)
    # The second run checks the first cached trace.
    assert len(traced) == 2


def test_a_function_that_looks_at_values_works_and_is_still_checked() -> None:
    loss, params, x = make_loss()
    step = jax.jit(jax.value_and_grad(loss))

    def epoch(params: Any, x: Any) -> float:
        return sum(float(step(params, x)[0]) for _ in range(2))

    for _ in range(2):
        # The second wrapper meets a cached step and cannot trace `epoch` to see its contents.
        assert rj.checkpoint_blocks(epoch, {Mlp: "full"})(params, x) == pytest.approx(epoch(params, x), rel=1e-6)

    # No other function of this file reaches a block under these policies.
    with pytest.raises(BlockError, match="block=Second: this class was never called"):
        rj.checkpoint_blocks(epoch, {Second: "full"})(params, x)


def test_nothing_is_kept_of_calls_and_arrays() -> None:
    class Marker:
        """An object with weak references."""

    loss, params, x = make_loss()
    marker, arrays = Marker(), jax.tree.map(lambda leaf: leaf + 1, params)
    gone = [weakref.ref(marker), weakref.ref(jax.tree.leaves(arrays)[0])]
    fn = full(lambda params, x, keep=marker: loss(params, x))
    fn(params, x)
    jax.grad(fn)(arrays, x)
    del arrays, fn, marker
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Mlp()(Attention()(x))


def test_each_block_has_its_own_policy_by_class_glob_or_base_class() -> None:
    loss, params, x = make_loss(Pair)
    plain = counted(loss, params, x)

    def more(policies: dict[Any, Any]) -> int:
        return counted(rj.checkpoint_blocks(loss, policies), params, x) - plain

    assert plain == 16 + 29
    assert (more({Mlp: "full"}), more({Attention: "full"}), more({Mlp: "full", Attention: "full"})) == (2, 10, 12)
    assert (more({"layer_0/Mlp_?": "full"}), more({"layer_0/Att*": "full"})) == (1, 5)
    # A star also matches slashes: the outermost matching modules are the blocks.
    assert more({"layer_*": "full"}) == more({"*layer*": "full"}) == 14
    assert more({"layer_1": "dots", "layer_?/Mlp_0": "full"}) == 1
    # The outer block contains both, and its names include the inner modules.
    assert more({Pair: "full"}) == 14
    assert more({Pair: "save: *Attention_0*, *Mlp_0*"}) == 0

    loss, params, x = make_loss(First)
    assert counted(full(loss), params, x) == FULL


def test_nested_calls_add_up_and_the_inner_one_wins() -> None:
    loss, params, x = make_loss(Pair)
    plain = counted(loss, params, x)
    inner = rj.checkpoint_blocks(jax.jit(loss), {Attention: "full"})
    for _ in range(2):
        assert counted(full(lambda params, x: inner(params, x)), params, x) == plain + 12
        assert counted(inner, params, x) == plain + 10
        # Both want the same class: the outer policy would have no effect.
        with pytest.raises(BlockError, match=r"block=Attention: .*an inner checkpoint_blocks has a policy"):
            rj.checkpoint_blocks(inner, {Attention: "dots"})(params, x)


def test_a_block_called_in_a_loop_and_outside_one() -> None:
    def loss(kernel: Any, x: Any) -> Any:
        x = block_by_hand(kernel, x)
        return jnp.sum(jax.lax.scan(lambda x, _: (block_by_hand(kernel, x), None), x, length=3)[0] ** 2)

    args = values(4, 3), values(2, 4, seed=1)
    offloaded = jax.grad(rj.checkpoint_blocks(loss, {Mlp: "offload_inputs"}))
    assert_same(offloaded(*args), jax.grad(loss)(*args), 1e-6)
    assert to_host(offloaded, *args) == [(2, 4), (2, 4)]


class Everything(nn.Module):
    """Dropout, a stream of its own, statistics, sown values, and arguments of all kinds."""

    @nn.compact
    def __call__(self, x: Any, *, train: bool, mode: str = "tanh", mask: Any = None, ids: Any = None) -> Any:
        h = nn.BatchNorm(use_running_average=not train, dtype=x.dtype, param_dtype=x.dtype)(Linear(4)(x))
        h = nn.Dropout(0.5, deterministic=not train)(getattr(jnp, mode)(h))
        if train:
            h = h + jax.random.normal(self.make_rng("noise"), h.shape, h.dtype)
        self.sow("intermediates", "h", h)
        return {"x": x + jnp.where(mask, h, 0), "ids": ids + 1, "names": (mode, None)}


class Model(nn.Module):
    block: Any = Everything

    @nn.compact
    def __call__(self, x: Any, ids: Any, *, train: bool) -> Any:
        for mode in ("tanh", "sin"):
            out = self.block()(x, train=train, mode=mode, mask=ids[:, None] > 1, ids=ids)
            x, ids = out["x"], out["ids"]
            assert out["names"] == (mode, None)
        return x, ids


@pytest.mark.parametrize(("policy", "train"), [("full", False), ("offload: @inputs; save: @dots", True)])
def test_linen_models_compute_what_they_compute_without(x64: None, policy: str, train: bool) -> None:
    x, ids = values(4, 4), jnp.arange(4)
    rngs = {"dropout": jax.random.key(1), "noise": jax.random.key(2)}
    variables = jax.jit(lambda x: Model().init({"params": jax.random.key(0), **rngs}, x, ids, train=train))(x)

    def run(model: Any, variables: Any, x: Any) -> Any:
        collections = ["batch_stats", "intermediates"]
        kwargs = {"train": train, "rngs": rngs, "mutable": collections, "capture_intermediates": True}
        (y, ids_out), updates = model.apply(variables, x, ids, **kwargs)
        assert sorted(updates) == collections
        arrays = jax.tree.map(lambda leaf: None if isinstance(leaf, str) else leaf, updates)
        return jnp.sum(y**2), (y, ids_out, arrays)

    plain = functools.partial(run, Model())
    blocks = rj.checkpoint_blocks(plain, {Everything: policy})
    classes = functools.partial(run, Model(rj.remat(Everything, policy, static_argnames=("train", "mode"))))
    expected = jax.jit(jax.value_and_grad(plain, has_aux=True))(variables, x)
    for ours in (blocks, classes):
        # Another mask or another draw of the noise would differ greatly; the aux has statistics, sown and captured values.
        assert_same(jax.jit(jax.value_and_grad(ours, has_aux=True))(variables, x), expected)


class Shared(nn.Module):
    def setup(self) -> None:
        self.block, self.blocks = Mlp(), [Mlp(), Mlp()]

    def encode(self, x: Any) -> Any:
        return self.block(self.block(x))

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.encode(x)


def test_shared_setup_and_lifted_modules_and_other_methods() -> None:
    lifted = nn.vmap(Mlp, variable_axes={"params": 0}, split_rngs={"params": True})
    for model, method, again in ((Shared(), "__call__", 4), (Shared(), "encode", 2), (lifted(), "__call__", 1)):
        x = values(3, 2, 4)
        variables = jax.jit(model.init)(jax.random.key(0), x)
        loss = lambda v, x, model=model, method=method: jnp.sum(model.apply(v, x, method=method) ** 2)  # noqa: E731
        assert counted(full(loss), variables, x) == counted(loss, variables, x) + again
        assert_same(*(jax.jit(jax.grad(fn))(variables, x) for fn in (full(loss), loss)), 1e-6)
    encoding = lambda variables: jnp.sum(Shared().apply(variables, x, method="encode"))  # noqa: E731
    with pytest.raises(BlockError, match="Name the class whose __call__ runs once per layer"):
        jax.eval_shape(rj.checkpoint_blocks(encoding, {Shared: "full"}), jax.eval_shape(Shared().init, jax.random.key(0), x))


def test_in_evaluation_nothing_is_computed_again_or_moved() -> None:
    loss, params, x = make_loss()
    for ours in (full(loss), make_loss(rj.remat(Mlp, "offload: *"))[0]):
        assert matmuls(ours, params, x) == matmuls(loss, params, x) == 4
        assert times("device_put", ours, params, x) == times("optimization_barrier", ours, params, x) == 0
        assert_bit_equal(ours(params, x), loss(params, x))
        lowered = jax.jit(ours).lower(params, x).as_text()
        assert "optimization_barrier" not in lowered and "pinned_host" not in lowered


class Uncalled:
    """A class without `__call__`."""


class Mlpp(nn.Module):
    """Its name is almost that of the model's block."""


marked = rj.block(lambda w, x: x * w)
DEFINED_AGAIN = type("Mlp", (Mlp,), {})
"""A cell of a notebook was run again, and the model is older."""
WRONG: list[tuple[Any, type[Exception], str]] = [
    ("fulll", PolicyError, "policy='fulll'.*Did you mean 'full'"),
    *(
        (given, ArgumentError, "policies=.*: expected a mapping.*at least one entry")
        for given in ({}, Mlp, (Mlp, "full"), Mlp.__call__, marked)
    ),
    ({Mlp: None}, PolicyError, "policy=None is read differently"),
    ({3: "full"}, ArgumentError, "block=3: expected a class whose instances are called"),
    ({block_by_hand: "full"}, ArgumentError, r"marked with @.*make a plain function a block, mark it, block_by_hand = remat"),
    ({Uncalled: "full"}, ArgumentError, "this class has no __call__, so its instances are never called.*remat_jax.block"),
    ({Mlpp: "full"}, BlockError, r"block=Mlpp: this class was never called.* Did you mean 'Mlp'\?.*layer_0: Mlp"),
    ({DEFINED_AGAIN: "full"}, BlockError, "^(?!.*Did you mean).*block=Mlp: this class was .* Another class Mlp was called: a"),
    ({marked: "full"}, BlockError, "this function was never called"),
    ({"layers_*": "full"}, BlockError, r"'layers_\*': the glob matches no path of a called module.*Did you mean 'layer_\d'"),
    ({"checkpoints": "full"}, BlockError, "the function has no jax.checkpoint region"),
]


@pytest.mark.parametrize(("policies", "error", "message"), WRONG)
def test_what_is_no_block_or_is_not_there_is_refused(policies: Any, error: type[Exception], message: str) -> None:
    loss, params, x = make_loss()
    with pytest.raises(error, match=message):
        wrapped = rj.checkpoint_blocks(loss, policies)
        assert error is BlockError, "the others are refused at once"
        wrapped(params, x)


def test_what_is_no_function_and_a_function_without_modules() -> None:
    with pytest.raises(ArgumentError, match="fn=3: expected a function"):
        rj.checkpoint_blocks(3, {Mlp: "full"})
    with pytest.raises(BlockError, match="No module of this kind was called at all"):
        rj.checkpoint_blocks(lambda x: x, {Mlp: "full"})(jnp.ones(2))
    with pytest.raises(BlockError, match="A glob selects modules. To select a function, mark it with @remat_jax.block"):
        rj.checkpoint_blocks(lambda x: marked(x, x).sum(), {"marked": "full"})(jnp.ones(2))


def test_an_error_of_the_model_leaves_nothing_behind() -> None:
    class Failing(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            raise ValueError("the model's own")

    loss, params, x = make_loss()
    with pytest.raises(ValueError, match="the model's own"):
        rj.checkpoint_blocks(lambda x: Failing().apply({}, x), {Failing: "full", Stack: "full"})(x)
    assert (counted(loss, params, x), counted(full(loss), params, x)) == (PLAIN, FULL)
