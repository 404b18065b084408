"""A block's checkpoint region: every kind of derivative, `shard_map`, JAX's own checkpoints around it, effects."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec

import remat_jax as rj
from remat_jax import compat
from remat_jax.cost.count import matmuls
from remat_jax.errors import UnsupportedError
from tests.small_models import Mlp, assert_same, make_loss, times, values


@pytest.mark.versions
@pytest.mark.parametrize("policy", ["full", jax.checkpoint_policies.dots_saveable])
def test_a_block_needs_no_region_of_jax(policy: Any) -> None:
    loss, params, x = make_loss(rj.remat(Mlp, policy), scanned=True)
    assert [times(region, jax.grad(loss), params, x) for region in ("checkpoint_region", "remat2")] == [1, 0]


@pytest.mark.versions
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("check_vma", [False, True])
def test_a_shard_map_around_a_scan(check_vma: bool) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradient(block: Any) -> Any:
        loss, params, x = make_loss(block, scanned=True)
        specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec(), "check_vma": check_vma}
        of_mesh = jax.shard_map(lambda params, x: jax.lax.psum(loss(params, x), "data"), mesh=mesh, **specs)
        return jax.jit(jax.grad(of_mesh, argnums=(0, 1)))(params, x)

    assert_same(gradient(rj.remat(Mlp, "dots")), gradient(Mlp))


@pytest.mark.versions
def test_a_checkpoint_of_jax_around_a_block_keeps_what_its_policy_keeps() -> None:
    block, x = rj.remat(lambda x: jnp.sin(jnp.sin(x @ x) @ x), "full"), jnp.ones((3, 3))
    outer = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    kept, again = (matmuls(jax.value_and_grad(lambda x, f=f: f(x).sum()), x) for f in (outer, block))
    # A policy of jax_remat3 keeps nothing inside a region, of JAX neither.
    assert (kept, again) == ((8, 8) if compat.remat3() else (6, 8))


@pytest.mark.versions
def test_an_effect_that_cannot_be_repeated_is_refused() -> None:
    def block(x: Any) -> Any:
        jax.experimental.io_callback(lambda: None, None)
        return jnp.sin(x)

    with pytest.raises(UnsupportedError, match=r"io_callback"):
        jax.grad(lambda x: rj.remat(block)(x))(1.0)


@pytest.mark.versions
def test_an_integer_output_has_no_derivative() -> None:
    def block(x: Any) -> Any:
        return jnp.sin(x) * x, jnp.argmax(x)

    def pushed(block: Any) -> Any:
        return jax.grad(lambda x: jax.jvp(block, (x,), (2 * x,))[1][0].sum())(jnp.arange(3.0))

    assert_same(pushed(rj.remat(block)), pushed(block), tolerance=1e-6)


@pytest.mark.versions
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("policy", ["full", "dots", "everything", "offload_inputs", "offload: *dot*"])
def test_a_vmap_inside_a_jit_or_a_scan_may_put_its_axis_anywhere(policy: str) -> None:
    """JAX batches the block and its derivative rule separately, and takes their batch axes to be equal."""
    weights, x = values(4, 4), values(4, 4, seed=1)

    def column(v: Any) -> Any:
        return jnp.tanh(weights @ v)  # of a batch of rows, the batch axis is behind

    def gradients(block: Any) -> Any:
        def loss(x: Any, axis: int) -> Any:
            once = jax.jit(jax.vmap(block, axis, axis))(x)
            twice = jax.vmap(jax.jit(jax.vmap(block, axis)), 1 - axis)(jnp.stack([once] * 3))
            scanned, _ = jax.lax.scan(lambda x, _: (jax.vmap(block, axis)(x), None), once, length=2)
            return sum(jnp.sum(each * jnp.arange(each.size).reshape(each.shape)) for each in (once, twice, scanned))

        return [jax.grad(loss)(x, axis) for axis in (0, 1)]

    assert_same(gradients(rj.remat(column, policy)), gradients(column))


@pytest.mark.versions
def test_a_vmap_along_any_axis_keeps_no_moved_copy_of_an_input() -> None:
    def temp(block: Any) -> int:
        def loss(xs: Any, ws: Any) -> Any:
            return jnp.sum(jax.lax.scan(lambda x, w: (jax.vmap(block, (0, 1))(x, w), None), xs, ws)[0])

        shapes = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32), jax.ShapeDtypeStruct((8, 64, 8, 64), jnp.float32)
        return int(jax.jit(jax.grad(loss, 1)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes)

    def block(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.sin(x @ w) @ w)

    assert temp(rj.remat(block)) < temp(block)


def test_op_by_op_an_array_is_freed_after_its_last_use() -> None:
    x, alive = jnp.ones((64, 64)), list[int]()

    def block(x: Any) -> Any:
        for _ in range(30):
            x = jnp.cos(x) * 1.01
        jax.debug.callback(lambda _: alive.append(sum(array.shape == x.shape for array in jax.live_arrays())), x)
        return jnp.sin(x)

    before = sum(array.shape == x.shape for array in jax.live_arrays())
    jax.vjp(rj.remat(block), x)
    jax.effects_barrier()
    assert max(alive) - before < 8


def test_a_captured_array_is_freed_with_its_function() -> None:
    def differentiated() -> weakref.ref[Any]:
        captured = jnp.ones((8, 8))
        inner = jax.jit(lambda x: jnp.tanh(x @ captured))
        jax.grad(lambda x: jnp.sum(rj.remat(lambda x: jnp.sin(inner(jnp.sin(x))))(x)))(jnp.ones((2, 8)))
        return weakref.ref(captured)

    alive = differentiated()
    jax.clear_caches()
    gc.collect()
    assert alive() is None


@pytest.mark.versions
def test_checks_of_jax_see_into_a_block() -> None:
    w = jnp.ones((3, 3))
    block = rj.remat(lambda x, w: jnp.sqrt((x @ w) * 0.0))
    error, _ = checkify.checkify(jax.grad(lambda w: jnp.sum(block(w, w))), errors=checkify.float_checks)(w)
    assert "division by zero" in str(error.get())
    noisy = rj.remat(lambda x, key: jnp.sin(x * jax.random.normal(key, x.shape)))
    with jax.debug_key_reuse(True):
        gradient = jax.jit(jax.grad(lambda x, key: jnp.sum(noisy(x, key))))(w, jax.random.key(0))
    assert jnp.isfinite(gradient).all()
