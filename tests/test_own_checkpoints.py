"""A policy replaces the model's own checkpoints around its blocks, whatever is between them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError
from remat_jax.planning import loop

LAYERS = 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(8, name="down")(jnp.tanh(nn.Dense(32, name="up")(x)))


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(8, name="down")(jnp.tanh(nn.Dense(32, name="up")(x))), None


def scanned(cls: Any, length: int = LAYERS) -> Any:
    return nn.scan(cls, variable_axes={"params": 0}, split_rngs={"params": True}, length=length)


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(LAYERS):
            x = nn.remat(Block)(name=f"block_{index}")(x)
        return x


class Scanned(nn.Module):
    """The checkpointed class itself is scanned, as in EasyLM, MaxText and OpenPI."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return scanned(nn.remat(ScannedBlock, prevent_cse=False))(name="layers")(x, None)[0]


class Lifted(nn.Module):
    """The block is inside lifted modules: a `vmap` over two copies, under a `jit`, under a checkpoint, under a scan."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
                both = nn.vmap(Block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
                return nn.jit(both)(name="block")(x).sum(0), None

        return scanned(nn.checkpoint(Body, prevent_cse=False))(name="layers")(x, None)[0]


class Inside(nn.Module):
    """The whole block is computed inside its own checkpoint."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = nn.Dense(32, name="up"), nn.Dense(8, name="down")
        if self.is_initializing():
            return x + down(jnp.tanh(up(x)))
        params = self.variables["params"]

        def block(params: Any, x: jax.Array) -> jax.Array:
            hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
            return x + hidden @ params["down"]["kernel"] + params["down"]["bias"]

        return jax.checkpoint(block)(params, x)


class InsideNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(LAYERS):
            x = Inside(name=f"block_{index}")(x)
        return x


