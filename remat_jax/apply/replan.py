"""`replan`, and the block `"checkpoints"`: another policy on the existing `jax.checkpoint` regions of a function."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.audit import Audit
from remat_jax.apply.region import RegionPolicy, run_jaxpr, traced
from remat_jax.core.marks import CHECKPOINTS
from remat_jax.core.rewrite import count_regions, leaving_blocks, rewrite
from remat_jax.core.walk import equations
from remat_jax.errors import ArgumentError, BlockError
from remat_jax.policy import as_policy

P = ParamSpec("P")
R = TypeVar("R")


def replan(fn: Callable[P, R], policy: Any) -> Callable[P, R]:
    """`fn` with `policy` on all its checkpoint regions, made by `nn.remat`, `nnx.remat` or `jax.checkpoint`.

    `fn` is traced when it is called: it must work on tracers in place of the arrays in its arguments. Other Python values in
    the arguments reach it unchanged. `fn` must be the function that is differentiated, and must not take the gradient itself.

    An operand of a region is a parameter if it is an argument of `fn` or a view of an argument, such as a row of a scanned
    stack. `@inputs` selects the other operands. Operands that all iterations of a scan read are never offloaded. A region
    inside another region keeps its own policy.

    Args:
      fn: the function, usually the loss; under `jit` or not.
      policy: a policy, its name or text; `"off"` removes the checkpoints.

    Raises:
      ArgumentError: `fn` is not callable.
      PolicyError: at once, if `policy` is no policy.
      BlockError: when called, if `fn` has no checkpoint region.
      NoEffectError: when called, if a selector matches no residual, or there is nothing to offload.
      UnsupportedError: when called, if `fn` takes the gradient itself.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w))(x))
    >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    >>> from remat_jax.cost.count import matmuls
    >>> matmuls(jax.value_and_grad(loss), w, x), matmuls(jax.value_and_grad(replan(loss, "dots")), w, x)
    (3, 2)
    """
    if not callable(fn):
        raise ArgumentError(f"fn={fn!r}: expected a function, usually the loss")
    checked = as_policy(policy)

    @functools.wraps(fn)
    def replanned(*args: P.args, **kwargs: P.kwargs) -> R:
        jaxpr, values, outputs_of = traced(fn, args, kwargs)
        # Blocks of an enclosing `checkpoint_blocks` keep their policy.
        with leaving_blocks() if scope.active() is not None else contextlib.nullcontext():
            if count_regions(jaxpr):
                audit = Audit()
                outputs = _under(checked, audit, jaxpr, values)
                audit.check()
                return cast(R, outputs_of(outputs))
        # An enclosing `checkpoint_blocks` that put a policy on blocks of `fn` may have replaced all checkpoints of `fn`. Then a
        # function without a region is no error.
        if any(compat.replaces_checkpoints(eqn) is not None for eqn in equations(jaxpr)):
            return cast(R, outputs_of(compat.jaxpr_function(jaxpr)(*values)))
        raise BlockError(
            f"fn={getattr(fn, '__name__', fn)}: it has no jax.checkpoint region to replan. For a model without "
            "checkpoints, use checkpoint_blocks(fn, {BlockClass: policy})."
        )

    _replanned[replanned] = fn, checked
    return replanned


def run_regions(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn(*args, **kwargs)`. If there is an active policy for `CHECKPOINTS`, it applies to the regions of `fn`."""
    policies = scope.active()
    policy = None if policies is None else policies.find_function(CHECKPOINTS)
    if policy is None:
        return fn(*args, **kwargs)
    record = scope.record()
    jaxpr, values, outputs_of = traced(fn, args, kwargs)
    with leaving_blocks():
        count = count_regions(jaxpr)
        if count:
            record.reached.add(CHECKPOINTS)
            record.replaced += count
        return outputs_of(_under(policy, record.audit, jaxpr, values))


def _under(policy: RegionPolicy, audit: Audit, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """The closed `jaxpr` on `values`, with its regions under `policy`."""

    def run(body: Any, path: str, inputs: list[bool], values: list[Any], looped: bool) -> list[Any]:
        return run_jaxpr(body, policy, path, inputs, values, audit, looped=looped or None)

    return rewrite(jaxpr, values, run)


# For each function that `replan` returned: the function and the policy that `replan` was given.
_replanned: weakref.WeakKeyDictionary[Callable[..., Any], tuple[Callable[..., Any], Any]] = weakref.WeakKeyDictionary()


def replanned_from(fn: Callable[..., Any]) -> tuple[Callable[..., Any], Any] | None:
    """The function and the policy that `replan` was given, if it returned `fn`; else None.

    >>> made = replan(abs, "dots")
    >>> replanned_from(made) == (abs, as_policy("dots")), replanned_from(abs)
    (True, None)
    """
    try:
        return _replanned.get(fn)
    except TypeError:  # a callable that cannot be hashed or weakly referenced
        return None
