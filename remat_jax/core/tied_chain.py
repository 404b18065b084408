"""Linking consecutive tied blocks, so that the copies of one run while the next one computes.

A block that is tied to its own place (`ties`) waits for its copies to the host at its own end, and starts to fetch when its own
backward pass is entered: of its copies only the rest of its own compute runs meanwhile. A linked block waits for the copies of
the block before it instead, and entering its backward pass starts the fetch of the block before it.

What links two blocks is what the first one has on the host. The next block takes it as an argument, has its own outputs wait
for it, keeps it for its backward pass, fetches it while that runs, and gives it back as a cotangent: that of a ghost, an
argument of the same shape in device memory whose value nobody reads. Whether a next block will come is not known while a block
is traced. So a linked block has its outputs twice: tied to its own copies, for whoever wants them, and loose, for a block that
takes what is on the host as well, found by the array that it is called with. What nobody takes the compiler drops.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from remat_jax import compat
from remat_jax.core import PlannedBlock, is_smooth
from remat_jax.core.parked import Offer, residuals_of
from remat_jax.core.ties import Links, can_be_handed, ghost, host_zeros, tied, tied_linear_p
from remat_jax.core.walk import bodies, equations, of_some

Block = Callable[..., list[Any]]


@dataclass
class _Link:
    """What a linked block leaves for the next one, and who reads what of it; `values` is None once they are taken."""

    serial: int
    trace: Any
    values: list[Any] | None
    readings: Links


@dataclass(frozen=True)
class _Output:
    itself: weakref.ref[Any]
    loose: Any
    link: _Link


# The outputs of linked blocks by their ids. An entry goes with its output, so that no trace is kept alive.
_outputs: dict[int, _Output] = {}
# How many linked blocks this thread has traced.
_serial: ContextVar[int] = ContextVar("serial", default=0)
# What a block left longer ago stays where it is: fetched while this block's backward pass runs, it would be on the device until
# the backward passes of all those between are done. One between is allowed, for two streams side by side.
_MAX_DISTANCE = 2
# What the last kinds of blocks leave on the host.
_known: dict[Any, list[_Handed]] = {}
_KNOWN_BLOCKS = 64
_off: ContextVar[bool] = ContextVar("off", default=False)


@contextlib.contextmanager
def unlinked() -> Iterator[None]:
    """While this holds, blocks are tied each to its own place: inside another block they are that block's business."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def run_tied(run: Block, block: PlannedBlock, values: Sequence[Any], offers: Sequence[Offer] = ()) -> list[Any]:
    """`run(*values)` tied to the schedule, and linked to the block that made one of `values` just before.

    A block that does not offload is tied where one before it does: what that has on the host is fetched while its backward pass
    runs, and its own gradients, put off, would keep its arrays alive until then.

    Args:
      run: a function of flat arrays to a list of arrays, which runs the block under its policy, but keeps the inputs that are
        offered.
      block: what is run.
      values: the arrays it is called with.
      offers: the inputs to park in host memory.
    """
    linkable = not _off.get() and not block.jaxpr.effects and all(map(_linkable, values)) and not _shares(block, values)
    live = tuple(index for index, value in enumerate(values) if _differentiated(value))
    waits = any(map(compat.is_differentiated, values))
    offers = [offer for offer in offers if not offer.reading.is_shared] if waits else list(offers)
    if linkable and live:
        handed = _handed(run, block, values, live, offers) if block.offloaded else []
        taken = _take(list(values))
        if handed or taken:
            return _run_linked(run, *(taken or (list(values), [], ())), handed, len(block.jaxpr.out_avals), offers)
    return list(tied(run, offers, waits=waits)(*values) if block.offloaded else run(*values))


def _run_linked(
    run: Block,
    values: list[Any],
    before: list[Any],
    readings: Links,
    handed: Sequence[_Handed],
    size: int,
    offers: Sequence[Offer],
) -> list[Any]:
    types = [one.aval for one in handed]

    def body(*operands: Any) -> list[Any]:
        outputs = list(run(*operands[: len(values)]))
        return [*outputs, *outputs, *map(host_zeros, types), *map(ghost, types)]

    operands = [*values, *before]
    jaxpr = jax.make_jaxpr(body)(*operands)
    results = linked_block_p.bind(*operands, jaxpr=jaxpr, before=readings, handed=len(handed), offers=tuple(offers))
    by_place = {offer.place: offer.reading for offer in offers}
    own = tuple(None if one.place is None else by_place[one.place] for one in handed)
    _leave(results[:size], results[size : 2 * size], list(results[2 * size :]), own)
    return list(results[:size])


@dataclass(frozen=True)
class _Handed:
    """What a block leaves on the host: its type, and its place if it is one of the inputs."""

    aval: Any
    place: int | None


