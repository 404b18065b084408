"""Ties a block to its place in the schedule, so that an offload in an unrolled block frees device memory.

Without ties XLA:GPU frees nothing, and the compiled schedule shows two reasons. XLA:GPU delays the copy to the host until the
backward pass needs it, so the device buffer stays alive. It also delays the weight-gradient matmuls to the end, and each of
them keeps a block's activations alive. Ties (`optimization_barrier`) prevent both delays. They change no value:

    y, r = barrier(f(x), r)           forward pass: the outputs wait for the copies of the residuals to the host
    r, ȳ = barrier(r, ȳ)              start of the backward pass: fetching the residuals waits for ȳ
    x̄    = barrier(f_linᵀ(r, ȳ))      end of the backward pass, which waits for every gradient

Inside f_linᵀ, `gradient_ties` keeps the gradients in the order in which JAX traces them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.compat import rules
from remat_jax.core.block import is_live, is_smooth, zero_tangent
from remat_jax.core.gradient_ties import in_program_order
from remat_jax.core.once import transposed_no_more
from remat_jax.core.shared import Offer, Reading, Residuals, Slot, back_on_device, residuals_of, staying_spares
from remat_jax.core.walk import of_some

Block = Callable[..., list[Any]]


def tied(block: Block, offers: Sequence[Offer] = (), *, waits: bool = True) -> Block:
    """`block`, a function of flat arrays, tied to its place in the schedule when it is differentiated.

    Args:
      offers: the inputs to park in host memory.
      waits: whether the choice between an offered input and its copy on the host waits for the backward pass, because later
        blocks may read the input too.
    """

    def run(*primals: Any) -> list[Any]:
        return block(*primals)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        live = [index for index, tangent in enumerate(tangents) if is_live(tangent)]
        if not live:
            outputs = block(*primals)
            return outputs, [zero_tangent(out) for out in outputs]
        outputs, linear = jax.linearize(of_some(block, primals, live), *(primals[index] for index in live))
        outputs = list(map(compat.batch_axis_in_front, outputs))  # as the outputs of `run` and the tangents have it
        held = residuals_of(linear, primals, offers, waits=waits)
        outputs, residuals = compat.optimization_barrier((outputs, held.values))
        outputs = compat.held(outputs, list(filter(compat.is_on_host, residuals)))
        changes, _ = bind_linear(held, residuals, outputs, [tangents[index] for index in live])
        return outputs, [changes[index] if index in changes else zero_tangent(out) for index, out in enumerate(outputs)]

    return compat.block_function(run, jvp)


Links = tuple[Reading | None, ...]
"""An entry for each array that a linked block leaves on the host for the next block. If the array is the copy of an input, the
entry is the input's `Reading` (`core.shared`); else None."""


def bind_linear(
    held: Residuals,
    residuals: Sequence[Any],
    outputs: Sequence[Any],
    directions: Sequence[Any],
    *,
    others: Sequence[Any] = (),
    before: Links = (),
    handed: tuple[Any, ...] = (),
) -> tuple[dict[int, Any], list[Any]]:
    """Bind `tied_linear_p`. Returns the tangents of the smooth `outputs` by index, and the tangents of the block's ghosts.

    The block has a ghost (`tied_chain`) for each array that it hands to the next block. The ghosts' tangents are zeros of the
    types `handed`, in device memory.
    """
    smooth = [index for index, out in enumerate(outputs) if is_smooth(out)]

    def pushforward(residuals: list[Any], *directions: Any) -> list[Any]:
        changes = held.linear(residuals, *directions)
        return [changes[index] for index in smooth]

    jaxpr = jax.make_jaxpr(pushforward)(held.kept, *directions)
    numbers = {"num_residuals": len(residuals), "slots": held.slots, "before": before, "handed": handed}
    results = tied_linear_p.bind(*residuals, *directions, *held.spares, *others, jaxpr=jaxpr, **numbers)
    return dict(zip(smooth, results, strict=False)), list(results[len(smooth) :])


