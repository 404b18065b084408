"""Blocks of other libraries: Equinox modules, callable pytrees, marked functions, existing checkpoints."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, PlanningError
from remat_jax.planning import loop
from tests.small_models import times

WIDTH, LAYERS, POLICIES = 16, 2, ("full", "offload_dot_with_no_batch_dims", "1 x full | 1 x dots")


class Block(eqx.Module):
    """A layer of a transformer, as Equinox users write it."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    scale: jax.Array
    kind: str = eqx.field(static=True)
    counts: jax.Array = field(default_factory=lambda: jnp.arange(3))  # integers, without a gradient

    def __init__(self, key):
        attention_key, mlp_key, scale_key = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=attention_key)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=mlp_key)
        self.scale, self.kind, self.counts = jax.random.normal(scale_key, (WIDTH,)), "decoder", jnp.arange(3)

    def __call__(self, x):
        normed = jax.vmap(self.norm)(x)
        x = x + self.attention(normed, normed, normed)
        return x + self.scale * jax.vmap(self.mlp)(x)


class Model(eqx.Module):
    """Unrolled layers."""

    layers: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 1)
        self.layers, self.head = [Block(block_key) for block_key in keys[1:]], eqx.nn.Linear(WIDTH, 3, key=keys[0])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.head)(x)


class Scanned(eqx.Module):
    """The same layers, stacked."""

    layers: Block
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 1)
        self.layers, self.head = eqx.filter_vmap(Block)(keys[1:]), eqx.nn.Linear(WIDTH, 3, key=keys[0])

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, layer: (eqx.combine(layer, static)(x), None), x, arrays)
        return jax.vmap(self.head)(x)


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


X = (2, 5, WIDTH)


def job(make, **options):
    return rj.Workload(loss, make(jax.random.key(0)), (jax.ShapeDtypeStruct(X, jnp.float32),), Block, **options)


def assert_close(results, expected, relative):
    assert jax.tree.structure(expected) == jax.tree.structure(results)
    for wanted, got in zip(jax.tree.leaves(expected), jax.tree.leaves(results), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=relative, atol=1e-6 if relative > 1e-6 else 1e-13)


@pytest.mark.parametrize(
    ("make", "policy"), [(Model, POLICIES[1]), (Model, POLICIES[2]), (Scanned, POLICIES[0]), (Scanned, POLICIES[1])]
)
def test_gradients_are_those_of_the_model_as_written(make, policy, x64):
    model, x = make(jax.random.key(0)), jax.random.normal(jax.random.key(1), X)
    losses = loss, rj.checkpoint_blocks(loss, {Block: policy})
    expected, results = (eqx.filter_jit(eqx.filter_value_and_grad(fn))(model, x) for fn in losses)
    assert_close(results, expected, 1e-12)


def products(fn, model, x):
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    return matmuls(jax.grad(lambda arrays, x: fn(eqx.combine(arrays, static), x)), arrays, x)


def test_full_runs_every_product_of_the_blocks_again_and_dots_none():
    model, x = Model(jax.random.key(0)), jnp.ones(X)
    again = {
        policy: products(rj.checkpoint_blocks(loss, {Block: policy}), model, x) - products(loss, model, x)
        for policy in ("full", "dots")
    }
    # Query, key, value, scores, context, output and the perceptron's two products; `scale` multiplies the second of these.
    assert again == {"full": 8 * LAYERS, "dots": 0}


@pytest.mark.parametrize(("make", "path"), [(Model, "layers/0"), (Scanned, "layers")])
def test_residuals_have_attribute_paths_and_are_what_the_policy_keeps(make, path):
    table, full = (rj.residuals(job(make), policy) for policy in ("dots_with_no_batch_dims", "full"))
    names = {row.name.split(":")[0].removeprefix(path).strip("/") for row in table if row.action == "save"}
    # Equinox also names the calls of its own layers.
    assert {"attention/eqx.nn.MultiheadAttention/query_proj/eqx.nn.Linear", "mlp/eqx.nn.MLP/layers/0/eqx.nn.Linear"} <= names
    narrow = 2 * 5 * WIDTH * 4
    assert table.device_bytes - full.device_bytes == LAYERS * (5 * narrow + 4 * narrow)


