"""Running the existing checkpoint regions of a function under another policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.audit import Audit
from remat_jax.apply.region import bind_block
from remat_jax.core import plan_block
from remat_jax.core.marks import CHECKPOINTS, Mark, Marked, bind_mark
from remat_jax.core.rewrite import count_regions, leaving_blocks, rewrite
from remat_jax.core.walk import of_arrays
from remat_jax.policy import is_off

RunJaxpr = Callable[[Any, list[Any]], list[Any]]


def retraced(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: RunJaxpr) -> Any:
    """`fn(*args, **kwargs)`, traced and evaluated by `run(jaxpr, values)`. Values that are no arrays reach `fn` unchanged."""
    flat, values = of_arrays(fn, args, kwargs)
    jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*values)
    return jax.tree.unflatten(jax.tree.structure(shape), run(jaxpr, values))


def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn(*args, **kwargs)`. If the active policies have one for `CHECKPOINTS`, it applies to the regions of `fn`."""
    policies = scope.active()
    policy = None if policies is None else policies.find_function(CHECKPOINTS)
    if policy is None:
        return fn(*args, **kwargs)
    record = scope.record()

    def evaluate(jaxpr: Any, values: list[Any]) -> list[Any]:
        with leaving_blocks():
            count = count_regions(jaxpr)
            if count:
                record.reached.add(CHECKPOINTS)
                record.replaced += count
            return rewrite(jaxpr, values, functools.partial(run_region, policy, record.audit))

    return retraced(fn, args, kwargs, evaluate)


def run_region(
    policy: Any, audit: Audit, body: Any, path: str, inputs: list[bool], values: list[Any], looped: bool
) -> list[Any]:
    """Evaluate the region with the closed jaxpr `body` under another policy; `looped` says whether it is in a loop."""
    if is_off(policy):
        return list(compat.jaxpr_function(body)(*values))
    if isinstance(policy, Marked):
        return bind_mark(Mark(body, policy, path, tuple(inputs), True), values)
    block = plan_block(body, policy, path, inputs)
    audit.saw(path, block)
    in_loop = True if looped else None
    return bind_block(block, values, looped=in_loop, apart=in_loop)
