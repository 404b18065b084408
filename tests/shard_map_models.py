"""A transformer that is partitioned by hand inside `shard_map`, and the same on one device; a script prints both gradients.

It has three axes. `fsdp` partitions the batch and the weights, which every block gathers; `tensor` the heads and the hidden
features; `sequence` the positions, whose keys and values every block gathers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from tests.small_models import Stack

BATCH, LENGTH, WIDTH, HEADS, LAYERS = 4, 8, 8, 2, 2
AXES = ("fsdp", "tensor", "sequence")
POLICIES: dict[str, Any] = {
    "offload_inputs": "offload_inputs",
    "offload_dots": "offload_dot_with_no_batch_dims",
    "named": "offload: *hidden*; save: @inputs",
    "by_layer": rj.LayerPolicies.of(["offload_inputs", "save: *hidden*"]),
}
MODES = [*(("scanned", policy) for policy in POLICIES), ("nnx", "offload_inputs"), ("nnx", "by_layer")]
OF_WEIGHTS = {
    "qkv": P("fsdp", None, "tensor"),
    "out": P("tensor", "fsdp"),
    "hidden": P("fsdp", "tensor"),
    "down": P("tensor", "fsdp"),
}
SHAPES = {"qkv": (WIDTH, 3, WIDTH), "out": (WIDTH, WIDTH), "hidden": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}


def gathered(x: jax.Array, axis: str, dimension: int, divided: bool) -> jax.Array:
    return jax.lax.all_gather(x, axis, axis=dimension, tiled=True) if divided else x


def summed(x: jax.Array, divided: bool) -> jax.Array:
    return jax.lax.psum(x, "tensor") if divided else x


def block(x: jax.Array, weights: dict[str, jax.Array], divided: bool) -> jax.Array:
    """One layer on this device's part of x (B, T, E) and of the weights, or on all of both without a mesh."""
    heads = HEADS // 2 if divided else HEADS
    with jax.named_scope("attention"):
        made = jnp.einsum("bte,ecd->cbtd", x, gathered(weights["qkv"], "fsdp", 0, divided))
        query, key, value = (array.reshape(*array.shape[:2], heads, -1) for array in made)
        key, value = (gathered(array, "sequence", 1, divided) for array in (key, value))
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", query, key), axis=-1)
        mixed = jnp.einsum("bhts,bshd->bthd", scores, value).reshape(*x.shape[:2], -1)
        x = x + summed(mixed @ gathered(weights["out"], "fsdp", 1, divided), divided)
    with jax.named_scope("hidden"):
        hidden = jnp.tanh(x @ gathered(weights["hidden"], "fsdp", 0, divided))
    return x + summed(hidden @ gathered(weights["down"], "fsdp", 1, divided), divided)


