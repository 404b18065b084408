"""A workload as a planning problem, compared with what JAX really keeps and recomputes."""

from __future__ import annotations

import functools
import random
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import solver
from remat_jax.errors import BlockError, PlanningError, UnsupportedError
from remat_jax.hardware import target
from remat_jax.hardware.rates import Rates
from remat_jax.planning.outcome import parts_of
from remat_jax.planning.problem import Described, describe, extra_seconds, kept_bytes, recompute_flops
from remat_jax.planning.translate import named_candidate, policy_of
from remat_jax.solver.policies import peak_bytes
from tests.planning_models import RATES, ROWS, WIDTH, Layer, decoder, mlp, parameters, step_flops, workload
from tests.small_models import NnxMlp, NnxStack, in_a_scan
from tests.workloads import struct


def test_the_residuals_of_a_layer_by_hand():
    (kind,), (block,) = (described := describe(mlp(), "h200", rates=RATES)).kinds, described.stack.blocks
    size, product = 4 * ROWS * WIDTH, 2 * ROWS * WIDTH * 4 * WIDTH / 1e9
    x, up, both = block.residuals
    assert kind.residuals == ("layers_0:input#0", "layers_0/up:dot_general#0", "layers_0:sin#0")
    assert kind.members[2] == ("layers_0:sin#0", "layers_0:cos#0")
    assert (x.bytes, x.seconds, x.needed, x.may_offload) == (size, None, True, True)
    # Sine and cosine need it, backward does not: keeping it takes half as much as keeping both.
    assert (up.bytes, up.parents, up.needed) == (4 * size, (x.name,), False)
    assert up.seconds == pytest.approx(max(product, 4 * (ROWS * WIDTH * (1 + 4) + 4 * WIDTH**2) / 1e8))
    # The next product reads the sine in both passes, so a recomputed sine is written. The cosine fuses into its reader.
    assert (both.bytes, both.parents, both.needed) == (8 * size, (up.name,), True)
    assert both.seconds == pytest.approx((2 * 4 * size) / 1e8)
    assert (x.kept_seconds, up.kept_seconds, both.kept_seconds) == (0, 0, pytest.approx(4 * size / 1e8))
    assert (block.repeats, kind.layers, kind.paths) == (3, range(3), ("layers_0", "layers_1", "layers_2"))
    assert described.stack.link == solver.HostLink(1e6, 2e6, 0.5, 1e8)


def test_seconds_of_the_passes_by_hand():
    described = describe(mlp(), "h200", rates=RATES)
    (block,) = described.stack.blocks
    wide, narrow, weights = 4 * ROWS * 4 * WIDTH, 4 * ROWS * WIDTH, 4 * 4 * WIDTH**2
    product = narrow + wide + weights
    # Forward: up, sine, down, add.
    assert block.forward_seconds == pytest.approx((2 * product + 2 * wide + 3 * narrow) / 1e8)
    # Backward: two products for each, the product with the cosine, the sum of both cotangents.
    assert block.backward_seconds == pytest.approx((4 * product + 3 * wide + 3 * narrow) / 1e8)
    assert described.outside_seconds > 0
    layers_seconds = 3 * (block.forward_seconds + block.backward_seconds)
    assert described.base_seconds == pytest.approx(layers_seconds + described.outside_seconds)


@functools.cache
def described_as(make: Any, scan: bool) -> Described:
    return describe(make(scan=scan), "h200")