def test_globs_are_attribute_paths():
    model, x = Model(jax.random.key(0)), jnp.ones(X)
    policed = rj.checkpoint_blocks(loss, {"layers/1": "full"})
    assert products(policed, model, x) - products(loss, model, x) == 8
    stack = Scanned(jax.random.key(0))
    by_path, by_class = (products(rj.checkpoint_blocks(loss, {block: "full"}), stack, x) for block in ("layers", Block))
    assert by_path == by_class > products(loss, stack, x)
    named = rj.residuals(rj.Workload(loss, model, (x,), "layers/*"), "save: *mlp/*/layers/0/*:dot_general#0")
    assert sum(row.count for row in named if row.action == "save" and "mlp/eqx.nn.MLP/layers/0" in row.name) == LAYERS


@pytest.mark.parametrize("make", [Model, Scanned])
def test_a_plan_applies_to_the_loss_as_it_is_written(make, monkeypatch):
    monkeypatch.setattr(loop, "MOST_COMPILED", 3)  # which plan is found is asked elsewhere; here, that any is that of the model
    workload = job(make)
    full, off = (rj.measure(workload, policy, "cpu").device_bytes for policy in ("full", "off"))
    budget = int(full + 0.6 * (off - full))
    plan = rj.plan(workload, budget, "cpu")
    assert plan.device_bytes <= budget and list(plan.policies) == [Block]
    model, x = make(jax.random.key(0)), jax.random.normal(jax.random.key(1), X)
    expected, gradients = (eqx.filter_jit(eqx.filter_grad(fn))(model, x) for fn in (loss, plan.apply(loss)))
    assert_close(gradients, expected, 2e-4)


def test_the_doctor_reads_blocks_of_equinox():
    assert rj.doctor(job(Model), "full").ok and rj.doctor(job(Scanned), "full").regions == 1
    (finding,) = rj.doctor(job(Model), "save: @dots, *dot_generall*").findings
    assert (finding.trap, "layers/0" in finding.block) == ("unmatched_name", True) and "'*dot_generall*'" in finding.problem
    (finding,) = rj.doctor(job(Model), {eqx.nn.Conv: "full"}).findings
    assert (finding.trap, finding.block) == ("unreached_block", "Conv")


def test_an_offload_of_equinox_blocks_is_tied_where_they_are_unrolled():
    def barriers(make, policy):
        arrays, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)
        policed = rj.checkpoint_blocks(loss, {Block: policy})
        return times(
            "optimization_barrier", jax.grad(lambda params, x: policed(eqx.combine(params, static), x)), arrays, jnp.ones(X)
        )

    # Each block is traced at least at the end of its forward pass and at both ends of its backward pass.
    assert barriers(Model, "offload_inputs") >= 3 * LAYERS
    assert barriers(Model, "full") == barriers(Scanned, "offload_inputs") == 0
    assert rj.residuals(job(Model), "offload_inputs").host_bytes == LAYERS * 4 * X[0] * X[1] * X[2]


def test_only_floating_point_arrays_are_parameters():
    workload = job(Model)
    model = Model(jax.random.key(0))
    trained = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    step = workload.step("full")
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.arguments[0])) == trained
    assert [leaf.dtype for leaf in jax.tree.leaves(step.arguments[1])] == [jnp.int32] * LAYERS
    shapes = rj.Workload(loss, eqx.filter_eval_shape(Model, jax.random.key(0)), workload.batch, Block)
    assert rj.residuals(shapes, "full").device_bytes == rj.residuals(workload, "full").device_bytes


# --- plain pytrees and functions --------------------------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=["up", "down"], meta_fields=[])
@dataclass
class Layer:
    """A callable pytree without any library."""

    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up) @ self.down


@rj.block
def layer_function(weights, x):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


@rj.block(parameters=["up", "down"])
def named_function(x, up, *, down):
    return x + jnp.tanh(x @ up) @ down


def weights(seed):
    up, down = jax.random.split(jax.random.key(seed))
    return {"up": jax.random.normal(up, (WIDTH, 32)), "down": jax.random.normal(down, (32, WIDTH))}


