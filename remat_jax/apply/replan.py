"""`replan`, and the blocks `"checkpoints"` and `"scans"`: a policy on regions or scans that a function already has."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, ParamSpec, TypeVar, cast

from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.audit import Audit
from remat_jax.apply.binding import RegionPolicy, run_jaxpr
from remat_jax.apply.own_checkpoints import in_place
from remat_jax.apply.region import traced
from remat_jax.core.marks import CHECKPOINTS, PARTS, SCANS, Block
from remat_jax.core.rewrite import count_regions, leaving_blocks, rewrite
from remat_jax.core.walk import equations, retrace
from remat_jax.errors import ArgumentError, BlockError
from remat_jax.policy import JaxPolicy, Policy, as_policy

P = ParamSpec("P")
R = TypeVar("R")


def replan(fn: Callable[P, R], policy: Policy | str | JaxPolicy) -> Callable[P, R]:
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


def with_marked_parts(jaxpr: ClosedJaxpr, blocks: Set[Block], record: scope.Record) -> ClosedJaxpr:
    """The closed `jaxpr` with marks for its checkpoint regions and scans, as far as they are among the `blocks`."""
    policies = scope.active()
    if compat.in_solver():  # a linear solver may differentiate its linear function, which is no part of the loss then
        return jaxpr
    for part in sorted(PARTS & blocks):
        policy = None if policies is None else policies.find_function(part)
        with leaving_blocks():
            count = count_regions(jaxpr, part)
            if count and policy is not None:
                record.reached.add(part)
                record.replaced += count if part == CHECKPOINTS else 0
                under = functools.partial(_under, policy, record.audit, jaxpr, part=part)
                jaxpr = retrace(jaxpr, lambda *values, under=under: under(values))
    return jaxpr


def _under(policy: RegionPolicy, audit: Audit, jaxpr: ClosedJaxpr, values: Sequence[Any], part: str = CHECKPOINTS) -> list[Any]:
    """The closed `jaxpr` on `values`, with its regions under `policy`."""
    run = functools.partial(in_place if part == SCANS else run_jaxpr, policy=policy, audit=audit)
    return rewrite(jaxpr, values, run, part)


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
