"""Blocks that are Linen modules: their calls are intercepted, lifted, and run under their policy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen.transforms import lift_direct_transform

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.binding import RegionPolicy
from remat_jax.apply.calls import Call, entered, run_module
from remat_jax.apply.methods import CALL, block_path, first_name
from remat_jax.apply.region import run_block


def call(
    module: nn.Module,
    original: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: RegionPolicy,
    audit: Audit,
    *,
    method: str = CALL,
    intercepted: str = "",
) -> Any:
    """`original(module, *args, **kwargs)` of a bound module, a call of `method`, as one checkpointed block.

    Parameters keep their names, unlike under `nn.remat` of a class. Variables and RNG streams are lifted: dropout draws the
    same numbers as without the checkpoint, and mutable collections are updated.

    Args:
      intercepted: Flax's name of the method, if Flax has intercepted this call and captures its outputs.
    """
    original, path = compat.linen_method(original), block_path(_path(module), method)

    def body(clone: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with entered(clone, method), compat.not_captured(clone, intercepted) if intercepted else nullcontext():
            return original(clone, *args, **kwargs)

    return _lift(body, module, args, kwargs, functools.partial(run_block, path=path, policy=policy, audit=audit))


def call_together(modules: Sequence[nn.Module], run: Callable[..., Any], policy: RegionPolicy, x: Any, audit: Audit) -> Any:
    """`run(modules, x)` of several bound modules as one checkpointed block."""

    def segment(first: nn.Module, others: tuple[nn.Module, ...], x: Any) -> Any:
        return run((first, *others), x)

    run_segment = functools.partial(run_block, path=_path(modules[0]), policy=policy, audit=audit)
    return _lift(segment, modules[0], (tuple(modules[1:]), x), {}, run_segment)


def _path(module: nn.Module) -> str:
    return "/".join(module.path) or type(module).__name__


def _lift(body: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Call) -> Any:
    """`body(module, *args, **kwargs)`; `run`, `run_block` with the block's policy, runs it as a function of its variables."""

    def transform(function: Callable[..., Any], scopes: Any, /, *args: Any, **kwargs: Any) -> Any:
        def inner(scope_fn: Call, repack: Call, variables: Any, rngs: Any, /, *args: Any, **kwargs: Any) -> Any:
            def pure(groups: Any, /, *args: Any, **kwargs: Any) -> Any:
                lifted_scope = scope_fn(*groups)
                outputs = function(lifted_scope, *args, **kwargs)
                return outputs, repack(lifted_scope)

            has_parameters = bool(jax.tree.leaves(variables))
            return run(pure, parameters=(variables, rngs), args=args, kwargs=kwargs, has_parameters=has_parameters)

        return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)(scopes, *args, **kwargs)

    return lift_direct_transform(transform, (body,), module, *args, **kwargs)


def _interceptor(next_fun: Call, args: tuple[Any, ...], kwargs: dict[str, Any], context: nn.module.InterceptorContext) -> Any:
    # Flax has the name of the function, which the class may call otherwise (`__call__ = forward`).
    module, method = context.module, first_name(type(context.module), context.method_name, context.orig_method.func)
    if module.scope is None:
        return next_fun(*args, **kwargs)
    # Flax intercepts a decorated method (`@nn.remat`, `@nn.scan`) inside its decorators, so the block is inside them too.
    original = context.orig_method.func
    as_block = functools.partial(call, module, original, args, kwargs, method=method, intercepted=context.method_name)
    return run_module(module, "/".join(module.path), lambda: next_fun(*args, **kwargs), as_block, method)


def intercepting() -> AbstractContextManager[None]:
    """Inside this context every Linen module that is a block of the active policies runs as a checkpointed block."""
    context: AbstractContextManager[None] = nn.intercept_methods(_interceptor)
    return context