STYLES = {
    "pytree": (Layer, lambda weights, x: Layer(**weights)(x)),
    "function": (layer_function, layer_function),
    "named": (named_function, lambda weights, x: named_function(x, weights["up"], down=weights["down"])),
    "checkpoints": ("checkpoints", jax.checkpoint(lambda weights, x: x + jnp.tanh(x @ weights["up"]) @ weights["down"])),
}


def run(layer, scan):
    def loss(layers, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, layers)
        else:
            for layer_weights in layers:
                x = layer(layer_weights, x)
        return jnp.sum(x**2)

    return loss


@pytest.mark.parametrize(("scan", "policy"), [(False, POLICIES[2]), (True, POLICIES[1])])
@pytest.mark.parametrize("style", STYLES)
def test_functions_pytrees_and_regions_are_blocks(style, scan, policy, x64):
    block, layer = STYLES[style]
    fn, layers, x = run(layer, scan), [weights(seed) for seed in range(LAYERS)], jnp.ones((4, WIDTH))
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if scan else layers
    plain = run(lambda weights, x: x + jnp.tanh(x @ weights["up"]) @ weights["down"], scan)
    gradients = jax.jit(jax.grad(rj.checkpoint_blocks(fn, {block: policy})))(layers, x)
    assert_close(gradients, jax.jit(jax.grad(plain))(layers, x), 1e-12)
    rows = rj.residuals(rj.Workload(fn, layers, (x,), block), "dots")
    kept = sum(row.bytes for row in rows if row.action == "save" and row.name.endswith("dot_general#0"))
    assert kept == LAYERS * 4 * 32 * 8
    # Parameters are not inputs: `@inputs` offloads only activations.
    offered = rj.residuals(rj.Workload(fn, layers, (x,), block), "offload_inputs").host_bytes
    # Arrays from outside the loss, such as the batch, are no inputs of a region.
    assert offered == (LAYERS - 1 if style == "checkpoints" and not scan else LAYERS) * 4 * WIDTH * 8


def test_a_marked_function_under_vmap_is_a_block():
    def loss(weights, x):
        return jnp.sum(jax.vmap(layer_function, in_axes=(None, 0))(weights, x) ** 2)

    w, x = weights(0), jax.random.normal(jax.random.key(1), (3, 4, WIDTH))
    full = rj.checkpoint_blocks(loss, {layer_function: "full"})
    assert matmuls(jax.grad(full), w, x) == matmuls(jax.grad(loss), w, x) + 1
    assert_close(jax.grad(full)(w, x), jax.grad(loss)(w, x), 1e-5)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_is_no_pytree_cannot_be_parameters():
    class Opaque:
        def __call__(self, x):
            return x

    with pytest.raises(ArgumentError, match="params holds .*Opaque.*expected arrays"):
        rj.Workload(lambda model, x: x.sum(), Opaque(), (jnp.ones(3),), Opaque)


def test_marks_say_what_they_need():
    with pytest.raises(ArgumentError, match=r"parameters='wieghts': no argument of .* Did you mean 'weights'"):
        rj.block(lambda weights, x: x, parameters="wieghts")
    with pytest.raises(ArgumentError, match="put a functools.partial into a lambda"):
        rj.block(functools.partial(layer_function))
    with pytest.raises(ArgumentError, match="a class whose instances are called needs no mark"):
        rj.block(Layer)


def test_a_plan_of_a_marked_function_is_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "MOST_COMPILED", 3)
    layers, x = [weights(seed) for seed in range(LAYERS)], jax.ShapeDtypeStruct((512, WIDTH), jnp.float32)
    workload = rj.Workload(run(layer_function, False), layers, (x,), layer_function)
    plan = rj.plan(workload, rj.measure(workload, "dots", "cpu").device_bytes, "cpu")
    plan.save(tmp_path / "plan.json")
    assert rj.Plan.load(tmp_path / "plan.json", workload).policies == plan.policies
    assert rj.Plan.load(tmp_path / "plan.json").policies == plan.policies
    text = (tmp_path / "plan.json").read_text().replace("layer_function", "another_function")
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(PlanningError, match="no function of that name is loaded"):
        rj.Plan.load(tmp_path / "other.json")
