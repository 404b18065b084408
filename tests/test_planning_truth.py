"""The planning problem's claims about a policy, compared with what JAX really keeps and recomputes."""

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


def drawn(described: Described, count: int) -> list[str]:
    """Policies that save a random part of the arrays that backward reads or that lead to them, and offload another part."""
    program, draw = described.kinds[0].program, random.Random(0)
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
    [(lambda: mlp(), 4), (lambda: decoder(scan=True), 3)],
    ids=["unrolled MLP", "scanned decoder"],
)
def test_every_policy_recomputes_what_the_model_says(make, count):
    job = make()
    described = describe(job, "h200")
    base = step_flops(job, "everything")
    flops = {policy: recompute_flops(described, policy) for policy in [*NAMED, *drawn(described, count)]}
    assert flops == {policy: step_flops(job, policy) - base for policy in flops}
    assert len(set(flops.values())) >= 2


@pytest.mark.parametrize(("scan", "count"), [(False, 0), (True, 1)])
def test_every_policy_keeps_what_the_model_says(scan, count):
    job = decoder(scan=scan)
    described = describe(job, "h200")
    (kind,) = described.kinds
    beside = rj.residuals(job, "full").device_bytes - kept_bytes(described, "full")[0]
    # ReLU's derivative reads zeros: JAX keeps them, once for a scan, and the compiler writes them where they are read.
    zeros = (1 if scan else 2) * kind.program.constant_bytes
    assert kind.program.constant_bytes == 2 * 2 * 16 * 128
    # An unrolled stack is the same problem as a scan.
    named = NAMED if scan else ("off", "everything", "full", "dots", "offload_inputs")
    for policy in [*named, *drawn(described, count)]:
        device, host = kept_bytes(described, policy)
        table = rj.residuals(job, policy)
        constant = zeros if policy in ("off", "everything") else 0
        assert (device + beside + constant, host) == (table.device_bytes, table.host_bytes), policy


class Odd(nn.Module):
    """Blocks with their own derivative rule, a branch, dropout, and a user's name."""

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
    described = describe(job, "h200")
    # The numbers that Flax folds into each layer's keys make no separate kinds.
    assert [found_kind.layers for found_kind in described.kinds] == [range(2)]
    base = step_flops(job, "everything")
    specific = {"named": "save: mine", "custom_vjp": "save: *:cos*, *custom_vjp_call*, *reduce_sum*"}.get(kind, "save: *:sin#0")
    for policy in ("full", "everything", specific):
        assert recompute_flops(described, policy) == step_flops(job, policy) - base, policy


@pytest.mark.parametrize("make", [mlp, lambda: decoder(scan=False)], ids=["mlp", "decoder"])
def test_what_keeps_everything_costs_the_traced_step(make) -> None:
    """Work inside and outside the blocks, and the writes of kept arrays: each once."""
    job = make()
    described, step = describe(job, "h200"), job.step("off")
    traced = jaxpr_cost(jax.make_jaxpr(step.function)(*step.arguments)).seconds(described.rates)
    assert described.base_seconds + extra_seconds(described, "everything") == pytest.approx(traced, rel=1e-6)