def linen(net: nn.Module, block: type) -> tuple[Callable[..., Any], type, Any]:
    draw = np.random.default_rng(1)
    shapes = jax.eval_shape(net.init, jax.random.key(1), jnp.ones((2, 8)))
    params = jax.tree.map(lambda leaf: draw.normal(scale=0.3, size=leaf.shape).astype(np.float32), shapes)
    return (lambda params, x: (net.apply(params, x) ** 2).mean()), block, params


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class OfItself(NnxBlock):
    """The checkpoint is around the call of the class itself."""

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class NnxNet(nnx.Module):
    def __init__(self, block: type, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([block(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x) if isinstance(block, OfItself) else nnx.remat(lambda block, x: block(x))(block, x)
        return x


class NnxScanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> NnxBlock:
            return NnxBlock(rngs)

        self.blocks = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, block: NnxBlock) -> jax.Array:
            return nnx.remat(lambda block, x: block(x))(block, x)

        return run(x, self.blocks)


class Bridged(nnx.Module):
    """A Linen stack inside an NNX model, as in OpenPI."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stack = nnx.bridge.ToNNX(Scanned(), rngs=rngs)
        self.stack.lazy_init(jnp.ones((2, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.stack(x)


def of_nnx(model: nnx.Module, block: type) -> tuple[Callable[..., Any], type, Any]:
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        # Copied, so that Flax lets the model count its random numbers here.
        return jnp.mean(nnx.merge(graphdef, *jax.tree.map(lambda leaf: leaf, (params, rest)))(x) ** 2)

    return loss, block, params


# The models, and the products of their gradients without recomputation.
MODELS: dict[str, tuple[Callable[[], tuple[Callable[..., Any], type, Any]], int]] = {
    "unrolled": (lambda: linen(Unrolled(), Block), 23),
    "scanned": (lambda: linen(Scanned(), ScannedBlock), 24),
    "lifted": (lambda: linen(Lifted(), Block), 24),
    "inside": (lambda: linen(InsideNet(), Inside), 23),
    "nnx": (lambda: of_nnx(NnxNet(NnxBlock, nnx.Rngs(0)), NnxBlock), 23),
    "nnx of itself": (lambda: of_nnx(NnxNet(OfItself, nnx.Rngs(0)), OfItself), 23),
    "nnx scanned": (lambda: of_nnx(NnxScanned(nnx.Rngs(0)), NnxBlock), 24),
    "bridged": (lambda: of_nnx(Bridged(nnx.Rngs(0)), ScannedBlock), 24),
}
X = jax.random.normal(jax.random.key(2), (2, 8))


def assert_gradients_agree(plain: Callable[..., Any], changed: Callable[..., Any], params: Any) -> None:
    """Gradients of parameters and of the input, in float64, to 1e-12 of the largest."""
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, X))
        pairs = zip(*(jax.tree.leaves(jax.grad(f, argnums=(0, 1))(params, x)) for f in (plain, changed)), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, float(jnp.abs(a).max())))


@pytest.mark.parametrize("name", MODELS)
def test_the_policy_takes_the_place_of_the_models_own_checkpoint(name: str) -> None:
    make, plain = MODELS[name]
    loss, block, params = make()
    dots = rj.checkpoint_blocks(loss, {block: "dots"})
    by_layer = rj.checkpoint_blocks(loss, {block: "2 x full | 2 x dots"})
    again = LAYERS
    counts = [
        matmuls(jax.value_and_grad(f), params, X) for f in (loss, rj.checkpoint_blocks(loss, {block: "full"}), dots, by_layer)
    ]
    # Each block's first product is recomputed unless it is saved.
    assert counts == [plain + again, plain + again, plain, plain + again // 2]
    assert_gradients_agree(loss, dots, params)
    assert_gradients_agree(loss, by_layer, params)


@pytest.mark.parametrize("name", MODELS)
def test_under_off_the_model_stays_as_it_is_written(name: str) -> None:
    make, plain = MODELS[name]
    loss, block, params = make()
    for policy in ("off", f"{LAYERS} x off"):
        off = rj.checkpoint_blocks(loss, {block: policy})
        assert matmuls(jax.value_and_grad(off), params, X) == plain + LAYERS, policy


@pytest.mark.parametrize("name", [name for name in MODELS if "inside" not in name and "itself" not in name])
def test_kept_checkpoints_are_a_warning(name: str) -> None:
    make, plain = MODELS[name]
    loss, block, params = make()
    kept = rj.checkpoint_blocks(loss, {block: "dots"}, own_checkpoints="keep")
    with pytest.warns(rj.RematWarning, match="own_checkpoints='keep': the blocks are inside the model's own checkpoints"):
        assert matmuls(jax.value_and_grad(kept), params, X) == plain + LAYERS
    # A trace with one choice is not reused for the other.
    replaced = rj.checkpoint_blocks(loss, {block: "dots"})
    assert matmuls(jax.value_and_grad(replaced), params, X) == plain


def test_a_jit_that_was_traced_before_is_no_shelter() -> None:
    loss, block, params = linen(Scanned(), ScannedBlock)
    loss = jax.jit(loss)
    for _ in range(2):
        assert matmuls(jax.value_and_grad(loss), params, X) == 28
        assert matmuls(jax.value_and_grad(rj.checkpoint_blocks(loss, {block: "dots"})), params, X) == 24


@pytest.mark.parametrize("name", ["unrolled", "scanned"])
def test_replan_by_hand_does_no_harm(name: str) -> None:
    """Older programs wrote this: the blocks keep their policy, whichever is outside."""
    make, plain = MODELS[name]
    loss, block, params = make()
    inside = rj.checkpoint_blocks(rj.replan(loss, "off"), {block: "full"})
    assert matmuls(jax.value_and_grad(inside), params, X) == plain + LAYERS
    outside = rj.replan(rj.checkpoint_blocks(loss, {block: "full"}), "dots")
    assert matmuls(jax.value_and_grad(outside), params, X) == plain


def test_checkpoints_without_blocks_stay() -> None:
    model, x = nn.Sequential([Block(), Block()]), jnp.ones((2, 8))
    params = model.init(jax.random.key(0), x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        hidden = model.apply(params, x)
        return jnp.mean(jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T)(jnp.ones((8, 3)), hidden) ** 2)

    plain = matmuls(jax.value_and_grad(loss), params, x)
    assert matmuls(jax.value_and_grad(rj.checkpoint_blocks(loss, {Block: "everything"})), params, x) == plain
    assert matmuls(jax.value_and_grad(rj.checkpoint_blocks(loss, {Block: "full"})), params, x) == plain + 2


def test_a_block_under_remat_by_hand_leaves_what_stands_around_it() -> None:
    """Only policies given from outside replace the author's checkpoints."""
    w, x = jnp.ones((8, 8)), jnp.ones((2, 8))
    inner = rj.remat(lambda w, x: jnp.tanh(x @ w) @ w, "dots")
    outer = jax.checkpoint(inner)
    counts = [matmuls(jax.value_and_grad(lambda w, x, f=f: f(w, x).sum()), w, x) for f in (inner, outer)]
    assert counts[0] < counts[1]


@pytest.mark.parametrize("name", ["unrolled", "scanned", "nnx", "bridged"])
def test_with_the_new_rematerialisation(name: str, remat3: None) -> None:
    make, plain = MODELS[name]
    loss, block, params = make()
    assert matmuls(jax.value_and_grad(rj.checkpoint_blocks(loss, {block: "dots"})), params, X) == plain
    assert_gradients_agree(loss, rj.checkpoint_blocks(loss, {block: "dots"}), params)


def test_the_switch() -> None:
    model = NnxNet(NnxBlock, nnx.Rngs(0))
    graphdef_of = lambda model: of_nnx(model, NnxBlock)  # noqa: E731
    assert matmuls(jax.value_and_grad(graphdef_of(model)[0]), graphdef_of(model)[2], X) == 27
    rj.enable_gradient_checkpointing(model, "dots")
    loss, _, params = graphdef_of(model)
    assert matmuls(jax.value_and_grad(loss), params, X) == 23
    rj.enable_gradient_checkpointing(model, "dots", own_checkpoints="keep")
    loss, _, params = graphdef_of(model)
    with pytest.warns(rj.RematWarning, match="own_checkpoints='keep'"):
        assert matmuls(jax.value_and_grad(loss), params, X) == 27
    rj.disable_gradient_checkpointing(model)
    loss, _, params = graphdef_of(model)
    assert matmuls(jax.value_and_grad(loss), params, X) == 27
    linen_model = rj.enable_gradient_checkpointing(Unrolled(), "dots", blocks=Block)
    loss, _, params = linen(linen_model, Block)
    assert matmuls(jax.value_and_grad(loss), params, X) == 23


def test_a_wrong_choice_is_an_error() -> None:
    loss, block, params = linen(Unrolled(), Block)
    for call in (
        lambda: rj.checkpoint_blocks(loss, {block: "full"}, own_checkpoints="off"),
        lambda: rj.Workload(loss, params, (X,), blocks=block, own_checkpoints="drop"),
        lambda: rj.enable_gradient_checkpointing(Unrolled(), blocks=block, own_checkpoints=True),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError, match="own_checkpoints=.*: expected 'replace'.*or 'keep'"):
            call()


def test_nothing_is_said_where_checkpoints_give_way() -> None:
    loss, block, params = linen(Unrolled(), Block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(rj.checkpoint_blocks(loss, {block: "dots"}))(params, X)


@pytest.mark.parametrize("policy", ["full", "offload_inputs", "offload: *up:dot_general*; save: @dots"])
def test_residuals_are_those_of_the_same_model_without_checkpoints(policy: str) -> None:
    """The kept arrays of a model whose author wrote no checkpoint, to the byte."""

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for index in range(LAYERS):
                x = Block(name=f"block_{index}")(x)
            return x

    loss, _, params = linen(Unrolled(), Block)
    plain, _, _ = linen(Plain(), Block)
    tables = [rj.residuals(rj.Workload(f, params, (X,), blocks=Block), policy) for f in (loss, plain)]
    assert [(r.device_bytes, r.host_bytes, r.recompute_bytes) for r in tables[:1]] == [
        (r.device_bytes, r.host_bytes, r.recompute_bytes) for r in tables[1:]
    ]
    assert tables[0].warning is None


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(64, name="down")(jnp.tanh(nn.Dense(256, name="up")(x))), None


class WideNet(nn.Module):
    own: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return scanned(nn.remat(Wide, prevent_cse=False) if self.own else Wide, 8)(name="layers")(x, None)[0]


def wide(own: bool = True) -> rj.Workload:
    net, x = WideNet(own), jax.ShapeDtypeStruct((512, 64), jnp.float32)
    params = jax.eval_shape(net.init, jax.random.key(0), x)
    return rj.Workload(lambda p, x: (net.apply(p, x) ** 2).mean(), params, (x,), blocks=Wide, name="wide")


REPLACED = "The policy replaces 1 of the model's own checkpoints around the blocks (a scanned checkpoint counts once)"


def test_reports_say_how_many_gave_way() -> None:
    job = wide()
    report, table, findings = rj.measure(job, "dots"), rj.residuals(job, "dots"), rj.doctor(job, "dots")
    for result in (report, table, findings):
        assert result.replaced_checkpoints == result.to_dict()["replaced_checkpoints"] == 1
        assert REPLACED in " ".join(str(result).split()), result
    assert findings.ok
    # Each of four unrolled ones counts.
    loss, block, params = linen(Unrolled(), Block)
    assert rj.residuals(rj.Workload(loss, params, (X,), blocks=block), "full").replaced_checkpoints == LAYERS
    plain = rj.measure(wide(own=False), "dots")
    assert plain.replaced_checkpoints == 0 and " own " not in str(plain)


def test_off_is_the_step_as_written() -> None:
    job, plain = wide(), wide(own=False)
    written, without = rj.measure(job, "off"), rj.measure(plain, "off")
    assert (written.policy, without.policy) == ("as written", "off")
    # Its author wrote `nn.remat`, which is `full`; `everything` keeps what the model without checkpoints keeps.
    assert written.residual_device_bytes == rj.measure(job, "full").residual_device_bytes
    assert rj.residuals(job, "everything").device_bytes == without.residual_device_bytes
    assert written.replaced_checkpoints == 0


def test_a_plan_is_that_of_the_model_without_checkpoints_and_applies_to_the_loss_as_written(monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "MOST_COMPILED", 3)
    budget = rj.measure(wide(), "dots").device_bytes
    plan, plain = (rj.plan(wide(own), budget, "cpu") for own in (True, False))
    assert (plan.seconds, plan.base_seconds, plan.recompute_flops) == (plain.seconds, plain.base_seconds, plain.recompute_flops)
    assert plan.device_bytes <= budget and REPLACED in plan.notes
    rows = {row.name: row for row in plan.named}
    assert all(rows[row.name].seconds == row.seconds for row in plain.named if row.name != "off")
    assert "off" not in rows and rows["as written"].compiled
    # `nn.remat` without a policy recomputes what `full` does.
    assert rows["as written"].seconds == pytest.approx(rows["full"].seconds, rel=1e-6)
    net, x = WideNet(), jax.random.normal(jax.random.key(0), (512, 64))
    params = net.init(jax.random.key(1), x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (net.apply(params, x) ** 2).mean()

    counted = [matmuls(jax.value_and_grad(f), params, x) for f in (loss, plan.apply(loss))]
    # As written, the first product of each of eight layers is recomputed.
    assert counted[0] == 48 + 8 and 48 <= counted[1] < counted[0]
    for a, b in zip(*(jax.tree.leaves(jax.grad(f)(params, x)) for f in (loss, plan.apply(loss))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
