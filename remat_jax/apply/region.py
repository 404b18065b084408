"""Runs a call as one block under a policy: the call is traced, and `own_checkpoints` and `binding` evaluate the jaxpr."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax.errors import TraceContextError
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.binding import RegionPolicy
from remat_jax.apply.nnx_state import as_pure_function, hidden_objects, is_node, nodes_in, refusing_hidden_writes
from remat_jax.apply.own_checkpoints import in_place
from remat_jax.core.tied_chain import unlinked
from remat_jax.core.walk import of_arrays
from remat_jax.errors import UnsupportedError
from remat_jax.policy import is_off


def run_block(
    function: Callable[..., Any],
    path: str,
    parameters: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    policy: RegionPolicy,
    audit: Audit,
    *,
    has_parameters: bool = True,
) -> Any:
    """`function(parameters, *args, **kwargs)` as one checkpointed block.

    Arrays anywhere in `args` and `kwargs` are inputs of the block. The policy's rules for inputs do not apply to arrays in
    `parameters`, to arrays in NNX objects, nor to arrays that the function closes over.

    Args:
      path: the block's module path, the prefix of its residuals' names.
      audit: records what the policy's selectors matched.
      has_parameters: False while a model is initialised. The audit then assumes that each selector that matches an array has an
        effect, because without parameters the backward pass reads fewer residuals.
    """
    if is_off(policy):
        return function(parameters, *args, **kwargs)
    run = functools.partial(in_place, path=path, policy=policy, audit=audit, has_parameters=has_parameters)
    transform = haiku_transform()
    if transform is not None:
        if transform.running_init():  # the parameters do not exist yet
            return function(parameters, *args, **kwargs)
        return _in_haiku(transform.remat, function, (parameters, *args), kwargs, run)
    if nodes_in((parameters, args, kwargs)):
        function = refusing_hidden_writes(function, f"block {path or 'function'!r}")
    try:
        with unlinked():
            jaxpr, values, outputs_of = traced(function, (parameters, *args), kwargs)
    except TraceContextError as error:
        hidden = hidden_objects((parameters, *args), kwargs)
        raise UnsupportedError(
            f"block {path or 'function'!r} writes to an NNX object that is neither the block nor among its arguments"
            f"{f' (perhaps {hidden})' if hidden else ''}: {error}. Values that are written while tracing cannot leave the "
            "trace. Make the object an attribute of the block's module, or an argument of the block."
        ) from error
    # Arrays and tracers that the function closes over become arguments of the block. Otherwise JAX could not differentiate it.
    jaxpr, consts = compat.hoist_consts(jaxpr)
    values = [*consts, *values]
    others = jax.tree.leaves((tuple(args), kwargs), is_leaf=is_node)
    size = len(values) - sum(compat.is_operand(leaf) and not is_node(leaf) for leaf in others)
    jaxpr, values = _from_parameters(jaxpr, values, size)
    is_input = [place >= size for place in range(len(jaxpr.in_avals))]
    return outputs_of(run(jaxpr, inputs=is_input, values=values))


def _from_parameters(jaxpr: ClosedJaxpr, values: Sequence[Any], size: int) -> tuple[ClosedJaxpr, list[Any]]:
    """The closed `jaxpr` as a function of the arrays from which `values` were made, and these arrays.

    A checkpoint keeps its inputs. If an input is a named copy of an array, or a view of a parameter (one of the first `size`
    values) that the model's own checkpoint would recompute, both the array and its copy would be kept in every layer.
    """
    views = [compat.view(value) if place < size else (compat.unnamed(value), []) for place, value in enumerate(values)]
    arrays = [array for array, _ in views]
    if not any(eqns for _, eqns in views):
        return jaxpr, arrays

    def of_arrays(*arrays: Any) -> list[Any]:
        made = list(arrays)
        for place, (_, eqns) in enumerate(views):
            for eqn in eqns:
                (made[place],) = compat.bind(eqn, [made[place]])
        return list(compat.jaxpr_function(jaxpr)(*made))

    with unlinked():
        return jax.make_jaxpr(of_arrays)(*arrays), arrays


def haiku_transform() -> Any | None:
    """The module `haiku` if a function that it transforms is running, else None. Haiku is never imported here."""
    haiku = sys.modules.get("haiku")
    try:
        if haiku is None or not hasattr(haiku, "remat"):
            return None
        haiku.running_init()
    except ValueError:  # no transform is running
        return None
    return haiku


def _in_haiku(
    remat: Callable[..., Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[..., list[Any]],
) -> Any:
    """`function(*args, **kwargs)` as a block in a Haiku transform. `run` is `in_place` with the block's path and policy.

    `hk.remat` makes the parameters, state and random keys of the transform inputs and outputs of a checkpoint region, of which
    the block is the body.
    """
    of_values, values, outputs_of = _arrays_only(function, args, kwargs)
    inputs = jax.tree.leaves((args[1:], kwargs))

    def body(*values: Any) -> list[Any]:
        with compat.region_replaced_by(None), unlinked():
            return of_values(*values)

    def as_block(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        jaxpr, consts = compat.hoist_consts(jaxpr)
        is_input = [any(operand is value for value in inputs) for operand in operands]
        return run(jaxpr, inputs=[False] * len(consts) + is_input, values=[*consts, *operands])

    with compat.established_forms(), compat.region_replaced_by(as_block):
        return outputs_of(remat(body)(*values))


def traced(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ClosedJaxpr, list[Any], Callable[[Sequence[Any]], Any]]:
    """Trace `function(*args, **kwargs)`: `(closed jaxpr, arrays in the arguments, outputs_of)`.

    `outputs_of(jaxpr's outputs)` is the result of the call, and makes the call's changes to the NNX objects in the arguments,
    whose arrays come before the others. Arguments that are no arrays (Python and NumPy scalars, strings, None, functions)
    reach the function unchanged, and outputs that are no arrays are returned unchanged.
    """
    if nodes_in((args, kwargs)):
        pure, state, arguments, write = as_pure_function(function, args, kwargs)
        jaxpr, values, returned_of = traced(pure, (state, *arguments), {})
        return jaxpr, values, lambda arrays: write(returned_of(arrays))
    array_outputs, values, outputs_of = _arrays_only(function, args, kwargs)
    return jax.make_jaxpr(array_outputs)(*values), values, outputs_of


def _arrays_only(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., list[Any]], list[Any], Callable[[Sequence[Any]], Any]]:
    """`(function of the arrays that returns arrays, arrays in the arguments, outputs_of)`, as in `traced`."""
    flat, values = of_arrays(function, args, kwargs)
    traces: list[tuple[list[Any], Any]] = []

    def array_outputs(*values: Any) -> list[Any]:
        outputs, structure = jax.tree.flatten(flat(*values))
        # None replaces each array: a stored tracer would keep the trace alive.
        traces.append(([None if compat.is_operand(out) else out for out in outputs], structure))
        return [out for out in outputs if compat.is_operand(out)]

    def outputs_of(arrays: Sequence[Any]) -> Any:
        outputs, structure = traces[-1]
        computed = iter(arrays)
        return jax.tree.unflatten(structure, [next(computed) if out is None else out for out in outputs])

    return array_outputs, values, outputs_of
