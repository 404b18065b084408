"""`rj.checkpoint_blocks`: cached traces, threads, a block's arguments, and Flax models inside a block."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import BlockError, NoEffectError
from tests.small_models import Attention, Linear, Mlp, assert_bit_equal, assert_same, make_loss, times, to_host

# Matmuls of value and gradient of two `Mlp`s: 4 forward, 8 backward minus 1 for the input, and 2 recomputed under `full`.
PLAIN, FULL = 11, 13


def counted(loss: Callable[..., Any], params: Any, x: Any) -> int:
    return matmuls(jax.value_and_grad(loss), params, x)


def full(loss: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return rj.checkpoint_blocks(loss, {Mlp: "full", **more})


# --- traces that JAX keeps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("plain", "full"), ("full", "plain"), ("full", "off", "plain", "dots", "full", "plain")])
def test_each_call_does_what_it_says_whatever_was_traced_before(order: tuple[str, ...]) -> None:
    loss, params, x = make_loss()
    jitted = jax.jit(loss)
    of = {"plain": jitted} | {policy: rj.checkpoint_blocks(jitted, {Mlp: policy}) for policy in ("full", "off", "dots")}
    expected = {"plain": PLAIN, "full": FULL, "off": PLAIN, "dots": PLAIN}
    for name in order:
        assert counted(of[name], params, x) == expected[name], name
        assert counted(jax.jit(of[name]), params, x) == expected[name], name
        jax.grad(of[name])(params, x)


def test_a_jit_outside_and_a_step_that_takes_the_gradient_itself() -> None:
    loss, params, x = make_loss()
    step = jax.jit(jax.value_and_grad(loss))
    assert matmuls(step, params, x) == PLAIN
    assert matmuls(rj.checkpoint_blocks(step, {Mlp: "full"}), params, x) == FULL
    assert matmuls(jax.jit(rj.checkpoint_blocks(step, {Mlp: "full"})), params, x) == FULL
    assert matmuls(step, params, x) == PLAIN
    assert_same(rj.checkpoint_blocks(step, {Mlp: "full"})(params, x), step(params, x), 1e-6)


def test_a_cached_trace_of_one_function_is_no_evidence_for_another() -> None:
    loss, params, x = make_loss()
    full(loss)(params, x)
    # The same policies, but this block is never called, directly or in a cached trace.
    without = jax.jit(lambda params, x: jnp.sum(Linear(4).apply(params, x)))
    linear_params = {"params": {"kernel": jnp.ones((4, 4))}}
    for _ in range(2):
        with pytest.raises(BlockError, match="block=Mlp: this class was never called"):
            full(without)(linear_params, x)
    wrapped = full(without)
    for _ in range(2):
        with pytest.raises(BlockError, match="block=Mlp: this class was never called"):
            wrapped(linear_params, x)


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


def test_every_call_of_one_function_is_looked_at() -> None:
    loss, params, x = make_loss()

    @functools.partial(jax.jit, static_argnames="use")
    def choose(params: Any, x: Any, use: bool) -> Any:
        return loss(params, x) if use else jnp.sum(x)

    wrapped = full(choose)
    for _ in range(2):
        wrapped(params, x, use=True)
        with pytest.raises(BlockError, match="never called"):
            wrapped(params, x, use=False)


def test_a_policy_that_failed_does_not_pass_the_second_time() -> None:
    loss, params, x = make_loss()
    wrapped = rj.checkpoint_blocks(jax.jit(loss), {Mlp: "save: *tanhh*"})
    for _ in range(3):
        with pytest.raises(NoEffectError, match=r"'\*tanhh\*' matches no residual of layer_\d, layer_\d"):
            wrapped(params, x)


def test_a_function_that_looks_at_values_works_and_is_still_checked() -> None:
    loss, params, x = make_loss()
    step = jax.jit(jax.value_and_grad(loss))

    def epoch(params: Any, x: Any) -> float:
        return sum(float(step(params, x)[0]) for _ in range(2))

    for _ in range(2):
        # The second wrapper meets a cached step and cannot trace `epoch` to see its contents.
        assert rj.checkpoint_blocks(epoch, {Mlp: "full"})(params, x) == pytest.approx(epoch(params, x), rel=1e-6)

    class Elsewhere(Mlp):
        """A class of this test alone, so that no other function reaches a block under these policies."""

    with pytest.raises(BlockError, match="block=Elsewhere: this class was never called"):
        rj.checkpoint_blocks(epoch, {Elsewhere: "full"})(params, x)


def test_nothing_is_kept_of_calls_and_arrays() -> None:
    loss, params, x = make_loss()
    wrapped = full(loss)
    wrapped(params, x)

    class Marker:
        pass

    arrays = jax.tree.map(lambda leaf: leaf + 1, params)
    leaf = weakref.ref(jax.tree.leaves(arrays)[0])
    jax.grad(wrapped)(arrays, x)
    del arrays
    gc.collect()
    assert leaf() is None
    model = weakref.ref(marker := Marker())
    fn = full(lambda params, x, keep=marker: loss(params, x))
    fn(params, x)
    del fn, marker
    gc.collect()
    assert model() is None


def test_threads_with_different_policies_do_not_meet() -> None:
    loss, params, x = make_loss()
    jitted, counts, errors = jax.jit(loss), {}, []
    start = threading.Barrier(4)

    def work(name: str, fn: Callable[..., Any]) -> None:
        try:
            start.wait()
            counts[name] = [counted(fn, params, x) for _ in range(3)]
        except BaseException as error:
            errors.append(error)

    jobs = {
        "plain": jitted,
        "full": full(jitted),
        "dots": rj.checkpoint_blocks(jitted, {Mlp: "dots"}),
        "offload": rj.checkpoint_blocks(jitted, {Mlp: "offload_inputs"}),
    }
    threads = [threading.Thread(target=work, args=job) for job in jobs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert counts == {"plain": [PLAIN] * 3, "full": [FULL] * 3, "dots": [PLAIN] * 3, "offload": [FULL] * 3}


# --- which block ------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """An attention and a feed-forward block, named by Flax."""

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

    class Wider(Mlp):
        pass

    loss, params, x = make_loss(Wider)
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
    class Both(nn.Module):
        def setup(self) -> None:
            self.block = Mlp()

        def __call__(self, x: Any) -> Any:
            x = self.block(x)
            looped = nn.scan(
                lambda self, x, _: (self.block(x), None), variable_broadcast="params", split_rngs={"params": False}, length=3
            )
            return looped(self, x, None)[0]

    x = jnp.ones((2, 4)) / 3
    params = Both().init(jax.random.key(0), x)
    loss = lambda params, x: jnp.sum(Both().apply(params, x) ** 2)  # noqa: E731
    offloaded = rj.checkpoint_blocks(loss, {Mlp: "offload_inputs"})
    assert_same(jax.grad(offloaded)(params, x), jax.grad(loss)(params, x), 1e-6)
    assert to_host(jax.grad(offloaded), params, x) == [(2, 4), (2, 4)]


# --- what models do ---------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """A block with everything a Linen module can use: dropout, its own stream, statistics, sown values, arguments of all
    kinds.
    """

    @nn.compact
    def __call__(self, x: Any, *, train: bool, mode: str = "tanh", mask: Any = None, ids: Any = None) -> Any:
        h = nn.BatchNorm(use_running_average=not train, dtype=x.dtype, param_dtype=x.dtype)(Linear(4)(x))
        h = nn.Dropout(0.5, deterministic=not train)(getattr(jnp, mode)(h))
        if train:
            h = h + jax.random.normal(self.make_rng("noise"), h.shape, h.dtype)
        self.sow("intermediates", "h", h)
        if mask is not None:
            h = jnp.where(mask, h, 0)
        return {"x": x + h, "ids": ids + 1, "names": (mode, None)}


class Model(nn.Module):
    block: Any = Everything

    @nn.compact
    def __call__(self, x: Any, ids: Any, *, train: bool) -> Any:
        for mode in ("tanh", "sin"):
            out = self.block()(x, train=train, mode=mode, mask=ids[:, None] > 1, ids=ids)
            x, ids = out["x"], out["ids"]
            assert out["names"] == (mode, None)
        return x, ids


@pytest.mark.parametrize(("policy", "train"), [("full", True), ("offload: @inputs; save: @dots", True), ("full", False)])
def test_linen_models_compute_what_they_compute_without(x64: None, policy: str, train: bool) -> None:
    x, ids = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4))), jnp.arange(4)
    rngs = {"dropout": jax.random.key(1), "noise": jax.random.key(2)}

    def run(model: Any, variables: Any, x: Any) -> Any:
        (y, ids_out), updates = model.apply(
            variables, x, ids, train=train, rngs=rngs, mutable=["batch_stats", "intermediates"], capture_intermediates=True
        )
        arrays = jax.tree.map(lambda leaf: None if isinstance(leaf, str) else leaf, updates)
        return jnp.sum(y**2), (y, ids_out, arrays)

    def init(model: Any) -> Any:
        return model.init({"params": jax.random.key(0), **rngs}, x, ids, train=train)

    variables = init(Model())
    plain = functools.partial(run, Model())
    blocks = rj.checkpoint_blocks(plain, {Everything: policy})
    classes = functools.partial(run, Model(rj.remat(Everything, policy, static_argnames=("train", "mode"))))
    expected = jax.jit(jax.value_and_grad(plain, has_aux=True))(variables, x)
    assert expected[0][1][1].dtype == jnp.int64 and sorted(expected[0][1][2]) == ["batch_stats", "intermediates"]
    for ours in (blocks, classes):
        # Another mask or another draw of the noise would differ greatly; the aux has statistics, sown and captured values.
        assert_same(jax.jit(jax.value_and_grad(ours, has_aux=True))(variables, x), expected)
    made = rj.checkpoint_blocks(functools.partial(init, Model()), {Everything: policy})()
    assert_bit_equal(made, variables)


def test_shared_and_setup_modules_and_other_methods() -> None:
    class Shared(nn.Module):
        def setup(self) -> None:
            self.block, self.blocks = Mlp(), [Mlp(), Mlp()]

        def encode(self, x: Any) -> Any:
            return self.block(self.block(x))

        def __call__(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.encode(x)

    x = jnp.ones((2, 4)) / 3
    variables = Shared().init(jax.random.key(0), x)
    for method, again in (("__call__", 4), ("encode", 2)):
        loss = lambda variables, x, method=method: jnp.sum(Shared().apply(variables, x, method=method) ** 2)  # noqa: E731
        assert counted(full(loss), variables, x) == counted(loss, variables, x) + again
        assert_same(jax.grad(full(loss))(variables, x), jax.grad(loss)(variables, x), 1e-6)


def test_only_the_call_of_a_block_is_checkpointed_and_that_is_said() -> None:
    class Decoder(nn.Module):
        @nn.compact
        def decode(self, x: Any) -> Any:
            return Linear(4)(x)

        def __call__(self, x: Any) -> Any:
            return self.decode(x)

    x = jnp.ones((2, 4))
    variables = Decoder().init(jax.random.key(0), x)
    with pytest.raises(BlockError, match="Name the class whose __call__ runs once per layer"):
        rj.checkpoint_blocks(lambda v: Decoder().apply(v, x, method="decode"), {Decoder: "full"})(variables)


def test_lifted_blocks() -> None:
    x = jnp.ones((3, 2, 4)) / 3
    lifted = nn.vmap(Mlp, variable_axes={"params": 0}, split_rngs={"params": True})
    variables = lifted().init(jax.random.key(0), x)
    loss = lambda variables, x: jnp.sum(lifted().apply(variables, x) ** 2)  # noqa: E731
    assert counted(full(loss), variables, x) == counted(loss, variables, x) + 1
    assert_same(jax.grad(full(loss))(variables, x), jax.grad(loss)(variables, x), 1e-6)
    scanned, params, x = make_loss(scanned=True)
    assert counted(full(scanned), params, x) == counted(scanned, params, x) + 2
    assert to_host(jax.grad(rj.checkpoint_blocks(scanned, {Mlp: "offload: *tanh*"})), params, x) == [(2, 3, 3)]


def test_in_evaluation_nothing_is_computed_again_or_moved() -> None:
    loss, params, x = make_loss()
    for policy in ("full", "offload: *"):
        ours = rj.checkpoint_blocks(loss, {Mlp: policy})
        assert matmuls(ours, params, x) == matmuls(loss, params, x) == 4
        assert times("device_put", ours, params, x) == times("optimization_barrier", ours, params, x) == 0
        assert_bit_equal(ours(params, x), loss(params, x))


def test_many_layers_are_traced_once_each() -> None:
    calls = []

    class Counted(Mlp):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            calls.append(self.name)
            return super().__call__(x)

    loss, params, x = make_loss(Counted, layers=12)
    calls.clear()
    jax.make_jaxpr(jax.grad(full(loss)))(params, x)
    assert len(calls) == 12