def test_a_scan_and_its_unrolled_twin_are_the_same_problem():
    for make in (mlp, decoder):
        unrolled, scanned = (described_as(make, scan) for scan in (False, True))
        (unrolled_block,), (scanned_block,) = unrolled.stack.blocks, scanned.stack.blocks
        strip = lambda name, path: name.removeprefix(path)  # noqa: E731
        assert [(strip(r.name, "layers_0"), r.bytes, r.seconds, r.needed) for r in unrolled_block.residuals] == [
            (strip(r.name, "layers"), r.bytes, r.seconds, r.needed) for r in scanned_block.residuals
        ]
        same = [(kind.repeats, kind.forward_seconds, kind.backward_seconds) for kind in (unrolled_block, scanned_block)]
        assert same[0] == same[1]
        # In a scan a kept array is stacked: keeping costs three more passes over it.
        rate = Rates.of(target("h200")).hbm_bytes_per_s
        stacked = [r.kept_seconds + 3 * r.bytes / rate for r in unrolled_block.residuals]
        assert [r.kept_seconds for r in scanned_block.residuals] == pytest.approx(stacked)
        assert [kind.scanned for kind in (*unrolled.kinds, *scanned.kinds)] == [False, True]
        assert set(scanned.kinds[0].paths) == {"layers"}


def choices(block: solver.Block, seed: int) -> solver.BlockPolicy:
    """A random legal choice."""
    draw, chosen = random.Random(seed), {}
    for index in block.order:
        residual = block.residuals[index]
        allowed = ["save"] * residual.may_save + ["offload"] * residual.may_offload + ["unused"] * (not residual.needed)
        if residual.seconds is not None and all(chosen[parent] != "unused" for parent in residual.parents):
            allowed += ["recompute"] * 2
        chosen[residual.name] = draw.choice(allowed)
    return solver.BlockPolicy(block, tuple(chosen[residual.name] for residual in block.residuals))


@pytest.mark.parametrize("scan", [False, True])
def test_what_a_solver_chooses_is_what_its_policy_does(scan):
    """The price of the policy is the solver's, minus arrays that it keeps or computes without use."""
    described = described_as(decoder, scan)
    (kind,), (block,) = described.kinds, described.stack.blocks
    for seed in range(12):
        choice = choices(block, seed)
        policy = policy_of(kind, choice)
        saved, offloaded = kind.program.names(policy)
        chosen = list(zip(kind.members, choice.choices, strict=True))
        away, kept = (
            {name for names, taken in chosen if taken.value == action for name in names} for action in ("offload", "save")
        )
        assert set(offloaded) == away and set(saved) == kept - {f"{kind.paths[0]}:input#0"}
        price = kind.program.price(policy)
        assert price.seconds <= choice.recompute_seconds * (1 + 1e-9)
        assert price.saved_bytes <= choice.saved_bytes + sum(
            array.bytes for array in block.residuals if array.seconds is None and choice.of[array.name].value == "unused"
        )
        assert price.host_bytes <= choice.host_bytes


@pytest.mark.parametrize("scan", [False, True])
def test_a_plan_s_policies_can_be_traced_and_cost_what_the_plan_says(scan):
    job = decoder(scan=scan)
    described = describe(job, "h200", working=0.0)
    (kind,) = described.kinds
    most = peak_bytes(described.stack, [solver.BlockPolicy(block, _saved(block)) for block in described.stack.positions()])
    stack = solver.Stack(described.stack.blocks, None, described.stack.fixed_bytes)
    plan = solver.solve(stack, described.stack.fixed_bytes + 0.8 * (most - described.stack.fixed_bytes))
    policies = [policy_of(kind, policy) for policy in plan.policies]
    assert extra_seconds(described, policies) == pytest.approx(plan.extra_seconds)
    for policy in dict.fromkeys(policies):
        assert step_flops(job, policy) - step_flops(job, "everything") == recompute_flops(described, policy)


def _saved(block: solver.Block) -> tuple[str, ...]:
    return tuple("unused" if not r.needed else "save" if r.may_save else "recompute" for r in block.residuals)


