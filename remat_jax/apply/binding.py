"""Evaluates a block's jaxpr under its policy. Every way of applying a policy reaches `core.block` through this module."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.core import BlockUnderPolicy, StackRow, block_under_policy
from remat_jax.core.marks import Mark, Marked, bind_mark
from remat_jax.core.nested_offload import names_in_scans, refusal
from remat_jax.core.shared import Offer, Reading, readings, staying
from remat_jax.core.tied_chain import run_tied
from remat_jax.policy import JaxPolicy, Policy, is_off

RegionPolicy = Policy | JaxPolicy | Marked
"""The policy of a block. A `Marked` makes the block one equation (a mark), which `apply.per_layer` replaces later."""


def run_jaxpr(
    jaxpr: ClosedJaxpr,
    path: str,
    inputs: Sequence[bool],
    values: Sequence[Any],
    looped: bool = False,
    *,
    policy: RegionPolicy,
    audit: Audit,
    has_parameters: bool = True,
) -> list[Any]:
    """The closed `jaxpr` on `values` as one checkpointed block. `inputs` marks the values that `@inputs` selects.

    Args:
      looped: True if forward and backward pass run in separate loops around the block; otherwise JAX is asked.
    """
    if is_off(policy) or (isinstance(policy, Marked) and compat.in_solver()):
        return list(compat.jaxpr_function(jaxpr)(*values))
    if isinstance(policy, Marked):
        return bind_mark(Mark(jaxpr, policy, path, tuple(inputs), has_parameters), values)
    block = block_under_policy(jaxpr, policy, path, inputs)
    audit.saw(path, block, whole=has_parameters)
    return bind_block(block, values, looped=looped or None, apart=looped or None)


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