def _handed(
    run: Block, block: PlannedBlock, values: Sequence[Any], live: tuple[int, ...], offers: Sequence[Offer]
) -> list[_Handed]:
    """What `block` would leave on the host and can hand on, differentiated along the `live` inputs.

    To know it costs a trace, so that what one block of a stack has is taken for what the others have. Where it is not, the
    block hands nothing on (`_jvp`).
    """
    places = tuple(offer.place for offer in offers)
    # An array that is given twice is one residual.
    first: dict[int, int] = {}
    same = tuple(first.setdefault(id(value), place) for place, value in enumerate(values))
    avals = tuple(map(str, block.jaxpr.in_avals))
    key = block.policy, len(block.offloaded), avals, live, places, same, _steps(block.jaxpr)
    handed = _known.get(key)
    if handed is None:
        handed = _known[key] = _left_on_host(run, block, same, live, offers)
        for oldest in list(_known)[:-_KNOWN_BLOCKS]:
            _known.pop(oldest, None)
    return handed


def _left_on_host(
    run: Block, block: PlannedBlock, same: Sequence[int], live: tuple[int, ...], offers: Sequence[Offer]
) -> list[_Handed]:
    smooth = [index for index in live if is_smooth(block.jaxpr.in_avals[index])]
    places: list[int | None] = []
    if not smooth:
        return []

    def linear(*given: Any) -> list[Any]:
        primals = [given[place] for place in same]

        def of_live(*changed: Any) -> list[Any]:
            return [out for out in of_some(run, primals, smooth)(*changed) if is_smooth(out)]

        found = residuals_of(jax.linearize(of_live, *(primals[index] for index in smooth))[1], primals, offers, waits=False)
        inputs = {id(primals[offer.place]): offer.place for offer in offers}
        parked = {slot.place: inputs[id(found.kept[slot.place])] for slot in found.slots}
        on_host = [(place, value) for place, value in enumerate(found.values) if can_be_handed(value)]
        places.extend(parked.get(place) for place, _ in on_host)
        return [value for _, value in on_host]

    avals = jax.make_jaxpr(linear)(*block.jaxpr.in_avals).out_avals
    return [_Handed(aval, place) for aval, place in zip(avals, places, strict=True)]


def _steps(jaxpr: Any) -> tuple[Any, ...]:
    """What a jaxpr does, loops and calls opened, as something to look up."""
    return tuple(
        (eqn.primitive.name, tuple(str(out.aval) for out in eqn.outvars), tuple(map(_steps, bodies(eqn)))) for eqn in jaxpr.eqns
    )


def _linkable(value: Any) -> bool:
    # Inside a `shard_map` that checks how values vary, what is made here does not vary as it should.
    return _varying(value) == _varying(jnp.float32(0))


def _shares(block: PlannedBlock, values: Sequence[Any]) -> bool:
    """Whether a `custom_vjp` may give one result to a whole batch: JAX 0.10 cannot differentiate that once it is traced."""
    batched = any(type(value).__name__ == "BatchTracer" for value in values)
    return batched and any(eqn.primitive.name.startswith("custom_vjp") for eqn in equations(block.jaxpr))


def _differentiated(value: Any) -> bool:
    # In a `jit` it is not known yet whether it will be, and what a block hands on would be there in evaluation, too. Where ops
    # run at once nothing overlaps.
    return type(value).__name__ in ("LinearizeTracer", "JVPTracer") and compat.is_staged(value)


def _varying(value: Any) -> str:
    kind = jax.typeof(value)
    return str(getattr(kind, "mat", None) or getattr(kind, "vma", None))


def _take(values: list[Any]) -> tuple[list[Any], list[Any], Links] | None:
    """`values` with the outputs of the last linked block in its loose form, what it hands on, and who reads that.

    None if there is no linked block before.
    """
    here = jex.get_opaque_trace_state()
    found = {place: _outputs[id(value)] for place, value in enumerate(values) if id(value) in _outputs}
    valid = {p: o for p, o in found.items() if o.itself() is values[p] and o.link.values is not None and o.link.trace == here}
    valid = {place: output for place, output in valid.items() if _serial.get() - output.link.serial < _MAX_DISTANCE}
    if not valid:
        return None
    link = max((output.link for output in valid.values()), key=lambda link: link.serial)
    for place, output in valid.items():
        if output.link is link:
            values[place] = output.loose
    before, link.values = link.values, None
    return values, before or [], link.readings


def _leave(outputs: Sequence[Any], loose: Sequence[Any], handed: list[Any], readings: Links) -> None:
    _serial.set(_serial.get() + 1)
    link = _Link(_serial.get(), jex.get_opaque_trace_state(), handed, readings)
    for output, other in zip(outputs, loose, strict=True):
        if compat.is_traced(output):
            key = id(output)
            _outputs[key] = _Output(weakref.ref(output, functools.partial(_forget, key)), other, link)


