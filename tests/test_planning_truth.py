"""What the planning problem says of a policy, held against what JAX really keeps and really runs again."""

from __future__ import annotations

import random
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.cost.cost import jaxpr_cost
from remat_jax.planning.problem import Described, describe, extra_seconds, kept_bytes, recompute_flops
from remat_jax.policy import NAMED
from tests.planning_models import ROWS, WIDTH, decoder, mlp, step_flops


def drawn(found: Described, count: int) -> list[str]:
    """Policies that save a random part of what backward reads and of what leads to it, and offload another."""
    program, draw = found.kinds[0].program, random.Random(0)
    needed = {name for array in program.needed for name in array.names}
    made = [array for array in program.arrays if array not in program.free and array not in program.flat.inputs]
    names = [name for array in made for name in array.names]
    result = []
    for _ in range(count):
        kept, away = draw.random(), draw.random() / 4
        offload = [name for name in names if name in needed and program_shape(program, name) and draw.random() < away]
        save = [name for name in names if name not in offload and draw.random() < kept] or names[-1:]
        result.append("; ".join(f"{word}: {', '.join(of)}" for word, of in (("offload", offload), ("save", save)) if of))
    return result


def program_shape(program: Any, name: str) -> tuple[int, ...]:
    return program.call.block.linearised.shapes[name]


@pytest.mark.parametrize(
    ("make", "count"),
    [(lambda: mlp(), 4), (lambda: mlp(scan=True), 4), (lambda: decoder(scan=True), 6)],
    ids=["unrolled MLP", "scanned MLP", "scanned decoder"],
)
def test_every_policy_recomputes_what_the_model_says(make, count):
    job = make()
    found = describe(job, "h200")
    base = step_flops(job, "everything")
    told = {policy: recompute_flops(found, policy) for policy in [*NAMED, *drawn(found, count)]}
    assert told == {policy: step_flops(job, policy) - base for policy in told}
    assert len(set(told.values())) >= 2


@pytest.mark.parametrize(("scan", "count"), [(False, 0), (True, 1)])
def test_every_policy_keeps_what_the_model_says(scan, count):
    job = decoder(scan=scan)
    found = describe(job, "h200")
    (kind,) = found.kinds
    beside = rj.residuals(job, "full").device_bytes - kept_bytes(found, "full")[0]
    # ReLU's derivative reads zeros: JAX keeps them, once for a scan, and the compiler writes them where they are read.
    zeros = (1 if scan else 2) * kind.program.constant_bytes
    assert kind.program.constant_bytes == 2 * 2 * 16 * 128
    for policy in [*NAMED, *drawn(found, count)]:
        device, host = kept_bytes(found, policy)
        table = rj.residuals(job, policy)
        constant = zeros if policy in ("off", "everything") else 0
        assert (device + beside + constant, host) == (table.device_bytes, table.host_bytes), policy


class Odd(nn.Module):
    """Blocks with a derivative rule of their own, a branch, dropout, and a name of the user's."""

    kind: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", nn.initializers.lecun_normal(), (WIDTH, WIDTH))
        if self.kind == "custom_vjp":
            return x + kernel(jnp.sin(x @ w), w)
        if self.kind == "cond":
            return x + jnp.sin(jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(x @ w) @ w, lambda x: x @ w, x))
        if self.kind == "dropout":
            return x + nn.Dropout(0.5, deterministic=False)(jnp.sin(x @ w)) @ w
        return x + jnp.sin(jax.ad_checkpoint.checkpoint_name(jnp.cos(x @ w), "mine") @ w)


@jax.custom_vjp
def kernel(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def _pull(kept: Any, g: Any) -> Any:
    x, w, y, scale = kept
    return (g * (1 - y**2) * scale[:, None]) @ w.T, x.T @ (g * (1 - y**2))


kernel.defvjp(lambda x, w: ((y := jnp.tanh(x @ w)), (x, w, y, (y * y).sum(-1))), _pull)


class OddModel(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(WIDTH)(x)
        for index in range(2):
            x = Odd(self.kind, name=f"layers_{index}")(x)
        return x


@pytest.mark.parametrize("kind", ["custom_vjp", "cond", "dropout", "named"])
def test_odd_blocks_recompute_what_the_model_says(kind):
    model, x, key = OddModel(kind), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.eval_shape(jax.random.key, 0)
    params = jax.eval_shape(lambda k, x: model.init({"params": k, "dropout": k}, x), key, x)
    job = rj.Workload(lambda p, x, k: (model.apply(p, x, rngs={"dropout": k}) ** 2).sum(), params, (x, key), Odd)
    found = describe(job, "h200")
    # The numbers that Flax folds into the keys of each layer make no kind of their own.
    assert [found_kind.layers for found_kind in found.kinds] == [range(2)]
    base = step_flops(job, "everything")
    own = {"named": "save: mine", "custom_vjp": "save: *:cos*, *custom_vjp_call*, *reduce_sum*"}.get(kind, "save: *:sin#0")
    for policy in ("full", "everything", own):
        assert recompute_flops(found, policy) == step_flops(job, policy) - base, policy


@pytest.mark.parametrize("make", [mlp, lambda: decoder(scan=False)], ids=["mlp", "decoder"])
def test_what_keeps_everything_costs_the_traced_step(make) -> None:
    """What is inside the blocks, what is outside, and the writes of what is kept: each once."""
    job = make()
    found, step = describe(job, "h200"), job.step("off")
    traced = jaxpr_cost(jax.make_jaxpr(step.function)(*step.arguments)).seconds(found.rates)
    assert found.base_seconds + extra_seconds(found, "everything") == pytest.approx(traced, rel=1e-6)
