"""Random stacks: a program as a layer, with the policy applied in every possible way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import remat_jax as rj
from tests.fault.ops import WIDTH
from tests.fault.programs import SOLVERS, Program, run

Loss = Callable[..., Any]

BY_CLASS = ("linen", "linen_remat", "linen_jit", "nnx", "nnx_state", "inner", "inner_jit")
"""Ways in which `checkpoint_blocks` finds the layers."""
WAYS = (*BY_CLASS, "remat", "forward", "sequential", "replan", "by_hand")
OUTER = ("full", "full", "off", "everything", "offload_inputs", "save: @primitive:tanh", "offload: *")
"""Policies of a module around a block with its own policy (`inner`, and `inner_jit`, where both calls are decorated)."""

LOOPS = ("none", "scan", "reverse", "unroll", "nested", "vmap", "linear solve", "root")


@dataclass(frozen=True)
class Stack:
    """Layers of one program.

    Attributes:
      way: how a policy is put on them.
      loop: `linear solve` and `root`: each inside one of JAX's solvers, which differentiate them by their own rules. Otherwise
        whether they are written one by one, or in a scan: forward, in reverse, two a round, or in a scan inside a scan;
        or written one by one, each under a `vmap`, which does not map a key that comes out.
      outer: the policy of the module around each, of the ways `inner`.
    """

    program: Program
    layers: int
    way: str
    loop: str
    outer: str = "full"

    def plain(self) -> Loss:
        """The loss without policies: `(params, x, ids, keys)` → a scalar, and the outputs that are not differentiated."""
        if self.way in BY_CLASS:
            return self.loss_of(_MODULES[self.way](self.program))
        return self.loss_of(self._layer)

    def under(self, policy: Any) -> Loss:
        """The same with `policy` on every layer."""
        if self.way in _OUTER:
            return rj.checkpoint_blocks(self.plain(), {_OUTER[self.way]: self.outer, _BLOCKS[self.way]: policy})
        if self.way in BY_CLASS:
            return rj.checkpoint_blocks(self.plain(), {_BLOCKS[self.way]: policy})
        if self.way == "replan":
            return rj.replan(self.loss_of(jax.checkpoint(self._layer)), policy)
        if self.way == "sequential":
            return self.loss_of(functools.partial(self._sequential, policy))
        layer = {
            "remat": lambda: rj.remat(self._layer, policy),
            "by_hand": lambda: jax.checkpoint(self._layer, policy=rj.jax_policy(policy)),
            "forward": lambda: _forward(self._layer, policy == "offload_inputs"),
        }[self.way]()
        return self.loss_of(layer)

    def _layer(self, weights: Any, x: Any, ids: Any, key: Any) -> Any:
        return run(self.program, weights, x, jnp.cos(x), ids, key)

    def _sequential(self, policy: Any, weights: Any, x: Any, ids: Any, key: Any) -> Any:
        # The last segment is not checkpointed.
        pieces = [lambda x: self._layer(weights, x, ids, key), lambda results: results]
        return rj.checkpoint_sequential(pieces, 2, x, policy=policy)

    def loss_of(self, layer: Callable[..., Any]) -> Loss:
        """The loss with `layer` instead of its own layer."""

        def loss(params: Any, x: Any, ids: Any, keys: Any) -> Any:
            x, given = self._through(layer, params, x, ids, keys)
            total = jnp.sum(jnp.sin(x))
            for leaf in jax.tree.leaves(given):
                if jnp.issubdtype(leaf.dtype, jnp.inexact):
                    total = total + jnp.sum(jnp.sin(leaf).real).astype(total.dtype) / 3
            return total, given

        return loss

    def _through(self, layer: Callable[..., Any], params: Any, x: Any, ids: Any, keys: Any) -> Any:
        def apply_layer(x: Any, row: Any) -> Any:
            weights, key = row
            return layer(weights, x, ids, key)

        rows = (params, keys)
        if self.loop in SOLVERS:
            for index in range(self.layers):
                weights, key = jax.tree.map(lambda leaf, index=index: leaf[index], rows)
                x = SOLVERS[self.loop](lambda v, weights=weights, key=key: layer(weights, v, ids, key)[0], x)
            return x, []
        if self.loop == "none":
            outputs = []
            for index in range(self.layers):
                x, given = apply_layer(x, jax.tree.map(lambda leaf, index=index: leaf[index], rows))
                outputs.append(given)
            return x, outputs
        if self.loop == "vmap":
            outputs, pair = [], jnp.stack([x, jnp.cos(x)])
            mapped = {name: None if name == "k" else 0 for name in self.program.outputs}
            mapped |= {"mean": 0} if self.way == "nnx_state" else {}
            for index in range(self.layers):
                pair, given = jax.vmap(apply_layer, in_axes=(0, None), out_axes=(0, mapped))(
                    pair, jax.tree.map(lambda leaf, index=index: leaf[index], rows)
                )
                outputs.append(given)
            return pair, outputs
        if self.loop == "nested":
            return lax.scan(lambda x, row: lax.scan(apply_layer, x, row), x, jax.tree.map(lambda leaf: leaf[None], rows))
        return lax.scan(apply_layer, x, rows, reverse=self.loop == "reverse", unroll=2 if self.loop == "unroll" else 1)


def _forward(layer: Callable[..., Any], offload: bool) -> Callable[..., Any]:
    def run_layer(weights: Any, x: Any, ids: Any, key: Any) -> Any:
        return rj.gradient_checkpoint_forward(layer, True, offload, weights, x, ids=ids, key=key)

    return run_layer


# --- as modules -------------------------------------------------------------------------------------------------------


def _linen_class(name: str, decorate: Callable[..., Any] = lambda call: call) -> type[nn.Module]:
    """Modules that hold a program with its weights as parameters, with a decorator on `__call__`."""

    @decorate
    @nn.compact
    def __call__(self: Any, x: Any, ids: Any, key: Any) -> Any:
        weights = {name: self.variable("params", name, jnp.zeros, ()).value for name in "wz"}
        return run(self.program, weights, x, jnp.cos(x), ids, key)

    return type(name, (nn.Module,), {"__call__": __call__, "__module__": __name__, "__annotations__": {"program": Program}})


def _outer_class(name: str, block: Any, decorate: Callable[..., Any] = lambda call: call) -> type[nn.Module]:
    """Modules around such a block."""

    @decorate
    @nn.compact
    def __call__(self: Any, x: Any, ids: Any, key: Any) -> Any:
        x, given = block(self.program, name="inside")(jnp.sin(x), ids, key)
        return jnp.tanh(x) + x, given

    return type(name, (nn.Module,), {"__call__": __call__, "__module__": __name__, "__annotations__": {"program": Program}})


LinenBlock, RematBlock, JitBlock = (
    _linen_class(name, *decorator) for name, *decorator in (("LinenBlock",), ("RematBlock", nn.remat), ("JitBlock", nn.jit))
)
_OUTER = {"inner": _outer_class("Outer", LinenBlock), "inner_jit": _outer_class("JitOuter", RematBlock, nn.jit)}


def _linen(block: Any) -> Callable[..., Any]:
    return lambda program: lambda weights, x, ids, key: block(program).apply({"params": weights}, x, ids, key)


def _inner(outer: Any) -> Callable[..., Any]:
    return lambda program: (
        lambda weights, x, ids, key: outer(program).apply(
            {"params": {"inside": {name: weights[name] for name in "wz"}}}, x, ids, key
        )
    )


class NnxBlock(nnx.Module):
    """A program with its weights as parameters."""

    def __init__(self, program: Program, weights: Any) -> None:
        self.program, self.w, self.z = program, nnx.Param(weights["w"]), nnx.Param(weights["z"])

    def __call__(self, x: Any, ids: Any, key: Any) -> Any:
        return run(self.program, {"w": self.w[...], "z": self.z[...]}, x, jnp.cos(x), ids, key)


def _nnx(program: Program) -> Callable[..., Any]:
    return lambda weights, x, ids, key: NnxBlock(program, weights)(x, ids, key)


class NnxStateBlock(nnx.Module):
    """The same with a mean that each call updates."""

    def __init__(self, program: Program, weights: Any) -> None:
        self.inner = NnxBlock(program, weights)
        self.mean = nnx.BatchStat(jnp.ones(WIDTH))

    def __call__(self, x: Any, ids: Any, key: Any) -> Any:
        x, given = self.inner(x, ids, key)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        return x - self.mean[...], given


def _nnx_state(program: Program) -> Callable[..., Any]:
    def layer(weights: Any, x: Any, ids: Any, key: Any) -> Any:
        block = NnxStateBlock(program, weights)
        x, given = block(x, ids, key)
        return x, {**given, "mean": block.mean[...]}

    return layer


_MODULES = {
    **{"linen": _linen(LinenBlock), "linen_remat": _linen(RematBlock), "linen_jit": _linen(JitBlock)},
    **{way: _inner(outer) for way, outer in _OUTER.items()},
    **{"nnx": _nnx, "nnx_state": _nnx_state},
}
_BLOCKS: dict[str, type] = {
    **{"linen": LinenBlock, "linen_remat": RematBlock, "linen_jit": JitBlock, "inner": LinenBlock, "inner_jit": RematBlock},
    **{"nnx": NnxBlock, "nnx_state": NnxStateBlock},
}
