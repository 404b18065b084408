"""Links consecutive tied blocks, so that one block's copies overlap with the next block's compute.

A tied block without a link (`ties`) waits at its end for its own copies to the host, and fetches these copies when its backward
pass starts, so little copying overlaps with compute. A linked block i instead waits for hᵢ₋₁, the previous block's residuals on
the host, and fetches hᵢ₋₁ while its own backward pass runs:

    yᵢ = barrier(fᵢ(xᵢ), hᵢ₋₁)            forward pass
    x̄ᵢ = fᵢ_linᵀ(rᵢ, ȳᵢ)                  backward pass, in which block i fetches hᵢ₋₁

Block i takes hᵢ₋₁ as arguments, keeps them for its backward pass, and returns the fetched arrays as cotangents of ghosts. A
ghost is an argument in device memory with the shape of an array of hᵢ₋₁. Nothing reads its value.

When a block is traced, it is unknown whether a linked block follows. So a linked block returns its outputs twice: tied to its
own copies, for any reader, and loose, for a next block that waits for the copies itself. A block is recognised as the next
block if it is called with one of the tied outputs. The compiler drops the outputs that nothing reads.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.compat import rules
from remat_jax.core.block import BlockUnderPolicy, is_smooth, linear_part
from remat_jax.core.shared import Offer, residuals_of
from remat_jax.core.ties import Links, bind_linear, can_be_handed, ghost, host_zeros, in_order, tied
from remat_jax.core.walk import bodies, equations, of_some, retrace
from remat_jax.identity import ByIdentity

Block = Callable[..., list[Any]]


@dataclass
class _Link:
    """The arrays that a linked block leaves on the host for the next block.

    A link is emptied when the next block takes it, or when the last output that is a tracer of the current trace is gone. Its
    arrays do not hold such an output, so no trace stays alive. They may hold other outputs: an integer has no tangent, so it is
    a tracer of the program around the gradient, and may even be its own loose output.

    Attributes:
      trace: JAX's trace state when the block was called. Only blocks called in the same state can take the link.
      values: the arrays.
      readings: an entry for each array (`ties.Links`).
      outputs: each output of the block, tied to its copies, and the loose output that replaces it.
      alive: how many of the outputs are tracers of the current trace and not gone.
    """

    trace: object
    values: list[Any]
    readings: Links
    outputs: list[tuple[weakref.ref[Any], Any]]
    alive: int = 0

    def lose(self, _: object) -> None:
        """Note that one of the `alive` outputs is gone."""
        self.alive -= 1
        if not self.alive:
            self.clear()

    def clear(self) -> None:
        """Forget the arrays and the outputs."""
        self.values, self.outputs = [], []


# The links of the last linked blocks that this thread has traced, oldest first.
_links: ContextVar[tuple[_Link, ...]] = ContextVar("links", default=())
# A block takes a link only from the last two linked blocks. Arrays that it fetches in its backward pass are on the device until
# the backward passes of all blocks in between are done. One block in between is allowed, for models with two parallel streams.
_MOST_LINKS = 2
# For each kind of block (a key that `_handed` makes), JAX's trace state when such a block was called last, and the arrays that
# it leaves on the host. In another trace a block may have other blocks inside, which its key does not show.
_handed_by_kind: dict[Any, tuple[Any, list[_Handed]]] = {}
_MOST_KINDS = 64
_unlinked: ContextVar[bool] = ContextVar("unlinked", default=False)


def unlinked() -> contextlib.AbstractContextManager[None]:
    """Inside this context blocks are tied but not linked. It is active while an enclosing block is traced."""
    return compat.setting(_unlinked, True)


def run_tied(run: Block, block: BlockUnderPolicy, values: Sequence[Any], offers: Sequence[Offer]) -> list[Any]:
    """`run(*values)`, tied to its place in the schedule and, if possible, linked to the block that computed one of `values`.

    A block without an offload is tied too if it takes a link. Its backward pass fetches the previous block's arrays, and
    delayed gradients would keep the block's own arrays alive at the same time.

    Args:
      run: a function of flat arrays that runs `block` under its policy, but saves the offered inputs on the device.
      offers: the inputs to park in host memory.
    """
    linkable = not _unlinked.get() and not block.jaxpr.effects and all(map(_linkable, values)) and not _shares(block, values)
    live = tuple(index for index, value in enumerate(values) if _differentiated(value))
    waits = any(map(compat.is_differentiated, values))
    offers = [offer for offer in offers if not offer.reading.is_shared] if waits else list(offers)
    if linkable and live:
        handed = _handed(run, block, values, live, offers) if block.offloaded else []
        taken = _take(list(values))
        if handed or taken:
            return _run_linked(run, taken or _Taken(list(values)), handed, len(block.jaxpr.out_avals), offers)
    return list(tied(run, offers, waits=waits)(*values) if block.offloaded else run(*values))


@dataclass(frozen=True)
class _Taken:
    """What a block takes from a link.

    Attributes:
      values: the block's arguments, with loose outputs in place of tied ones.
      before: the previous block's arrays, on the host.
      readings: an entry for each of these (`ties.Links`).
    """

    values: list[Any]
    before: Sequence[Any] = ()
    readings: Links = ()


def _run_linked(run: Block, taken: _Taken, handed: Sequence[_Handed], size: int, offers: Sequence[Offer]) -> list[Any]:
    types = [array.aval for array in handed]

    def body(*operands: Any) -> list[Any]:
        outputs = list(run(*operands[: len(taken.values)]))
        return [*outputs, *outputs, *map(host_zeros, types), *map(ghost, types)]

    operands = [*taken.values, *taken.before]
    jaxpr = jax.make_jaxpr(body)(*operands)
    results = linked_block_p.bind(*operands, jaxpr=jaxpr, before=taken.readings, handed=len(handed), offers=tuple(offers))
    by_place = {offer.place: offer.reading for offer in offers}
    handed_readings = tuple(None if array.place is None else by_place[array.place] for array in handed)
    _leave(results[:size], results[size : 2 * size], list(results[2 * size :]), handed_readings)
    return list(results[:size])


@dataclass(frozen=True)
class _Handed:
    """An array that a block leaves on the host: its type, and its index among the block's inputs (None if it is no input)."""

    aval: Any
    place: int | None