def local(name: str, divided: bool) -> tuple[int, ...]:
    """The shape of one device's part of a weight: every axis that partitions it has size 2."""
    return tuple(size // 2 if axis and divided else size for size, axis in zip(SHAPES[name], OF_WEIGHTS[name], strict=True))


class Block(nn.Module):
    divided: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        initial = nn.initializers.normal(0.3)
        return block(x, {name: self.param(name, initial, local(name, self.divided)) for name in SHAPES}, self.divided)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        for name, shape in SHAPES.items():
            setattr(self, name, nnx.Param(0.3 * jax.random.normal(rngs.params(), shape)))
        self.divided = False

    def __call__(self, x: jax.Array) -> jax.Array:
        return block(x, {name: getattr(self, name)[...] for name in SHAPES}, self.divided)


Case = tuple[Any, Callable[[bool], Callable[..., Any]], type]


@functools.cache
def linen_case(scanned: bool) -> Case:
    """The parameters; the model as a function of parameters and x, partitioned or not; the class of its blocks."""

    def model(divided: bool) -> Stack:
        return Stack(functools.partial(Block, divided), LAYERS, scanned)

    params = jax.jit(model(False).init)(jax.random.key(0), jnp.zeros((1, LENGTH, WIDTH)))
    return params, lambda divided: model(divided).apply, Block


@functools.cache
def nnx_case() -> Case:
    """The same in NNX, unrolled."""
    rngs = nnx.Rngs(0)
    graphdef, params = nnx.split(nnx.List([NnxBlock(rngs) for _ in range(LAYERS)]))

    def made(divided: bool) -> Callable[..., Any]:
        def apply(params: Any, x: jax.Array) -> jax.Array:
            for layer in nnx.merge(graphdef, params):
                layer.divided = divided
                x = layer(x)
            return x

        return apply

    return params, made, NnxBlock


CASES = {"linen": lambda: linen_case(False), "scanned": lambda: linen_case(True), "nnx": nnx_case}


def spec(path: Any, leaf: Any) -> P:
    """The partition spec of a parameter; a scan's parameters have their layers first."""
    text = jax.tree_util.keystr(path)
    axes = next(axes for name, axes in OF_WEIGHTS.items() if f"'{name}'" in text)
    return P(*[None] * (leaf.ndim - len(axes)), *axes)


def losses(case: str, mesh: Any) -> tuple[Any, type, Callable[..., Any], Callable[..., Any]]:
    """Parameters, the blocks' class, the loss on one device, and the same loss inside `shard_map`."""
    params, made, of_blocks = CASES[case]()
    specs = jax.tree.map_with_path(spec, params)

    def alone(params: Any, x: jax.Array) -> jax.Array:
        return (made(False)(params, x) ** 2).sum()

    def of_part(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.psum((made(True)(params, x) ** 2).sum(), ("fsdp", "sequence"))

    divided = jax.shard_map(of_part, mesh=mesh, in_specs=(specs, P("fsdp", "sequence")), out_specs=P())
    return params, of_blocks, alone, divided


def inside(case: str, mesh: Any) -> Callable[..., Any]:
    """The gradient with both `checkpoint_blocks` and `jax.grad` inside `shard_map`."""
    params, made, of_blocks = CASES[case]()
    specs = jax.tree.map_with_path(spec, params)

    def of_part(params: Any, x: jax.Array) -> Any:
        return jax.grad(rj.checkpoint_blocks(lambda p: (made(True)(p, x) ** 2).sum(), {of_blocks: "offload_inputs"}))(params)

    return jax.shard_map(of_part, mesh=mesh, in_specs=(specs, P("fsdp", "sequence")), out_specs=specs)


def constrained(mesh: Any, within: bool) -> tuple[Callable[..., Any], Any]:
    """The loss of two dense layers, with a sharding constraint inside the second or before it, and its parameters."""
    divided = jax.sharding.NamedSharding(mesh, P("fsdp"))

    class Wave(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            hidden = nn.Dense(WIDTH)(x)
            return x + jnp.sin(
                jax.lax.with_sharding_constraint(hidden, divided) if within and self.name == "second" else hidden
            )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = Wave(name="first")(x)
            x = Wave(name="second")(x if within else jax.lax.with_sharding_constraint(x, divided))
            return (x**2).sum()

    x = jnp.ones((BATCH, WIDTH))
    params = jax.jit(Model().init)(jax.random.key(0), x)
    return rj.checkpoint_blocks(lambda params: Model().apply(params, x), {Wave: "offload_inputs"}), params


def refused(function: Callable[..., Any], *arguments: Any) -> str:
    """The error of `function`'s gradient outside `jit`."""
    try:
        jax.grad(function)(*arguments)
    except rj.errors.UnsupportedError as error:
        return str(error)
    return ""


def main(path: str) -> None:
    """Write the gradients of each case on one device and inside `shard_map` on eight, under each policy."""
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))
    arrays: dict[str, Any] = {}

    def keep(name: str, gradients: Any) -> None:
        arrays.update({f"{name}/{place}": np.asarray(leaf) for place, leaf in enumerate(jax.tree.leaves(gradients))})

    for case in dict(MODES):
        params, of_blocks, alone, divided = losses(case, mesh)
        keep(f"{case}/alone", jax.jit(jax.grad(alone))(params, x))
        for name in (policy for model, policy in MODES if model == case):
            keep(f"{case}/{name}", jax.jit(jax.grad(rj.checkpoint_blocks(divided, {of_blocks: POLICIES[name]})))(params, x))
    keep("nnx/inside", jax.jit(inside("nnx", mesh))(CASES["nnx"]()[0], x))
    params, of_blocks, _, divided = losses("nnx", mesh)
    keep("nnx/eager", jax.grad(rj.checkpoint_blocks(divided, {of_blocks: "offload_inputs"}))(params, x))
    for within in (True, False):
        loss, params = constrained(mesh, within)
        arrays[f"eager/constraint {within}"] = refused(loss, params)
        keep(f"constraint {within}", jax.jit(jax.grad(loss))(params))
    np.savez(Path(path), **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
