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
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError
from remat_jax.planning import loop
from tests.small_models import Mlp, NnxMlp, Stack, assert_same, values

LAYERS = 2


class ScannedBlock(Mlp):
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:  # type: ignore[override]
        return super().__call__(x), None


def scanned(cls: Any, length: int = LAYERS) -> Any:
    return nn.scan(cls, variable_axes={"params": 0}, split_rngs={"params": True}, length=length)


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
                both = nn.vmap(Mlp, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
                return nn.jit(both)(name="block")(x).sum(0), None

        return scanned(nn.checkpoint(Body, prevent_cse=False))(name="layers")(x, None)[0]


class Inside(nn.Module):
    """The whole block is computed inside its own checkpoint."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = (self.param(f"{rows}", nn.initializers.ones, (rows, 40 - rows)) for rows in (8, 32))
        return jax.checkpoint(lambda up, down, x: x + jnp.tanh(x @ up) @ down)(up, down, x)


def linen(net: nn.Module, block: type) -> tuple[Callable[..., Any], type, Any]:
    draw = np.random.default_rng(1)
    shapes = jax.eval_shape(net.init, jax.random.key(1), jnp.ones((2, 8)))
    params = jax.tree.map(lambda leaf: draw.normal(scale=0.3, size=leaf.shape).astype(np.float32), shapes)
    return (lambda params, x: (net.apply(params, x) ** 2).mean()), block, params


class NnxBlock(NnxMlp):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs, 8)


class OfItself(NnxBlock):
    """The checkpoint is around the call of the class itself."""

    __call__ = nnx.remat(NnxBlock.__call__)


class NnxNet(nnx.Module):
    def __init__(self, block: type, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([block(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x) if isinstance(block, OfItself) else nnx.remat(lambda block, x: block(x))(block, x)
        return x


class NnxScanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.vmap(NnxBlock)(rngs.split(LAYERS))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.remat(lambda x, block: block(x))
        return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


def bridged() -> nnx.Module:
    """A Linen stack as an NNX model, as in OpenPI."""
    stack = nnx.bridge.ToNNX(Scanned(), rngs=nnx.Rngs(0))
    stack.lazy_init(jnp.ones((2, 8)))
    return stack


def of_nnx(model: nnx.Module, block: type) -> tuple[Callable[..., Any], type, Any]:
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        # Copied, so that Flax lets the model count its random numbers here.
        return jnp.mean(nnx.merge(graphdef, *jax.tree.map(lambda leaf: leaf, (params, rest)))(x) ** 2)

    return loss, block, params


OWN = Stack(nn.remat(Mlp), LAYERS)
"""Each layer is checkpointed by its author."""
ONCE = 6 * LAYERS
"""The products of a gradient without recomputation; unrolled, the input of the first layer needs none."""
# The models, and their products.
MODELS: dict[str, tuple[Callable[[], tuple[Callable[..., Any], type, Any]], int]] = {
    "unrolled": (lambda: linen(OWN, Mlp), ONCE - 1),
    "scanned": (lambda: linen(Scanned(), ScannedBlock), ONCE),
    "lifted": (lambda: linen(Lifted(), Mlp), ONCE),
    "inside": (lambda: linen(Stack(Inside), Inside), ONCE - 1),
    "nnx": (lambda: of_nnx(NnxNet(NnxBlock, nnx.Rngs(0)), NnxBlock), ONCE - 1),
    "nnx of itself": (lambda: of_nnx(NnxNet(OfItself, nnx.Rngs(0)), OfItself), ONCE - 1),
    "nnx scanned": (lambda: of_nnx(NnxScanned(nnx.Rngs(0)), NnxBlock), ONCE),
    "bridged": (lambda: of_nnx(bridged(), ScannedBlock), ONCE),
}
X = jax.random.normal(jax.random.key(2), (2, 8))


def assert_gradients_agree(plain: Callable[..., Any], changed: Callable[..., Any], params: Any) -> None:
    """Gradients of parameters and of the input, in float64."""
    with jax.enable_x64(True):
        args = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, X))
        assert_same(*(jax.jit(jax.grad(f, argnums=(0, 1)))(*args) for f in (changed, plain)))


@pytest.mark.parametrize("name", MODELS)
def test_the_policy_takes_the_place_of_the_models_own_checkpoint(name: str) -> None:
    make, plain = MODELS[name]
    loss, block, params = make()
    by_layer = f"1 x full | {LAYERS - 1} x dots"
    # Each block's first product is recomputed unless it is saved; under `off` the model stays as it is written.
    again = {"full": LAYERS, "dots": 0, by_layer: 1, "off": LAYERS, f"{LAYERS} x off": LAYERS}
    assert matmuls(jax.value_and_grad(loss), params, X) == plain + LAYERS
    for policy, products in again.items():
        under = rj.checkpoint_blocks(loss, {block: policy})
        assert matmuls(jax.value_and_grad(under), params, X) == plain + products, policy
    assert_gradients_agree(loss, rj.checkpoint_blocks(loss, {block: by_layer}), params)


@pytest.mark.parametrize("name", ["scanned", "lifted", "nnx", "bridged"])
def test_kept_checkpoints_are_a_warning(name: str) -> None:
    make, plain = MODELS[name]
    loss, block, params = make()
    kept = rj.checkpoint_blocks(loss, {block: "dots"}, own_checkpoints="keep")
    with pytest.warns(rj.RematWarning, match="own_checkpoints='keep': the blocks are inside the model's own checkpoints"):
        assert matmuls(jax.value_and_grad(kept), params, X) == plain + LAYERS
    # A trace with one choice is not reused for the other, and replaced checkpoints are no warning.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert matmuls(jax.value_and_grad(rj.checkpoint_blocks(loss, {block: "dots"})), params, X) == plain


def test_replan_by_hand_and_traced_jits_do_no_harm() -> None:
    make, plain = MODELS["scanned"]
    loss, block, params = make()
    jitted = jax.jit(loss)
    # The blocks keep their policy, whichever is outside.
    inside = rj.checkpoint_blocks(rj.replan(loss, "off"), {block: "full"})
    outside = rj.replan(rj.checkpoint_blocks(loss, {block: "full"}), "dots")
    counts = {jitted: LAYERS, rj.checkpoint_blocks(jitted, {block: "dots"}): 0, inside: LAYERS, outside: 0}
    for _ in range(2):
        for fn, again in counts.items():
            assert matmuls(jax.value_and_grad(fn), params, X) == plain + again


def test_checkpoints_without_blocks_and_around_blocks_by_hand_stay() -> None:
    loss, _, params = linen(Stack(), Mlp)
    head = jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T)

    def counts(policy: str) -> int:
        fn = rj.checkpoint_blocks(lambda both, x: loss(both[0], x) + jnp.sum(head(both[1], x)), {Mlp: policy})
        return matmuls(jax.value_and_grad(fn), (params, jnp.ones((8, 3))), X)

    # The head's own checkpoint recomputes its first product.
    assert [counts(policy) for policy in ("everything", "full")] == [ONCE - 1 + 6, ONCE - 1 + 6 + LAYERS]
    # Only policies given from outside replace the author's checkpoints.
    inner = rj.remat(lambda w, x: jnp.tanh(x @ w) @ w, "dots")
    by_hand = [
        matmuls(jax.value_and_grad(lambda w, f=f: f(w, X).sum()), jnp.ones((8, 8))) for f in (inner, jax.checkpoint(inner))
    ]
    assert by_hand[0] < by_hand[1]


@pytest.mark.parametrize("name", ["scanned", "nnx", "bridged"])
def test_with_the_new_rematerialisation(name: str, remat3: None) -> None:
    make, plain = MODELS[name]
    loss, block, params = make()
    dots = rj.checkpoint_blocks(loss, {block: "dots"})
    assert matmuls(jax.value_and_grad(dots), params, X) == plain
    if name == "scanned":
        assert_gradients_agree(loss, dots, params)


def test_a_wrong_choice_is_an_error() -> None:
    loss, block, params = linen(OWN, Mlp)
    for call in (
        lambda: rj.checkpoint_blocks(loss, {block: "full"}, own_checkpoints="off"),
        lambda: rj.Workload(loss, params, (X,), blocks=block, own_checkpoints="drop"),
        lambda: rj.enable_gradient_checkpointing(OWN, blocks=block, own_checkpoints=True),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError, match="own_checkpoints=.*: expected 'replace'.*or 'keep'"):
            call()


@pytest.mark.parametrize("policy", ["full", "offload_inputs", "offload: *Linear_1:dot_general*; save: @dots"])
def test_residuals_are_those_of_the_same_model_without_checkpoints(policy: str) -> None:
    loss, _, params = linen(OWN, Mlp)
    plain, _, _ = linen(Stack(), Mlp)
    tables = [rj.residuals(rj.Workload(f, params, (X,), blocks=Mlp), policy) for f in (loss, plain)]
    assert len({(table.device_bytes, table.host_bytes, table.recompute_bytes) for table in tables}) == 1
    assert tables[0].warning is None


@rj.block
def layer(kernels: Any, x: jax.Array) -> jax.Array:
    up, down = kernels
    return x + jnp.tanh(x @ up) @ down


def wide(own: bool = True) -> rj.Workload:
    """Eight layers in a scan, checkpointed by their author."""

    def body(x: jax.Array, kernels: Any) -> tuple[jax.Array, None]:
        return layer(kernels, x), None

    def loss(kernels: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(jax.checkpoint(body) if own else body, x, kernels)[0] ** 2)

    up, down, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64, 256), (8, 256, 64), (512, 64)))
    return rj.Workload(loss, (up, down), (x,), blocks=layer, name="wide")


REPLACED = "The policy replaces 1 of the model's own checkpoints around the blocks (a scanned checkpoint counts once)"


def test_reports_say_how_many_gave_way() -> None:
    job, plain = wide(), wide(own=False)
    report, table, findings = rj.measure(job, "dots"), rj.residuals(job, "dots"), rj.doctor(job, "dots")
    for result in (report, table, findings):
        assert result.replaced_checkpoints == result.to_dict()["replaced_checkpoints"] == 1
        assert REPLACED in " ".join(str(result).split()), result
    assert findings.ok
    # Each of several unrolled ones counts.
    loss, block, params = linen(OWN, Mlp)
    assert rj.residuals(rj.Workload(loss, params, (X,), blocks=block), "full").replaced_checkpoints == LAYERS
    # `off` is the step as written; its author wrote what `full` does. `everything` keeps what a model without checkpoints does.
    written, without = rj.measure(job, "off"), rj.measure(plain, "off")
    assert (written.policy, without.policy) == ("as written", "off")
    assert written.replaced_checkpoints == without.replaced_checkpoints == 0 and " own " not in str(without)
    assert written.residual_device_bytes == rj.residuals(job, "full").device_bytes
    assert rj.residuals(job, "everything").device_bytes == without.residual_device_bytes


def test_a_plan_is_that_of_the_model_without_checkpoints_and_applies_to_the_loss_as_written(monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "MOST_COMPILED", 2)
    budget = rj.measure(wide(), "dots").device_bytes
    plan, plain = (rj.plan(wide(own), budget, "cpu") for own in (True, False))
    assert (plan.seconds, plan.base_seconds, plan.recompute_flops) == (plain.seconds, plain.base_seconds, plain.recompute_flops)
    assert plan.device_bytes <= budget and REPLACED in plan.notes
    rows = {row.name: row for row in plan.named}
    assert all(rows[row.name].seconds == row.seconds for row in plain.named if row.name != "off")
    assert "off" not in rows and rows["as written"].compiled
    # `nn.remat` without a policy recomputes what `full` does.
    assert rows["as written"].seconds == pytest.approx(rows["full"].seconds, rel=1e-6)
    loss, args = wide().loss, jax.tree.map(lambda leaf: values(*leaf.shape) / 8, (wide().params, *wide().batch))
    counted = [matmuls(jax.value_and_grad(f), *args) for f in (loss, plan.apply(loss))]
    # As written, the first product of each of eight layers is recomputed.
    assert counted[0] == 48 + 8 and 48 <= counted[1] < counted[0]
    assert_same(*(jax.jit(jax.grad(f))(*args) for f in (plan.apply(loss), loss)), 1e-5)


def named(array: jax.Array) -> jax.Array:
    return checkpoint_name(array, "parameters")


@pytest.mark.parametrize(("prepare", "region"), [(named, lambda f: f), (lambda w: named(named(w).T), jax.checkpoint)])
def test_parameters_that_are_named_or_viewed_before_the_block_are_not_kept_again(prepare: Any, region: Any, x64: None) -> None:
    """haliax names each layer's parameters inside its own checkpoint, which is wider than the block."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return layer(jax.tree.map(prepare, weights), checkpoint_name(x, "x")), None

        return jnp.sum(jax.lax.scan(region(body), x, weights)[0] ** 2)

    up, down, x = values(4, 8, 32), values(4, 32, 8), values(2, 8)
    weights = (up, down) if prepare is named else (up.mT, down.mT)
    kept = rj.residuals(rj.Workload(loss, weights, (x,), layer), "full").device_bytes
    assert kept <= (4 + 1) * x.nbytes, "the layers' inputs and the output"
    gradients = jax.jit(jax.grad(rj.checkpoint_blocks(loss, {layer: "1 x full | 3 x dots"})))(weights, x)
    assert_same(gradients, jax.jit(jax.grad(loss))(weights, x))


def test_where_a_scan_is_cut_parameters_that_are_named_before_the_block_are_not_copied() -> None:
    def device_bytes(prepare: Any) -> int:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            body = lambda x, weights: (layer(jax.tree.map(prepare, weights), x), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)

        weights = (jnp.ones((4, 64, 256)), jnp.ones((4, 256, 64)))
        return rj.measure(rj.Workload(loss, weights, (jnp.ones((2, 64)),), layer), "2 x full | 2 x dots", "cpu").device_bytes

    assert device_bytes(named) == device_bytes(lambda array: array)