def _handed(
    run: Block, block: BlockUnderPolicy, values: Sequence[Any], live: tuple[int, ...], offers: Sequence[Offer]
) -> list[_Handed]:
    """The arrays that `block` leaves on the host and can hand on when it is differentiated along the `live` inputs.

    Finding them costs a trace, so in one trace blocks with the same policy, types and primitives are assumed to leave the same
    arrays. If a block leaves other arrays, it hands nothing on (`_jvp`).
    """
    places = tuple(offer.place for offer in offers)
    # An array that is passed twice is one residual.
    first: ByIdentity[int] = ByIdentity()
    same = tuple(first.setdefault(value, place) for place, value in enumerate(values))
    avals = tuple(map(str, block.jaxpr.in_avals))
    key = block.policy, len(block.offloaded), avals, live, places, same, _steps(block.jaxpr)
    here = jex.get_opaque_trace_state()
    state, handed = _handed_by_kind.get(key, (None, []))
    if state != here:
        handed = _left_on_host(run, block, same, live, offers)
        _handed_by_kind[key] = here, handed
        for oldest in list(_handed_by_kind)[:-_MOST_KINDS]:
            _handed_by_kind.pop(oldest, None)
    return handed


def _left_on_host(
    run: Block, block: BlockUnderPolicy, same: Sequence[int], live: tuple[int, ...], offers: Sequence[Offer]
) -> list[_Handed]:
    smooth = [index for index in live if is_smooth(block.jaxpr.in_avals[index])]
    places: list[int | None] = []
    if not smooth:
        return []

    def linear(*arguments: Any) -> list[Any]:
        primals = [arguments[place] for place in same]
        held = residuals_of(linear_part(run, primals, smooth), primals, offers, waits=False)
        inputs = ByIdentity((primals[offer.place], offer.place) for offer in offers)
        parked = {slot.place: inputs[held.kept[slot.place]] for slot in held.slots}
        on_host = [(place, value) for place, value in enumerate(held.values) if can_be_handed(value)]
        places.extend(parked.get(place) for place, _ in on_host)
        return [value for _, value in on_host]

    avals = retrace(block.jaxpr, linear).out_avals
    return [_Handed(aval, place) for aval, place in zip(avals, places, strict=True)]


