"""Tiny models and comparisons that several test files share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from remat_jax import compat
from remat_jax.core.origins import is_on_host
from remat_jax.core.walk import inner_jaxprs


class Linear(nn.Module):
    """`nn.Dense` without a bias, in the dtype of its input: quicker to trace."""

    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x @ self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.width), x.dtype)


class Mlp(nn.Module):
    """Two matmuls; its modules are named by Flax."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + Linear(x.shape[-1])(jnp.tanh(Linear(3)(x)))


class First(Mlp):
    """A class of its own."""


class Second(Mlp):
    """Another one."""


class Both(nn.Module):
    """A block with a block of each of two classes."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Second(name="second")(First(name="first")(x))


class Attention(nn.Module):
    """Six matmuls, two of them with batch dimensions."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        q, k, v = (Linear(4, name=name)(x) for name in "qkv")
        scores = jnp.exp(q @ jnp.swapaxes(k, -1, -2))
        return x + Linear(4, name="out")(scores / scores.sum(-1, keepdims=True) @ v)


def in_a_scan(block: nn.Module, x: Any, length: int) -> Any:
    """`length` blocks with parameters and random numbers of their own."""
    split = {"params": True, "dropout": True}
    scan = nn.scan(lambda block, x, _: (block(x), None), variable_axes={"params": 0}, split_rngs=split, length=length)
    return scan(block, x, None)[0]


class Stack(nn.Module):
    """`layers` blocks, unrolled or scanned."""

    block: Any = Mlp
    layers: int = 2
    scanned: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.scanned:
            return in_a_scan(self.block(name="layers"), x, self.layers)
        for index in range(self.layers):
            x = self.block(name=f"layer_{index}")(x)
        return x


class NnxMlp(nnx.Module):
    """A residual layer of two products, in the active float type."""

    def __init__(self, rngs: nnx.Rngs, width: int = 4, hidden: int = 3) -> None:
        dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
        self.up = nnx.Linear(width, hidden, rngs=rngs, param_dtype=dtype)
        self.down = nnx.Linear(hidden, width, rngs=rngs, param_dtype=dtype)

    def __call__(self, x: Any) -> Any:
        return x + self.down(jnp.tanh(self.up(x)))


class NnxCounted(NnxMlp):
    """It counts its calls, and drops a share of its numbers."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        super().__init__(rngs)
        self.calls, self.dropout = nnx.BatchStat(jnp.zeros(())), nnx.Dropout(rate, rngs=rngs if rate else None)

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.dropout(super().__call__(x))


class NnxStack(nnx.Module):
    """Layers in a list."""

    def __init__(self, layers: int = 2) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([NnxMlp(rngs) for _ in range(layers)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def make_loss(block: Any = Mlp, *, scanned: bool = False, layers: int = 2) -> tuple[Callable[..., Any], Any, Any]:
    """`loss(params, x)` of a stack, its parameters and an input, in the active float type."""
    model = Stack(block, layers, scanned)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float64 if jax.config.jax_enable_x64 else jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) / 2, leaf.dtype), shapes)
    return (lambda params, x: jnp.sum(jnp.sin(model.apply(params, x)))), params, x


def values(*shape: int, seed: int = 0) -> Any:
    """Random numbers in the active float type."""
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 2, dtype)


def block_by_hand(kernel: Any, x: Any) -> Any:
    """An `Mlp` with this kernel and its transpose, as a function."""
    return Mlp().apply({"params": {"Linear_0": {"kernel": kernel.T}, "Linear_1": {"kernel": kernel}}}, x)


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Assert that every array of `actual` equals that of `expected`, norm-wise relative to the largest norm."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(expected)]
    scale = max((float(np.linalg.norm(leaf.ravel())) for leaf in wanted), default=0.0)
    assert scale > 0, "nothing to compare with"
    for got, want in zip(jax.tree.leaves(actual), wanted, strict=True):
        got = np.asarray(got)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert np.linalg.norm((got - want).ravel()) <= tolerance * scale


def assert_bit_equal(actual: Any, expected: Any) -> None:
    """Assert that every array of `actual` has the bits of that of `expected`."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want), strict=True)


def equations(fn: Callable[..., Any], *args: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """Every equation of the traced `fn`, at any depth, with the primitives around it; without dead code."""

    def walk(jaxpr: Any, around: tuple[str, ...]) -> list[tuple[Any, tuple[str, ...]]]:
        pairs = []
        for eqn in jaxpr.eqns:
            pairs.append((eqn, around))
            for value in inner_jaxprs(eqn).values():
                for inner in value if isinstance(value, tuple) else (value,):
                    pairs += walk(compat.closed(inner).jaxpr, (*around, eqn.primitive.name))
        return pairs

    return walk(compat.dce(jax.make_jaxpr(fn)(*args)).jaxpr, ())


def times(primitive: str, fn: Callable[..., Any], *args: Any) -> int:
    """The number of equations of `primitive` in the traced `fn`; a scan's body counts once."""
    return sum(eqn.primitive.name == primitive for eqn, _ in equations(fn, *args))


def to_host(fn: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """The shapes of the arrays that the traced `fn` sends to host memory."""
    moved = [eqn.outvars[0] for eqn, _ in equations(fn, *args) if eqn.primitive.name == "device_put"]
    return sorted(var.aval.shape for var in moved if is_on_host(var))


def from_host(fn: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """The shapes of the arrays that the traced `fn` fetches from host memory."""
    moved = [eqn.outvars[0] for eqn, _ in equations(fn, *args) if eqn.primitive.name == "device_put"]
    return sorted(var.aval.shape for var in moved if not is_on_host(var))


def offloading(*names: str) -> Any:
    """A policy of JAX that offloads the arrays with these names."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=names, offload_src="device", offload_dst="pinned_host"
    )
