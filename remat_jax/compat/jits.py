"""The options of a `jit` around a function: which arguments it donates, and which are static; and the same `jit` again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

_JAX_JIT, _NNX_JIT = type(jax.jit(lambda: None)), type(nnx.jit(lambda: None))


class Jit(NamedTuple):
    """The positions of the arguments that a `jit` donates, and of those that are static."""

    donated: tuple[int, ...] = ()
    static: tuple[int, ...] = ()


def is_jax_jit(function: Any) -> bool:
    """Whether `jax.jit` returned `function`."""
    return isinstance(function, _JAX_JIT)


def jit_of(function: Any, count: int = 0) -> Jit:
    """The options of the `jax.jit`, `nnx.jit` or `eqx.filter_jit` that returned `function`, which takes `count` arguments."""
    if is_jax_jit(function):
        return Jit(tuple(function._jit_info.donate_argnums), tuple(function._jit_info.static_argnums))
    if isinstance(function, _NNX_JIT):  # it keeps JAX's function, whose arguments have the same places
        return jit_of(function.jitted_fn)
    first, rest = (_is_equinox(function) and getattr(function, name) for name in ("donate_first", "donate_rest"))
    return Jit((*range(min(1, count) if first else 0), *range(1, count if rest else 1)))


def jitted_like(function: Callable[..., Any], like: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    """`function` under a `jit` as that of `like`, with these compiler options; `function` itself if `like` has none."""
    if is_jax_jit(like):
        return jax.jit(function, **_options(like), compiler_options={**dict(like._jit_info.compiler_options_kvs), **options})
    if isinstance(like, _NNX_JIT):
        given = _options(like.jitted_fn) | {"in_shardings": like.in_shardings, "out_shardings": like.out_shardings}
        again = nnx.jit(function, **given)
        if options:  # `nnx.jit` takes none
            jitted = again.jitted_fn
            again.jitted_fn = jax.jit(jitted.__wrapped__, **_options(jitted), compiler_options=dict(options))
        return again
    if _is_equinox(like):
        donate = {(True, True): "all", (False, True): "all-except-first"}.get((like.donate_first, like.donate_rest), "none")
        return sys.modules["equinox"].filter_jit(function, donate=donate, compiler_options=dict(options))
    return function


def _options(jitted: Any) -> dict[str, Any]:
    """The arguments of the `jax.jit` that returned `jitted`, except its compiler options."""
    info = jitted._jit_info
    names = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames", "keep_unused", "inline")
    options = {name: getattr(info, name) for name in names}
    for name in ("in_shardings", "out_shardings"):
        leaves = [None if type(leaf).__name__ == "UnspecifiedValue" else leaf for leaf in getattr(info, f"{name}_leaves")]
        if any(leaf is not None for leaf in leaves):
            options[name] = jax.tree.unflatten(getattr(info, f"{name}_treedef"), leaves)
    return options


def _is_equinox(function: Any) -> bool:
    return type(function).__module__.startswith("equinox") and hasattr(function, "donate_first")