def host_zeros(aval: Any) -> jax.Array:
    """Zeros of the type `aval`, in host memory."""
    return jax.device_put(jnp.zeros(aval.shape, aval.dtype), jax.memory.Space.Host)


def ghost(aval: Any) -> jax.Array:
    """Zeros of the shape and dtype of `aval`, in device memory. Nothing reads them, so the compiler drops them."""
    return jnp.zeros(aval.shape, aval.dtype)


def _evaluate(
    *args: Any, jaxpr: ClosedJaxpr, num_residuals: int, slots: tuple[Slot, ...], before: Links, handed: tuple[Any, ...]
) -> list[Any]:
    size = len(jaxpr.in_avals)
    residuals = back_on_device(args[:num_residuals], slots, args[size : size + _number_of_spares(slots)])
    return [*jex.jaxpr_as_fun(jaxpr)(*residuals, *args[num_residuals:size]), *map(ghost, handed)]


# The linear part of a tied block, ẏ = f_lin(r, ẋ). It is a primitive so that its transpose x̄ = f_linᵀ(r, ȳ) can have ties
# (`_transpose`). `custom_vjp` would have no forward mode, and `linear_call` no batching.
#
# Operands: the residuals r; the tangents ẋ; the spares (for each of the `slots` with a reading, the parked input on device);
# the previous block's arrays on the host (`before` has one entry for each); the tangents of the ghosts of these arrays.
# Outputs: the tangents ẏ; the tangents of the block's own ghosts, which have the types `handed`.
#
# A linked block (`tied_chain`) hands its offloaded residuals to the next block. The next block fetches them in its backward
# pass and returns them as cotangents of their ghosts. These cotangents are no derivatives; ghosts' tangents are always zero.
tied_linear_p = compat.new_primitive("tied_linear", _evaluate)


def _number_of_spares(slots: Sequence[Slot]) -> int:
    return sum(slot.reading is not None for slot in slots)


def _abstract(*_: Any, jaxpr: ClosedJaxpr, handed: tuple[Any, ...], **__: Any) -> list[Any]:
    return [*jaxpr.out_avals, *handed]


