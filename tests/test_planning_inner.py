"""Blocks with checkpoints in their own loops, such as attention in chunks, as planning problems."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from examples.models.diffusion import long_attention
from remat_jax.planning.outcome import parts_of
from remat_jax.planning.problem import describe, recompute_flops
from remat_jax.planning.translate import named_candidate
from tests.planning_models import WIDTH, step_flops
from tests.workloads import mean_square, struct


class Attends(nn.Module):
    """Attention in chunks, each of which recomputes its scores in the backward pass, between two products."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        heads = [
            nn.Dense(WIDTH, use_bias=False, name=name)(x).reshape(*x.shape[:2], 2, -1) for name in ("query", "key", "value")
        ]
        return x + nn.Dense(WIDTH, use_bias=False, name="out")(long_attention(*heads, chunk=4))


def two_of(layer: nn.Module, x: jax.ShapeDtypeStruct) -> rj.Workload:
    params = [jax.eval_shape(layer.init, jax.random.key(0), x) for _ in range(2)]

    def loss(params: Any, x: Any) -> Any:
        for each in params:
            x = layer.apply(each, x)
        return jnp.sum(jnp.square(x))

    return rj.Workload(loss, params, (x,), type(layer))


def attends(length: int) -> rj.Workload:
    return two_of(Attends(), struct(2, length, WIDTH))


def test_what_a_checkpoint_in_a_loop_computes_again_for_itself_is_not_its_result() -> None:
    job, rows, product = attends(12), 2 * 12, 2 * 2 * 12 * 12 * WIDTH
    described, everything = describe(job, "h200"), step_flops(job, "everything")
    again = {policy: recompute_flops(described, policy) for policy in ("full", "save: *:reshape#6", "everything")}
    assert again == {policy: step_flops(job, policy) - everything for policy in again}
    projections, result = 3 * 2 * rows * WIDTH**2, 2 * product
    # Keeping its result saves both products of the attention; the scores are recomputed once more in either case.
    assert again["full"] == 2 * (projections + result + product)
    assert again["save: *:reshape#6"] == 2 * (projections + product)


def test_what_a_checkpoint_in_a_loop_is_there_to_drop_makes_nothing_else_small() -> None:
    block = describe(attends(512), "h200").stack.blocks[-1]
    by_name = {residual.name: residual for residual in block.residuals}
    scores, result = by_name["Attends/softmax:exp#0"], by_name["Attends:reshape#6"]
    assert result.bytes == 4 * 2 * 512 * WIDTH < 0.01 * scores.bytes
    assert result.needed and result.may_save and result.may_offload
    assert scores.may_save and not scores.may_offload


def again_and_after(p: Any, w1: Any, w2: Any) -> Any:
    """Products outside the loop's checkpoint, passes inside."""
    for _ in range(4):
        p = jnp.sin(p @ w1)
    return jax.checkpoint(lambda h: jnp.exp(jnp.sin(h)))(p)


def twice(p: Any, w1: Any, w2: Any) -> Any:
    return jnp.sin(jnp.sin(p @ w1) @ w2)


class Loops(nn.Module):
    """A loop over its input, and a product with its result, which may be the block's last product."""

    kind: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        w1, w2, w3 = (self.param(name, nn.initializers.normal(), (WIDTH, WIDTH)) for name in ("w1", "w2", "w3"))
        body = {
            "more than its checkpoint": again_and_after,
            "keeps what it computes": jax.checkpoint(twice, policy=jax.checkpoint_policies.everything_saveable),
        }.get(self.kind, jax.checkpoint(twice))
        y = jax.lax.map(lambda p: body(p, w1, w2), x)
        return y @ w3 if self.kind == "read by the backward pass alone" else jnp.sin(y) @ w3


@pytest.mark.parametrize(
    "kind", ["more than its checkpoint", "keeps what it computes", "read by the backward pass alone", "plain"]
)
def test_a_loop_is_counted_as_jax_runs_it(kind: str) -> None:
    job = two_of(Loops(kind), struct(12, 8, WIDTH))
    flops = recompute_flops(describe(job, "h200"), "full")
    assert flops == step_flops(job, "full") - step_flops(job, "everything") > 0


class Twice(nn.Module):
    """Two layers, the first under a checkpoint of the block's own."""

    inner: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        wide = self.param("wide", nn.initializers.normal(), (WIDTH, 4 * WIDTH))
        back = self.param("back", nn.initializers.normal(), (4 * WIDTH, WIDTH))
        layer = lambda h: jnp.sin(h @ wide) @ back  # noqa: E731
        x = x + (jax.checkpoint(layer) if self.inner else layer)(x)
        return x + jnp.sin(x @ wide) @ back


def twice_job(rows: int, *, inner: bool = True) -> rj.Workload:
    return mean_square(nn.Sequential([Twice(inner) for _ in range(3)]), struct(rows, WIDTH), Twice)


def test_without_a_policy_a_checkpoint_of_the_blocks_own_drops_what_it_drops() -> None:
    rows = 64
    job, wide = twice_job(rows), 4 * rows * 4 * WIDTH
    described = describe(job, "h200")
    off, everything = (named_candidate(described, name) for name in ("off", "everything"))
    # The first layer's argument of the sine and its result, recomputed by one product.
    assert [b.saved - a.saved for a, b in zip(off.loads, everything.loads, strict=True)] == [2 * wide] * 3
    again = 3 * 2 * rows * WIDTH * 4 * WIDTH
    assert recompute_flops(described, "off") == again == step_flops(job, "off") - step_flops(job, "everything")
    assert off.seconds > 0
    rows_of_a_layer = parts_of(described, described.stack, off)[0].rows
    assert sum(row.bytes for row in rows_of_a_layer if row.action == "recompute") == 2 * wide
    # Code outside the blocks does not count.
    plain = describe(twice_job(rows, inner=False), "h200")
    assert described.base_seconds == pytest.approx(plain.base_seconds, rel=1e-6)
    assert described.stack.fixed_bytes == plain.stack.fixed_bytes
