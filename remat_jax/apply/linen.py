"""Blocks that are Linen modules: their calls are intercepted, lifted, and run under their policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen.transforms import lift_direct_transform

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.audit import Audit
from remat_jax.apply.region import run_block
from remat_jax.core.marks import Marked
from remat_jax.policy import JaxPolicy, Policy

# The ids of the modules that are being traced under their policy.
_inside: ContextVar[tuple[int, ...]] = ContextVar("inside", default=())
# The globs whose blocks are being traced: a glob selects the outermost modules that it matches.
_globs: ContextVar[tuple[str, ...]] = ContextVar("globs", default=())


def call(
    module: nn.Module,
    method: str,
    policy: Policy | JaxPolicy | Marked,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    audit: Audit,
    *,
    intercepted: bool = False,
) -> Any:
    """`getattr(module, method)(*args, **kwargs)` of a bound module as one checkpointed block.

    Unlike with `nn.remat` of a class, parameters keep their names. Variables and RNG streams are lifted: dropout draws the same
    numbers as without the checkpoint, and mutable collections are updated.

    Args:
      intercepted: whether Flax is calling the method already, and captures its outputs.
    """

    def body(clone: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with entered(clone), compat.not_captured(clone, method) if intercepted else nullcontext():
            return getattr(type(clone), method)(clone, *args, **kwargs)

    return _lift(body, module, policy, "/".join(module.path) or type(module).__name__, args, kwargs, audit)


def call_together(
    modules: Sequence[nn.Module], run: Callable[..., Any], policy: Policy | JaxPolicy | Marked, x: Any, audit: Audit
) -> Any:
    """`run(modules, x)` of several bound modules as one checkpointed block."""

    def segment(first: nn.Module, others: tuple[nn.Module, ...], x: Any) -> Any:
        return run((first, *others), x)

    path = "/".join(modules[0].path) or type(modules[0]).__name__
    return _lift(segment, modules[0], policy, path, (tuple(modules[1:]), x), {}, audit)


def _lift(
    body: Callable[..., Any],
    module: nn.Module,
    policy: Policy | JaxPolicy | Marked,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    audit: Audit,
) -> Any:
    def transform(function: Callable[..., Any], scopes: Any, *args: Any, **kwargs: Any) -> Any:
        return _lifted(function, policy, path, audit)(scopes, *args, **kwargs)

    return lift_direct_transform(transform, (body,), module, *args, **kwargs)


def _lifted(function: Callable[..., Any], policy: Policy | JaxPolicy | Marked, path: str, audit: Audit) -> Callable[..., Any]:
    def inner(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        def pure(groups: Any, *args: Any, **kwargs: Any) -> Any:
            lifted_scope = scope_fn(*groups)
            outputs = function(lifted_scope, *args, **kwargs)
            return outputs, repack(lifted_scope)

        made = bool(jax.tree.leaves(variables))
        return run_block(pure, policy, path, (variables, rngs), args, kwargs, audit, has_parameters=made)

    return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)


def is_inside(module: nn.Module) -> bool:
    """Whether `module` is being traced under its policy."""
    return id(module) in _inside.get()


@contextmanager
def entered(module: nn.Module) -> Iterator[None]:
    """Marks `module` as running inside its checkpoint, so that its call is not checkpointed again."""
    token = _inside.set((*_inside.get(), id(module)))
    try:
        yield
    finally:
        _inside.reset(token)


def interceptor(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """A method interceptor that runs every block of the active policies as a checkpointed block."""
    policies, module = scope.active(), context.module
    if policies is None or context.method_name != "__call__":
        return next_fun(*args, **kwargs)
    record = scope.record()
    path = "/".join(module.path)
    record.modules.setdefault(path, type(module).__name__)
    entry = policies.find(type(module), path, _globs.get())
    if entry is None or is_inside(module):
        return next_fun(*args, **kwargs)
    block, policy = entry
    record.reached.add(block)
    token = _globs.set((*_globs.get(), block) if isinstance(block, str) else _globs.get())
    try:
        with compat.blocks_around_which(checkpoints_stay=policies.keeps):
            return call(module, "__call__", policy, args, kwargs, record.audit, intercepted=True)
    finally:
        _globs.reset(token)


@contextmanager
def intercepting() -> Iterator[None]:
    """Intercept the calls of all Linen modules."""
    with nn.intercept_methods(interceptor):
        yield