def _steps(jaxpr: ClosedJaxpr) -> tuple[Any, ...]:
    """A key: the primitives and output types of the equations of a jaxpr, also inside loops and calls."""
    return tuple(
        (compat.kind(eqn), tuple(str(out.aval) for out in eqn.outvars), tuple(map(_steps, bodies(eqn)))) for eqn in jaxpr.eqns
    )


def _linkable(value: jax.Array) -> bool:
    # A `shard_map` may check over which mesh axes values vary. The zeros of a link vary over none and would fail the check.
    return compat.varying_axes(value) == compat.varying_axes(jnp.float32(0))


def _shares(block: BlockUnderPolicy, values: Sequence[Any]) -> bool:
    """Whether a batched `custom_vjp` in the block may have an unbatched result, which JAX 0.10 cannot differentiate."""
    batched = any(type(value).__name__ == "BatchTracer" for value in values)
    return batched and any(compat.kind(eqn).startswith("custom_vjp") for eqn in equations(block.jaxpr))


def _differentiated(value: object) -> bool:
    # Only a block that is being differentiated is linked. A block that is only traced, in a `jit`, may never be differentiated,
    # and its handed arrays would be useless copies. If JAX runs op by op, copies do not overlap with compute anyway.
    return type(value).__name__ in ("LinearizeTracer", "JVPTracer") and compat.is_staged(value)


def _take(values: list[Any]) -> _Taken | None:
    """Take the newest link of `values`, if there is one."""
    here = jex.get_opaque_trace_state()
    for link in reversed(_links.get()):
        loose = ByIdentity((output(), other) for output, other in link.outputs)
        if link.trace == here and any(value in loose for value in values):
            before = link.values
            link.clear()
            return _Taken([loose.get(value, value) for value in values], before, link.readings)
    return None


def _leave(outputs: Sequence[Any], loose: Sequence[Any], handed: list[Any], readings: Links) -> None:
    link = _Link(jex.get_opaque_trace_state(), handed, readings, [])
    for output, other in zip(outputs, loose, strict=True):
        of_current = compat.is_of_current_trace(output)
        link.alive += of_current
        if compat.is_traced(output):
            link.outputs.append((weakref.ref(output, link.lose if of_current else None), other))
    if not link.alive:
        link.clear()
    links = (*_links.get(), link)
    for old in links[:-_MOST_LINKS]:
        old.clear()
    _links.set(links[-_MOST_LINKS:])


def _evaluate(*operands: Any, jaxpr: ClosedJaxpr, **_: Any) -> list[Any]:
    return list(jex.jaxpr_as_fun(jaxpr)(*operands))


# A linked block.
# Operands: the block's arguments; the previous block's arrays on the host (`before` has their readings); their ghosts.
# Outputs: the outputs tied to the block's copies; the loose outputs; `handed` (a number) arrays on the host; their ghosts.
# `jaxpr` has the same inputs and outputs. The `offers` are inputs to park on the host. The primitive is bound only under
# differentiation, so jaxprs rarely contain it.
linked_block_p = compat.new_primitive("linked_block", _evaluate)


def _is_live(tangent: jax.Array | rules.Zero) -> bool:
    return not isinstance(tangent, rules.Zero) and tangent.dtype != jax.dtypes.float0