def test_the_price_of_named_policies():
    described = describe(mlp(), "h200", rates=RATES)
    (block,) = described.stack.blocks
    x, up, both = block.residuals
    # Without a checkpoint XLA recomputes the cosine by itself.
    assert extra_seconds(described, "everything") == pytest.approx(3 * both.kept_seconds)
    assert extra_seconds(described, "off") == 0
    assert extra_seconds(described, "full") == pytest.approx(3 * (up.seconds + both.seconds))
    assert extra_seconds(described, "dots") == pytest.approx(3 * both.seconds)
    copied = 2 * x.bytes / 1e8
    again = up.seconds + both.seconds + copied
    out = x.bytes / 1e6 - 0.5 * block.forward_seconds
    back = x.bytes / 2e6 - 0.5 * (block.backward_seconds + again)
    assert min(out, back) > 0
    # No compute runs beside the last block's copies back.
    expected = 3 * (again + out + back) + 0.5 * (block.backward_seconds + again)
    assert extra_seconds(described, "offload_inputs") == pytest.approx(expected)
    assert kept_bytes(described, "offload_inputs") == (0, 3 * x.bytes)
    mixed = ["full", "everything", "dots"]
    by_layer = rj.LayerPolicies.of(mixed)
    assert extra_seconds(described, by_layer) == extra_seconds(described, str(by_layer)) == extra_seconds(described, mixed)
    expected = up.seconds + 2 * both.seconds + both.kept_seconds
    assert extra_seconds(described, mixed) == extra_seconds(described, {Layer: by_layer}) == pytest.approx(expected)
    assert recompute_flops(described, mixed) == 2 * ROWS * WIDTH * 4 * WIDTH
    # A name of one layer applies to that layer only.
    assert kept_bytes(described, "save: layers_1/up:dot_general#0") == (3 * x.bytes + up.bytes, 0)


class Attending(nn.Module):
    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        return x + nn.Dense(WIDTH, use_bias=False)(jnp.sin(x) * mask)


