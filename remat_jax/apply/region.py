"""Runs one block under a policy. Every way of applying a policy reaches `core.block` through this module."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax.errors import TraceContextError
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.nnx_state import as_pure_function, hidden_objects, is_node, nodes_in, refusing_hidden_writes
from remat_jax.apply.own_checkpoints import RunBlock, in_place
from remat_jax.core import BlockUnderPolicy, StackRow, block_under_policy
from remat_jax.core.marks import Mark, Marked, bind_mark
from remat_jax.core.nested_offload import names_in_scans, refusal
from remat_jax.core.shared import Offer, Reading, readings, staying
from remat_jax.core.tied_chain import run_tied, unlinked
from remat_jax.core.walk import of_arrays
from remat_jax.errors import UnsupportedError
from remat_jax.policy import JaxPolicy, Policy, is_off

RegionPolicy = Policy | JaxPolicy | Marked
"""The policy of a block. A `Marked` makes the block one equation (a mark), which `apply.per_layer` replaces later."""


def run_block(
    function: Callable[..., Any],
    policy: RegionPolicy,
    path: str,
    parameters: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
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

    def run(jaxpr: ClosedJaxpr, inputs: Sequence[bool], values: Sequence[Any], looped: bool) -> list[Any]:
        return run_jaxpr(jaxpr, policy, path, inputs, values, audit, has_parameters=has_parameters, looped=looped or None)

    transform = haiku_transform()
    if transform is not None:
        if transform.running_init():  # the parameters do not exist yet
            return function(parameters, *args, **kwargs)
        return _in_haiku(transform.remat, function, (parameters, *args), kwargs, policy, run)
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
    return outputs_of(in_place(jaxpr, policy, is_input, values, run))


def _from_parameters(jaxpr: ClosedJaxpr, values: Sequence[Any], size: int) -> tuple[Any, list[Any]]:
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
    policy: RegionPolicy,
    run: RunBlock,
) -> Any:
    """`function(*args, **kwargs)` as a block in a Haiku transform.

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
        return in_place(jaxpr, policy, [False] * len(consts) + is_input, [*consts, *operands], run)

    with compat.established_forms(), compat.region_replaced_by(as_block):
        return outputs_of(remat(body)(*values))


def run_jaxpr(
    jaxpr: ClosedJaxpr,
    policy: RegionPolicy,
    path: str,
    inputs: Sequence[bool],
    values: Sequence[Any],
    audit: Audit,
    *,
    has_parameters: bool = True,
    looped: bool | None = None,
) -> list[Any]:
    """The closed `jaxpr` on `values` as one checkpointed block. `inputs` marks the values that `@inputs` selects.

    Args:
      looped: whether forward and backward pass run in separate loops around the block; None to ask JAX.
    """
    if is_off(policy):
        return list(compat.jaxpr_function(jaxpr)(*values))
    if isinstance(policy, Marked):
        if compat.in_solver():
            return list(compat.jaxpr_function(jaxpr)(*values))
        return bind_mark(Mark(jaxpr, policy, path, tuple(inputs), has_parameters), values)
    block = block_under_policy(jaxpr, policy, path, inputs)
    audit.saw(path, block, whole=has_parameters)
    return bind_block(block, values, looped=looped, apart=looped)


def traced(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], Callable[[Sequence[Any]], Any]]:
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


def bind_block(
    block: BlockUnderPolicy,
    values: Sequence[Any],
    *,
    looped: bool | None = None,
    apart: bool | None = None,
    rows: Mapping[int, StackRow] | None = None,
    scans: int = 0,
) -> list[Any]:
    """Evaluate a block on `values` under `jax.checkpoint`.

    Outside every loop, `run_tied` ties the block to its place in the schedule if it offloads or takes a link.

    If each pass has its own loop around the block, XLA cannot merge the recomputation with the forward pass. In every other
    case XLA could merge them, so `prevent_cse` is set. Two of these cases occur in loops: the gradient is taken inside the loop
    (micro-batches), or the loop runs once and XLA removes it. Blocks in loops are not tied:
    a tied block in a loop does not compile for a GPU (INTERNAL: shape mismatch after layout assignment).

    Args:
      looped: whether the block is in a loop; None to ask JAX.
      apart: whether each pass has its own loop around the block; None to ask JAX, which does not notice that a loop runs once.
      rows: index of a value that is a row of a scanned stack → its stack and row index. All rows have the same row index.
      scans: how many scans are around the block, if JAX does not notice all of them.
    """
    apart = compat.in_loop(around_gradient=False) if apart is None else apart
    looped = compat.in_loop() if looped is None else looped
    if block.offloaded and looped:
        compat.refuse_miscompiled_offload()
        _refuse_nested_offload(block, max(scans, compat.loops_around()))
    if not looped and block.offloaded and compat.in_eager_shard_map():
        return list(jax.jit(lambda *values: _bind_tied(block, values, prevent_cse=not apart))(*values))
    if not looped:
        return _bind_tied(block, values, prevent_cse=not apart)
    read = _offered(block, values)[0]
    rows = rows if rows and isinstance(block.policy, Policy) else {}
    run = block.checkpointed(prevent_cse=not apart, rows=tuple(rows), once=bool(block.offloaded), staying=lambda: staying(read))
    stacks, index = [row.stack for row in rows.values()], [row.index for row in rows.values()][:1]
    return list(run(*values, *stacks, *index))


def _bind_tied(block: BlockUnderPolicy, values: Sequence[Any], *, prevent_cse: bool) -> list[Any]:
    """Evaluate a block outside every loop, tied to its place in the schedule if it offloads or takes a link."""
    _, offers = _offered(block, values)
    kept = tuple(offer.place for offer in offers)
    run = block.checkpointed(prevent_cse=prevent_cse, staying=lambda: kept)
    with compat.eager_offload_explained() if block.offloaded else contextlib.nullcontext():
        return run_tied(run, block, values, offers)


def _offered(block: BlockUnderPolicy, values: Sequence[Any]) -> tuple[dict[int, Reading], list[Offer]]:
    """The readings of the block's inputs by index, and the inputs that it offers to park in host memory."""
    read = readings(values, block.named.inputs)
    offers = [Offer(place, name, read[place]) for place, name in block.offloaded_inputs.items() if place in read]
    for offer in offers:
        offer.reading.name = offer.reading.name or offer.name
    return read, offers


def _refuse_nested_offload(block: BlockUnderPolicy, loops: int) -> None:
    """Raise UnsupportedError if a GPU or TPU is here and the block, inside `loops` loops, offloads in a scan inside a scan."""
    if not compat.has_accelerator():
        return
    inner = block.offloaded & names_in_scans(block.named.jaxpr)
    if loops > 1 or inner:
        raise refusal(block.named.path, inner or block.offloaded)
