"""The options of a `jit` around a function: which arguments it donates, and which are static; and the same `jit` again."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

JAX_JIT, NNX_JIT, EQUINOX_JIT = "jax.jit", "nnx.jit", "equinox.filter_jit"
_JAX_JIT, _NNX_JIT = type(jax.jit(lambda: None)), type(nnx.jit(lambda: None))


class Jit(NamedTuple):
    """The options of a `jit` around a function; positions are those of a call of the function.

    Attributes:
      donated, static: the positions of the donated and of the static arguments.
      kind: the function that returned the `jit`; empty if there is none.
      bound: how many arguments a method or a `functools.partial` has bound: the `jit` counts them, a call does not.
    """

    donated: tuple[int, ...] = ()
    static: tuple[int, ...] = ()
    kind: str = ""
    bound: int = 0


def is_jax_jit(function: Any) -> bool:
    """Whether `jax.jit` returned `function`."""
    return isinstance(function, _JAX_JIT)


def jit_of(function: Any, count: int = 0) -> Jit:
    """The options of the `jax.jit`, `nnx.jit` or `eqx.filter_jit` that returned `function`, which takes `count` arguments.

    `function` may also be a method of an instance, a `functools.partial`, or a wrapper (`functools.wraps`), of what such a
    `jit` returned.
    """
    jitted, bound = _unbound(inspect.unwrap(function, stop=lambda each: not _passes_arguments_on(each)))
    if _is_equinox(jitted):
        every = range(count + bound)
        places = (*(every[:1] if jitted.donate_first else ()), *(every[1:] if jitted.donate_rest else ()))
        return Jit(_after(bound, places), (), EQUINOX_JIT, bound)
    kind = NNX_JIT if isinstance(jitted, _NNX_JIT) else JAX_JIT
    if kind == NNX_JIT:  # it keeps JAX's function, whose arguments have the same places
        jitted = jitted.jitted_fn
    if not is_jax_jit(jitted):
        return Jit()
    donated, static = (_after(bound, getattr(jitted._jit_info, f"{what}_argnums")) for what in ("donate", "static"))
    return Jit(donated, static, kind, bound)


def jitted_like(function: Callable[..., Any], like: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    """`function` under a `jit` as that of `like`, with these compiler options; `function` itself if `like` has none."""
    jitted, bound = _unbound(like)
    if is_jax_jit(jitted):
        return jax.jit(function, **_options(jitted, bound), compiler_options={**compiler_options(jitted), **options})
    if isinstance(jitted, _NNX_JIT):
        given = _options(jitted.jitted_fn, bound)
        again = nnx.jit(function, **given | ({} if bound else _shardings_of_nnx(jitted)))
        if options := {**compiler_options(jitted), **options}:  # `nnx.jit` takes none
            inner = again.jitted_fn
            again.jitted_fn = jax.jit(inner.__wrapped__, **_options(inner), compiler_options=options)
        return again
    if _is_equinox(jitted):
        donate = {(True, True): "all", (False, True): "all-except-first"}.get((jitted.donate_first, jitted.donate_rest), "none")
        return sys.modules["equinox"].filter_jit(function, donate=donate, compiler_options=dict(options))
    return function


def compiler_options(function: Any) -> dict[str, Any]:
    """The compiler options of the `jax.jit` or `nnx.jit` that returned `function`."""
    jitted, _ = _unbound(function)
    jitted = jitted.jitted_fn if isinstance(jitted, _NNX_JIT) else jitted
    return dict(jitted._jit_info.compiler_options_kvs) if is_jax_jit(jitted) else {}


def without_compiler_options(function: Any) -> Any:
    """`function`, which then can be called under another `jit`: JAX refuses compiler options of an inner one."""
    if not compiler_options(function):
        return function
    if isinstance(function, _NNX_JIT):
        return nnx.jit(function.fun, **_options(function.jitted_fn) | _shardings_of_nnx(function))
    if is_jax_jit(function):
        return jax.jit(function.__wrapped__, **_options(function))
    jitted, _ = _unbound(function)
    if isinstance(function, types.MethodType):
        return types.MethodType(without_compiler_options(function.__func__), function.__self__)
    return functools.partial(without_compiler_options(jitted), *function.args, **function.keywords)


def _unbound(function: Any) -> tuple[Any, int]:
    """What a method or a `functools.partial` calls, and how many arguments it has bound by position."""
    if isinstance(function, types.MethodType):
        return function.__func__, 1
    return (function.func, len(function.args)) if isinstance(function, functools.partial) else (function, 0)


def _passes_arguments_on(function: Any) -> bool:
    """Whether a Python function that wraps another one takes `(*args, **kwargs)`, or parameters of the same names in order."""
    if not isinstance(function, types.FunctionType):
        return False
    own, wrapped = inspect.signature(function, follow_wrapped=False).parameters, inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in own.values()}
    return kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} or [*own] == [*wrapped]


def _after(bound: int, places: Any) -> tuple[int, ...]:
    return tuple(place - bound for place in places if place >= bound)


def _options(jitted: Any, bound: int = 0) -> dict[str, Any]:
    """The arguments of the `jax.jit` that returned `jitted`, except its compiler options, for the arguments after `bound`."""
    info = jitted._jit_info
    options: dict[str, Any] = {name: getattr(info, name) for name in ("keep_unused", "inline")}
    only_named = {name for name, each in info.fun_signature.parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY}
    for what in ("donate", "static"):
        names = getattr(info, f"{what}_argnames")
        options[f"{what}_argnums"] = _after(bound, getattr(info, f"{what}_argnums"))
        options[f"{what}_argnames"] = [name for name in names if name in only_named] if bound else names
    for name in ("in_shardings", "out_shardings"):
        leaves = [None if type(leaf).__name__ == "UnspecifiedValue" else leaf for leaf in getattr(info, f"{name}_leaves")]
        if any(leaf is not None for leaf in leaves):
            shardings = jax.tree.unflatten(getattr(info, f"{name}_treedef"), leaves)
            dynamic = len(set(range(bound)) - set(info.static_argnums))
            options[name] = shardings[dynamic:] if name == "in_shardings" and isinstance(shardings, tuple) else shardings
    return options


def _shardings_of_nnx(jitted: Any) -> dict[str, Any]:
    return {"in_shardings": jitted.in_shardings, "out_shardings": jitted.out_shardings}


def _is_equinox(function: Any) -> bool:
    return type(function).__module__.startswith("equinox") and hasattr(function, "donate_first")