def _zero(value: jax.Array) -> rules.Zero:
    return rules.Zero(jax.typeof(value).to_tangent_aval())


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    before: Links,
    handed: int,
    offers: tuple[Offer, ...],
) -> tuple[list[Any], list[Any]]:
    number, size = len(primals) - 2 * len(before), len(jaxpr.out_avals) // 2 - handed
    live = [index for index in range(number) if _is_live(tangents[index])]
    if not live:
        results = _evaluate(*primals, jaxpr=jaxpr)
        return results, [_zero(result) for result in results]

    def of_live(*changed: Any) -> list[Any]:
        run = functools.partial(_evaluate, jaxpr=jaxpr)
        return of_some(run, primals, live)(*changed)[:size]

    outputs, linear = jax.linearize(of_live, *(primals[index] for index in live))
    held = residuals_of(linear, primals, offers, waits=True)
    residuals = held.values
    types = jaxpr.out_avals[2 * size : 2 * size + handed]
    # A block that is differentiated along fewer inputs may have fewer arrays on the host. Then it hands nothing on.
    hands_on = [jax.typeof(residual) for residual in residuals if can_be_handed(residual)] == types
    # If the previous block handed nothing on, its ghosts have no tangents, and there is nothing to wait for.
    ghosts = tangents[number + len(before) :]
    chained = bool(before) and all(map(_is_live, ghosts))
    others = list(primals[number : number + len(before)]) if chained else []
    end = _end_of_forward(outputs, residuals, others, hands_on)
    on_host = list(filter(can_be_handed, end.residuals)) if hands_on else list(map(host_zeros, types))
    changes, ghost_changes = bind_linear(
        held,
        end.residuals,
        outputs,
        [tangents[index] for index in live],
        others=(*end.others, *ghosts) if chained else (),
        before=before if chained else (),
        handed=tuple(jax.typeof(ghost(aval)) for aval in types) if hands_on else (),
    )
    own_ghosts = [ghost(aval) for aval in types]
    ghost_changes = ghost_changes if hands_on else list(map(_zero, own_ghosts))
    output_changes = [changes.get(index, _zero(out)) for index, out in enumerate(outputs)]
    results = [*end.tied, *end.loose, *on_host, *own_ghosts]
    return results, [*output_changes, *output_changes, *map(_zero, on_host), *ghost_changes]


@dataclass(frozen=True)
class _EndOfForward:
    """The arrays at the tied end of a forward pass.

    Attributes:
      loose: the outputs, which wait only for `others`.
      tied: the outputs, which also wait for the block's copies to the host.
      residuals: the block's residuals.
      others: the previous block's arrays on the host. The backward pass must read these: XLA drops an operand of a barrier if
        its result is unread, and then the outputs would not wait for it.
    """

    loose: list[Any]
    tied: list[Any]
    residuals: list[Any]
    others: list[Any]


def _end_of_forward(outputs: list[Any], residuals: list[Any], others: list[Any], hands_on: bool) -> _EndOfForward:
    """Tie the end of the forward pass. `others` are the previous block's arrays on the host."""
    if not hands_on:
        outputs, residuals, others = compat.optimization_barrier((outputs, residuals, others))
        outputs = compat.held(outputs, others)
        return _EndOfForward(outputs, outputs, residuals, others)
    on_host = {place: residual for place, residual in enumerate(residuals) if can_be_handed(residual)}
    kept = {place: residual for place, residual in enumerate(residuals) if place not in on_host}
    outputs, kept, others = compat.optimization_barrier((outputs, kept, others))
    outputs = compat.held(outputs, others)
    once_tied, on_host = compat.optimization_barrier((outputs, on_host))
    once_tied = compat.held(once_tied, in_order(on_host))
    return _EndOfForward(outputs, once_tied, in_order(kept | on_host), others)


def _batch(
    axis: Any, args: Sequence[Any], axes: Sequence[int | None], *, jaxpr: ClosedJaxpr, handed: int, **params: Any
) -> tuple[list[Any], list[int | None]]:
    # In `jaxpr`, zeros are placeholders for the handed arrays, which are batched. So the zeros must be batched too.
    instantiate = [False] * (len(jaxpr.out_avals) - 2 * handed) + [True] * (2 * handed)
    mapped, moved, out_axes = compat.batched(jaxpr, axis, args, axes, instantiate)
    return linked_block_p.bind(*moved, jaxpr=mapped, handed=handed, **params), out_axes


linked_block_p.def_abstract_eval(lambda *_, jaxpr, **__: list(jaxpr.out_avals))
rules.primitive_jvps[linked_block_p] = _jvp
rules.fancy_primitive_batchers[linked_block_p] = _batch
