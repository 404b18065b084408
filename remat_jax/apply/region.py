"""Running one block under a policy. Every way of applying a policy calls the heart (`core.block`) from here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply import own_checkpoints as _own_checkpoints  # noqa: F401 - a model's own checkpoints give way
from remat_jax.apply.audit import Audit
from remat_jax.core import PlannedBlock, StackRow, plan_block
from remat_jax.core.marks import Mark, Marked, bind_mark
from remat_jax.core.parked import Offer
from remat_jax.core.shared import readings, staying
from remat_jax.core.tied_chain import run_tied, unlinked
from remat_jax.policy import JaxPolicy, Policy, is_off


def run_block(
    function: Callable[..., Any],
    policy: Policy | JaxPolicy | Marked,
    path: str,
    parameters: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    audit: Audit,
    *,
    has_parameters: bool = True,
) -> Any:
    """`function(parameters, *args, **kwargs)` as one checkpointed block.

    Arrays anywhere in `args` and `kwargs` are inputs of the block. Everything else in them (Python scalars, strings, None,
    functions) reaches the function unchanged, and outputs that are no arrays are returned unchanged. The policy's rules for
    inputs do not apply to arrays in `parameters`, nor to arrays that the function closes over.

    Args:
      policy: the block's policy. If it is a `Marked`, the block becomes a mark that waits for its policy.
      path: the block's module path, with which the names of its residuals begin.
      audit: records what the policy's selectors matched.
      has_parameters: False while a model is initialised: without parameters the backward pass reads fewer residuals.
    """
    if is_off(policy):
        return function(parameters, *args, **kwargs)
    leaves, treedef = jax.tree.flatten((parameters, tuple(args), kwargs))
    arrays = [index for index, leaf in enumerate(leaves) if compat.is_array(leaf)]
    first_input = len(jax.tree.leaves(parameters))

    results: list[tuple[list[Any], Any]] = []

    def flat(*values: Any) -> list[Any]:
        params, positional, named = jax.tree.unflatten(treedef, _filled(leaves, arrays, values))
        outputs, structure = jax.tree.flatten(function(params, *positional, **named))
        # None stands for an array: the trace must not be kept alive.
        results.append(([None if compat.is_array(out) else out for out in outputs], structure))
        return [out for out in outputs if compat.is_array(out)]

    values = [leaves[index] for index in arrays]
    with unlinked():
        jaxpr = jax.make_jaxpr(flat)(*values)
    # Arrays that the function closes over, tracers too, become arguments of the block; else it could not be differentiated.
    open_jaxpr, consts = compat.hoist_consts(jaxpr)
    is_input = [False] * len(consts) + [index >= first_input for index in arrays]
    if isinstance(policy, Marked):
        made = bind_mark(Mark(open_jaxpr, policy, path, tuple(is_input), has_parameters), [*consts, *values])
    else:
        block = plan_block(open_jaxpr, policy, path, is_input)
        audit.saw(path, block, whole=has_parameters)
        made = bind_block(block, [*consts, *values])
    outputs, structure = results[-1]
    computed = [index for index, out in enumerate(outputs) if out is None]
    return jax.tree.unflatten(structure, _filled(outputs, computed, made))


def _filled(leaves: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    filled = list(leaves)
    for index, value in zip(places, values, strict=True):
        filled[index] = value
    return filled


def bind_block(
    block: PlannedBlock,
    values: Sequence[Any],
    *,
    looped: bool | None = None,
    apart: bool | None = None,
    rows: Mapping[int, StackRow] | None = None,
) -> list[Any]:
    """Evaluate a planned block on `values`: under `jax.checkpoint`, and tied if it offloads outside every loop.

    `prevent_cse` is needed where XLA could merge the recomputation with the forward pass. It cannot do so if the two passes are
    in different loops. Both are in one body if the gradient is taken inside the loop, as over micro-batches, or if the loop
    runs once and XLA removes it. Inside any loop a tied block does not compile for a GPU (INTERNAL: shape mismatch after layout
    assignment).

    Args:
      looped: whether the block is in a loop; None to ask JAX.
      apart: whether each pass has its own loop around the block; None to ask JAX, which does not notice that a loop runs once.
      rows: the values that are rows of a scanned stack, all with the same row index: index among `values` → row.
    """
    apart = compat.in_loop(around_gradient=False) if apart is None else apart
    looped = compat.in_loop() if looped is None else looped
    if block.offloaded and looped:
        compat.refuse_miscompiled_offload()
    read = readings(values, block.named.inputs)
    offers = [Offer(place, name, read[place]) for place, name in block.offloaded_inputs.items() if place in read]
    for offer in offers:
        offer.reading.name = offer.reading.name or offer.name
    if not looped:
        kept = tuple(offer.place for offer in offers)
        run = block.checkpointed(prevent_cse=not apart, staying=lambda: kept)
        with compat.eager_offload_explained() if block.offloaded else contextlib.nullcontext():
            return run_tied(run, block, values, offers)
    checkpointed = functools.partial(block.checkpointed, prevent_cse=not apart, staying=lambda: staying(read))
    if rows and isinstance(block.policy, Policy):
        places = tuple(rows)
        run = checkpointed(rows=places, once=bool(block.offloaded))
        return list(run(*values, *(rows[place].stack for place in places), rows[places[0]].index))
    return list(checkpointed(once=bool(block.offloaded))(*values))