def test_inputs_that_all_blocks_share_and_the_batch_cost_nothing():
    class Shared(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            mask = jnp.exp(jnp.tanh(nn.Dense(WIDTH)(x)))
            for index in range(2):
                x = Attending(name=f"layers_{index}")(x, mask)
            return x

    job = workload(Shared(), Attending)
    first, second = describe(job, "h200").kinds
    # The batch is no residual and has no gradient: the first block is another kind.
    assert (first.layers, second.layers) == (range(1), range(1, 2))
    assert not any("input" in name for name in first.residuals)
    assert [name for name in second.residuals if "input" in name] == ["layers_1:input#0"]


def test_equal_neighbours_are_one_kind_and_others_are_not():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(WIDTH)(x)
            for index in range(2):
                x = Layer(name=f"a_{index}")(x)
            x = Attending(name="between")(x, jnp.float32(2.0))
            return Layer(name="b")(x)

    job = workload(Two(), (Layer, Attending))
    kinds = describe(job, "h200").kinds
    assert [(kind.block, kind.layers, kind.paths) for kind in kinds] == [
        (Layer, range(2), ("a_0", "a_1")),
        (Attending, range(1), ("between",)),
        (Layer, range(2, 3), ("b",)),
    ]
    only = {Layer: ["full", "everything", "full"], Attending: "everything"}
    assert recompute_flops(describe(job, "h200"), only) == 2 * 2 * ROWS * WIDTH * 4 * WIDTH
    assert (
        step_flops(job, {Layer: "full", Attending: "full"}) - step_flops(job, "everything") == 3 * 2 * ROWS * WIDTH * 4 * WIDTH
    )


def test_several_calls_in_a_round_take_turns():
    class Round(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            x = Attending(name="m")(Layer(name="a")(x), jnp.float32(2.0))
            return Layer(name="c")(Layer(name="b")(x)), None  # two equal calls in a row are not all layers of a range

    class Turns(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            scan = nn.scan(Round, variable_axes={"params": 0}, split_rngs={"params": True}, length=5)
            return scan(name="rounds")(nn.Dense(WIDTH)(x), None)[0]

    job = workload(Turns(), (Layer, Attending))
    described = describe(job, "h200")
    assert {block.late_bytes for block in described.stack.blocks} == {0.0}, "a scan cannot be cut for one of several calls"
    assert [(kind.block, kind.layers) for kind in described.kinds] == [
        (Layer, range(0, 15, 3)),
        (Attending, range(5)),
        (Layer, range(1, 16, 3)),
        (Layer, range(2, 17, 3)),
    ]
    parts = parts_of(described, described.stack, named_candidate(described, "full"))
    assert [part.where for part in parts] == [
        *("Layer 0–12, one in 3", "Attending 0–4", "Layer 1–13, one in 3", "Layer 2–14, one in 3"),
    ]
    assert recompute_flops(describe(job, "h200"), "full") == step_flops(job, "full") - step_flops(job, "everything")


def test_blocks_traced_once_for_many_calls_and_frozen_parameters():
    layer = Layer()
    run = jax.jit(lambda p, x: layer.apply(p, x))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    params = [jax.eval_shape(layer.init, jax.random.key(0), x) for _ in range(3)]

    def loss(params: Any, x: Any) -> Any:
        for weights in params:
            x = run(weights, x)
        return x.sum()

    job = rj.Workload(loss, params, (x,), Layer)
    assert [kind.layers for kind in describe(job, "h200").kinds] == [range(1), range(1, 3)]
    # Nothing before the second block is differentiated, and the third has no gradient of its own.
    frozen = rj.Workload(loss, params, (x,), Layer, trainable="1/*")
    described = describe(frozen, "h200")
    assert [len(block.residuals) for block in described.stack.blocks] == [0, 3, 2]
    assert described.stack.blocks[0].backward_seconds == 0
    for policy in ("full", "dots", ["everything", "full", "full"]):
        same = policy if isinstance(policy, str) else "full"
        assert recompute_flops(described, policy) == step_flops(frozen, same) - step_flops(frozen, "everything")


def test_nnx_blocks():
    job = rj.Workload.from_nnx(NnxStack(3), lambda model, x: (model(x) ** 2).sum(), (struct(ROWS, 4),), NnxMlp)
    described = describe(job, "h200")
    assert [kind.layers for kind in described.kinds] == [range(1), range(1, 3)]
    for policy in ("full", "dots", "save: *:tanh*"):
        assert recompute_flops(described, policy) == step_flops(job, policy) - step_flops(job, "everything")


def test_working_bytes_may_be_given():
    job = mlp()
    guess = describe(job, "h200").stack.blocks[0].working_bytes
    wide, narrow, weights = 4 * ROWS * 4 * WIDTH, 4 * ROWS * WIDTH, 4 * 4 * WIDTH**2
    # After the second product of `up`: both gradients, the cotangent of its output, and those of the block's input and output.
    assert guess == 2 * weights + wide + 2 * narrow
    assert describe(job, "h200", working=77.0).stack.blocks[0].working_bytes == 77.0


def test_fixed_bytes_are_arguments_gradients_and_what_is_kept_outside():
    for scan in (False, True):
        job = mlp(scan=scan)
        parameters = 4 * (WIDTH * WIDTH + WIDTH + 3 * 2 * 4 * WIDTH**2)
        batch, squared = 4 * ROWS * WIDTH, 4 * ROWS * WIDTH
        assert describe(job, "h200").stack.fixed_bytes == 2 * parameters + batch + squared


def test_what_cannot_be_described():
    job = mlp()
    with pytest.raises(BlockError, match="never called"):
        describe(rj.Workload(job.loss, job.params, job.batch, Attending), "h200")
    with pytest.raises(UnsupportedError, match="blocks inside blocks"):
        describe(rj.Workload(job.loss, job.params, job.batch, (Layer, nn.Dense)), "h200")


def test_what_cannot_be_priced():
    described: Described = describe(mlp(), "cpu")
    assert described.stack.link is None
    with pytest.raises(PlanningError, match="2 layers, but there are 3"):
        extra_seconds(described, ["full", "dots"])
    with pytest.raises(PlanningError, match="not blocks of the workload"):
        extra_seconds(described, {Attending: "full"})
    with pytest.raises(PlanningError, match="JAX policy object"):
        extra_seconds(described, jax.checkpoint_policies.dots_saveable)
    foreign = solver.Block("other", (solver.ResidualCosts("x", 1.0),), 1.0, 1.0)
    with pytest.raises(PlanningError, match="the choice is for a block of"):
        policy_of(described.kinds[0], solver.BlockPolicy(foreign, ("save",)))


class Named(nn.Module):
    """Three arrays of one name, the last computed from the others."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        q, k = (jax.ad_checkpoint.checkpoint_name(nn.Dense(WIDTH, name=name)(x), "mine") for name in "qk")
        return x + jnp.sin(jax.ad_checkpoint.checkpoint_name(nn.Dense(WIDTH, name="o")(jnp.sin(q) * jnp.cos(k)), "mine"))


def of_layers(make: Any) -> Any:
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return make(nn.Dense(WIDTH)(x))

    return Layers()


def test_arrays_of_one_name_are_decided_on_together():
    job = workload(of_layers(lambda x: Named(name="b")(Named(name="a")(x))), Named)
    described = describe(job, "h200")
    (kind,), (block,) = described.kinds, described.stack.blocks
    names = [residual.name for residual in block.residuals]
    assert len(set(names)) == len(names) and "mine" in names
    assert next(residual for residual in block.residuals if residual.name == "mine").bytes >= 2 * 4 * ROWS * WIDTH
    for seed in range(4):
        policy = policy_of(kind, choices(block, seed))
        assert recompute_flops(described, policy) == step_flops(job, policy) - step_flops(job, "everything")


def test_a_layer_behind_a_scan_of_its_kind_has_its_own_name():
    def make(x: Any) -> Any:
        return Layer(name="last")(in_a_scan(Layer(name="layers"), x, 3))

    kinds = describe(workload(of_layers(make), Layer), "h200").kinds
    assert [(set(kind.paths), kind.layers, kind.scanned) for kind in kinds] == [
        ({"layers"}, range(3), True),
        ({"last"}, range(3, 4), False),
    ]


@pytest.mark.parametrize("policy", ["full", "dots", "save: *:cos*"])
def test_blocks_under_vmaps_are_those_of_the_whole_batch(policy):
    """Two `vmap`s of sizes two and three: kept and recomputed arrays are six times as large."""
    model, x = of_layers(lambda x: Layer(name="b")(Layer(name="a")(x))), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((2, 3, *x.shape), x.dtype)
    of_each = lambda params, x: jax.vmap(jax.vmap(lambda sample: model.apply(params, sample).sum()))(x).sum()  # noqa: E731
    job = rj.Workload(of_each, parameters(model, x), (batch,), Layer)
    described = describe(job, "h200")
    more = rj.residuals(job, policy).device_bytes - rj.residuals(job, "full").device_bytes
    inputs = 2 * 6 * x.size * 4
    assert (kept_bytes(described, "full")[0], kept_bytes(described, policy)[0]) == (inputs, inputs + more)
    assert recompute_flops(described, policy) == step_flops(job, policy) - step_flops(job, "everything")


class Empty(nn.Module):
    @nn.compact
    def __call__(self, x: Any, cache: Any) -> Any:
        return x + jnp.sin(nn.Dense(WIDTH)(x)) + jnp.sin(cache).sum()


def test_what_is_empty_is_not_offloaded():
    (block,) = describe(workload(of_layers(lambda x: Empty(name="a")(x, x[:0])), Empty), "h200").stack.blocks
    assert [residual.name for residual in block.residuals if residual.may_offload and not residual.bytes] == []