@compat.eager_offload_explained()
def _transpose(
    cotangents: Sequence[Any],
    *args: Any,
    jaxpr: ClosedJaxpr,
    num_residuals: int,
    slots: tuple[Slot, ...],
    before: Links,
    handed: tuple[Any, ...],
) -> list[Any]:
    size = len(jaxpr.in_avals)
    behind = size + _number_of_spares(slots)
    residuals, tangents = list(args[:num_residuals]), args[num_residuals:size]
    there = staying_spares(slots, args[size:behind])
    others = [other for other, reading in zip(args[behind:], before, strict=False) if not _stays(reading)]
    concrete = [rules.instantiate_zeros(ct) for ct in cotangents[: len(jaxpr.out_avals)]]
    returned = cotangents[len(jaxpr.out_avals) :]
    fetched: dict[int, Any] = {}
    if handed:
        residuals, fetched, concrete, others = _enter_linked(residuals, there, concrete, returned, others)
    else:
        residuals = [there.get(place, residual) for place, residual in enumerate(residuals)]
        residuals, concrete, others = compat.optimization_barrier((residuals, concrete, others))
    parked = [Slot(slot.place, None) for slot in slots if slot.place not in there]

    def pullback(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
        kept = back_on_device(residuals, parked, ())
        linear = jax.linear_transpose(
            lambda *directions: jex.jaxpr_as_fun(jaxpr)(*kept, *directions), *(tangent.aval for tangent in tangents)
        )
        return list(linear(cotangents))

    backward = jax.make_jaxpr(pullback)(residuals, concrete)
    gradients, others = in_program_order(backward, residuals, concrete, fetched, others)
    gradients, others = compat.optimization_barrier(gradients), compat.held(others, gradients)
    if not (handed or before):
        gradients = compat.held(gradients, gradients)
    gradients = list(map(transposed_no_more, gradients))
    back = iter(others)
    # An array that stays on the device was not fetched. The cotangent of its ghost is zeros, which nothing reads.
    given_back = [
        ghost(compat.on_device(other)) if _stays(reading) else next(back)
        for other, reading in zip(args[behind:], before, strict=False)
    ]
    return [None] * num_residuals + gradients + [None] * (behind - size + len(before)) + given_back


def _stays(reading: Reading | None) -> bool:
    return reading is not None and reading.stays()


def can_be_handed(residual: jax.Array) -> bool:
    """Whether a residual is on the host and is smooth, so that the next block can return it as a cotangent."""
    return compat.is_on_host(residual) and is_smooth(residual)


def _enter_linked(
    residuals: list[Any], there: Mapping[int, Any], cotangents: list[Any], returned: Sequence[Any], others: list[Any]
) -> tuple[list[Any], dict[int, Any], list[Any], list[Any]]:
    """Tie the start of a linked block's backward pass. Returns `(residuals, fetched residuals by index, cotangents, others)`.

    The next block fetched the `returned` residuals in its own backward pass. If there was no next block, they are fetched here.
    The fetches of the `others`, the previous block's residuals on the host, wait for the `returned` residuals.

    Args:
      there: residuals that stayed on the device, which need no fetch: index → array.
    """
    handed = [place for place, residual in enumerate(residuals) if can_be_handed(residual)]
    fetched = {place: value for place, value in zip(handed, returned, strict=True) if place not in there}
    on_host = {place: residuals[place] for place in fetched}
    kept = {place: there.get(place, residual) for place, residual in enumerate(residuals) if place not in fetched}
    if any(isinstance(value, rules.Zero) for value in fetched.values()):
        on_host, kept, cotangents = compat.optimization_barrier((on_host, kept, cotangents))
        fetched = {place: compat.fetched(value, cotangents) for place, value in on_host.items()}
        fetched, others = compat.optimization_barrier((fetched, others))
    else:
        fetched, kept, cotangents, others = compat.optimization_barrier((fetched, kept, cotangents, others))
    return in_order(kept | on_host), fetched, cotangents, others


def in_order(by_place: Mapping[int, Any]) -> list[Any]:
    """The values of `by_place`, ordered by key."""
    return [by_place[place] for place in sorted(by_place)]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    # Forward mode over forward mode has no residuals and no backward pass, so nothing is tied.
    changes = tuple(rules.instantiate_zeros(tangent) for tangent in tangents)
    outputs, changes = jax.jvp(lambda *args: _evaluate(*args, **params), tuple(primals), changes)
    return outputs, list(map(transposed_no_more, changes))


def _batch(
    axis: Any,
    args: Sequence[Any],
    axes: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    slots: tuple[Slot, ...],
    **params: Any,
) -> tuple[list[Any], list[int | None]]:
    size = len(jaxpr.in_avals)
    behind = size + _number_of_spares(slots)
    mapped, moved, out_axes = compat.batched(jaxpr, axis, args[:size], axes[:size])
    spares = [
        arg if dim is None else jnp.moveaxis(arg, dim, 0) for arg, dim in zip(args[size:behind], axes[size:behind], strict=True)
    ]
    # A batched linear part takes no link and leaves none. Its ghosts' tangents are made here, as plain zeros.
    numbers = {"num_residuals": params["num_residuals"], "slots": slots, "before": (), "handed": ()}
    outputs = tied_linear_p.bind(*moved, *spares, jaxpr=mapped, **numbers)
    handed = params["handed"]
    return [*outputs, *map(ghost, handed)], out_axes + [None] * len(handed)


tied_linear_p.def_abstract_eval(_abstract)
rules.primitive_transposes[tied_linear_p] = _transpose
rules.primitive_jvps[tied_linear_p] = _jvp
rules.fancy_primitive_batchers[tied_linear_p] = _batch