def _forget(key: int, _: Any) -> None:
    _outputs.pop(key, None)


# A linked block: arrays, the arrays on the host of the block `before` (who reads each) and their ghosts, in; its outputs tied
# to its copies and loose, the `handed` arrays on the host that it hands on, and their ghosts, out. `jaxpr` has the same inputs
# and outputs; the `offers` are inputs to park on the host. It is bound where something is being differentiated, so that as a
# rule it stands in no jaxpr.
linked_block_p = jex.Primitive("linked_block")
linked_block_p.multiple_results = True


def _evaluate(*operands: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return list(jex.jaxpr_as_fun(jaxpr)(*operands))


def _abstract(*_: Any, jaxpr: Any, **__: Any) -> list[Any]:
    return list(jaxpr.out_avals)


def _is_live(tangent: Any) -> bool:
    return not isinstance(tangent, ad.Zero) and tangent.dtype != jax.dtypes.float0


def _zero(value: Any) -> Any:
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, before: Links, handed: int, offers: tuple[Offer, ...]
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
    found = residuals_of(linear, primals, offers, waits=True)
    residuals = found.values
    types = jaxpr.out_avals[2 * size : 2 * size + handed]
    # Of a block that is differentiated along fewer inputs less may be on the host: then nothing is handed on.
    hands_on = [jax.typeof(one) for one in residuals if can_be_handed(one)] == types
    # What the block before did not hand on after all (it has no tangent) is not waited for.
    ghosts = tangents[number + len(before) :]
    chained = bool(before) and all(map(_is_live, ghosts))
    others = list(primals[number : number + len(before)]) if chained else []
    loose, once_tied, residuals, others = _leave_forward(outputs, residuals, others, hands_on)
    on_host = [one for one in residuals if can_be_handed(one)] if hands_on else [host_zeros(aval) for aval in types]
    smooth = [index for index, out in enumerate(outputs) if is_smooth(out)]

    def pushforward(residuals: list[Any], *directions: Any) -> list[Any]:
        changes = found.linear(residuals, *directions)
        return [changes[index] for index in smooth]

    directions = [tangents[index] for index in live]
    results = tied_linear_p.bind(
        *residuals,
        *directions,
        *found.spares,
        *((*others, *ghosts) if chained else ()),
        jaxpr=jax.make_jaxpr(pushforward)(found.kept, *directions),
        num_residuals=len(residuals),
        slots=found.slots,
        before=before if chained else (),
        handed=tuple(jax.typeof(ghost(aval)) for aval in types) if hands_on else (),
    )
    changes = [_zero(out) for out in outputs]
    for index, one in zip(smooth, results, strict=False):
        changes[index] = one
    own_ghosts = [ghost(aval) for aval in types]
    ghost_changes = results[len(smooth) :] if hands_on else map(_zero, own_ghosts)
    return [*once_tied, *loose, *on_host, *own_ghosts], [*changes, *changes, *map(_zero, on_host), *ghost_changes]


def _leave_forward(
    outputs: list[Any], residuals: list[Any], others: list[Any], hands_on: bool
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Leave the forward pass: `(loose outputs, outputs tied to the copies, residuals, others)`.

    The outputs wait for the `others`, what the block before has on the host. These go on from here to the backward pass: of a
    barrier XLA drops what is not read behind it, and with it the wait.
    """
    if not hands_on:
        outputs, residuals, others = compat.optimization_barrier((outputs, residuals, others))
        return outputs, outputs, residuals, others
    places = [place for place, residual in enumerate(residuals) if can_be_handed(residual)]
    on_host = [residuals[place] for place in places]
    kept = [residual for place, residual in enumerate(residuals) if place not in places]
    outputs, kept, others = compat.optimization_barrier((outputs, kept, others))
    once_tied, on_host = compat.optimization_barrier((outputs, on_host))
    rest, hosts = iter(kept), iter(on_host)
    joined = [next(hosts) if place in places else next(rest) for place in range(len(residuals))]
    return outputs, once_tied, joined, others


def _batch(
    axis: Any, args: Sequence[Any], axes: Sequence[int | None], *, jaxpr: Any, handed: int, **params: Any
) -> tuple[list[Any], list[int | None]]:
    # Zeros stand for what is handed on, and are mapped as that is.
    instantiate = [False] * (len(jaxpr.out_avals) - 2 * handed) + [True] * (2 * handed)
    mapped, moved, out_axes = compat.batched(jaxpr, axis, args, axes, instantiate)
    return linked_block_p.bind(*moved, jaxpr=mapped, handed=handed, **params), out_axes


linked_block_p.def_impl(_evaluate)
linked_block_p.to_lojax = _evaluate
linked_block_p.def_abstract_eval(_abstract)
mlir.register_lowering(linked_block_p, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[linked_block_p] = _jvp
batching.fancy_primitive_batchers[linked_block_p] = _batch
