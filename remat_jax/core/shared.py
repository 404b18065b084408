"""Keeps an input on the device if several blocks read it, even if a policy offloads it: for example a mask.

A shared array is alive from its first reader until the backward pass of its last reader. Offloading it would free nothing, and
each block would wait for a copy.

When a block is traced, later readers are unknown. A `Reading` counts the readers so far. If more readers may follow, the
backward pass takes both the array and its copy on the host (`choice_p`). JAX traces the backward pass after all blocks, when
the readers are known. The backward pass then reads only one of the two arrays, and the compiler drops the other.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from remat_jax import compat
from remat_jax.compat import rules
from remat_jax.identity import ByIdentity


@dataclass(eq=False)
class Reading:
    """The blocks that read one array, of the type `aval`.

    Attributes:
      blocks: how many blocks read the array.
      in_every_round: whether a block in a loop reads the array from outside the loop, so that every iteration reads it.
      name: the array's residual name in the first block whose policy offloads the array; empty if no policy does.
    """

    aval: Any
    blocks: int = 0
    in_every_round: bool = False
    name: str = ""
    _stays: bool | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several of the blocks traced so far, or several iterations of a loop, read the array."""
        return self.in_every_round or self.blocks > 1

    @property
    def left(self) -> bool:
        """Whether a backward pass has already read the array from the host."""
        return self._stays is False

    def stays(self) -> bool:
        """Whether the array stays on the device. The first result is final."""
        if self._stays is None:
            self._stays = self.is_shared
        return self._stays


# The trace of a program → id of an array that a block in it reads → the array and its `Reading`. The references are weak, so no
# trace and no array stays alive. The id of an array that is gone may be another array's, so `_reading` compares the arrays.
_readings: weakref.WeakKeyDictionary[Any, dict[int, tuple[weakref.ref[Any], Reading]]] = weakref.WeakKeyDictionary()
_collected: ContextVar[list[Reading] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[Reading]]:
    """Collects the `Reading` of every array that a block reads inside this context, without duplicates."""
    collected: list[Reading] = []
    with compat.setting(_collected, collected):
        yield collected


def readings(values: Sequence[Any], names: Sequence[str | None]) -> dict[int, Reading]:
    """Record that a block reads the arrays of `values` that have a name and are no scalars.

    Returns a dict: index of such an array among `values` → its `Reading`. The dict is empty if JAX runs op by op.
    """
    if not compat.is_staging():
        return {}
    by_place: dict[int, Reading] = {}
    counted: ByIdentity[None] = ByIdentity()
    for place, (value, name) in enumerate(zip(values, names, strict=True)):
        if name is None or not getattr(value, "ndim", 0):
            continue
        by_place[place] = reading = _reading(value)
        if value not in counted:
            counted[value] = None
            reading.blocks += 1
            reading.in_every_round |= compat.is_fixed_in_loops(value)
    return by_place


def note_fixed(values: Sequence[Any]) -> None:
    """Record that blocks in a loop read the same `values` in every iteration."""
    for value in values:
        if getattr(value, "ndim", 0):
            _reading(value).in_every_round = True


def note_loop_inputs(eqn: JaxprEqn, body_inputs: Sequence[Any]) -> None:
    """If `eqn` is a scan, record the inputs of its retraced body that are the same in every iteration."""
    if eqn.primitive.name == "scan":
        note_fixed(body_inputs[: compat.scan_layout(eqn)[0]])


def _reading(value: jax.Array) -> Reading:
    of_program = _readings.setdefault(compat.program_of(value), {})
    itself, reading = of_program.get(id(value), (None, None))
    if reading is None or itself is None or itself() is not value or reading.left:
        reading = Reading(compat.on_device(value))
        of_program[id(value)] = weakref.ref(value), reading
    collected = _collected.get()
    if collected is not None and all(other is not reading for other in collected):
        collected.append(reading)
    return reading


def staying(read: Mapping[int, Reading]) -> frozenset[int]:
    """The indices of the arrays that the blocks traced so far share (`Reading.is_shared`)."""
    return frozenset(place for place, reading in read.items() if reading.is_shared)


# `choice_p` is an identity, bound twice for one input. With `on_host`, its output is copied to the host; without, its output
# stays on the device. The backward pass reads one of the two; the `reading` decides which.
choice_p = compat.new_primitive("shared_input_choice", lambda value, **_: value, multiple_results=False)


def is_taken(eqn: JaxprEqn) -> bool | None:
    """Whether the backward pass reads the output of the choice `eqn`; None if `eqn` is no choice."""
    if eqn.primitive is not choice_p:
        return None
    return bool(eqn.params["reading"].stays() != eqn.params["on_host"])


def offloaded_name(eqn: JaxprEqn) -> str | None:
    """The residual name of the input, if `eqn` is a choice whose output is copied to the host; else None."""
    return eqn.params["name"] if eqn.primitive is choice_p and eqn.params["on_host"] else None


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return choice_p.bind(*primals, **params), tangents[0]


choice_p.def_abstract_eval(lambda aval, **_: aval)
rules.primitive_jvps[choice_p] = _jvp
rules.primitive_batchers[choice_p] = lambda args, axes, **params: (choice_p.bind(*args, **params), axes[0])


# --- inputs parked on the host ------------------------------------------------------------------------------------------
#
# A JAX policy cannot offload a tied block's input: the policy decides while the block is traced, before the other readers are
# known. So the block saves its input x, and the tie parks x: among the residuals, a copy on the host replaces x. If more
# readers may follow, x itself is passed on too, as a `spare`, and the backward pass reads either the copy or the spare.


@dataclass(frozen=True)
class Offer:
    """An input that a policy offloads: its index among the inputs, its residual name, and its readers."""

    place: int
    name: str
    reading: Reading


@dataclass(frozen=True)
class Slot:
    """A parked input: its index among the residuals, and its readers (None if no later block can keep it on the device)."""

    place: int
    reading: Reading | None


@dataclass
class Residuals:
    """The residuals of a block, r in ẏ = f_lin(r, ẋ), without duplicates.

    Attributes:
      values: the residuals, with parked inputs on the host.
      kept: the residuals before parking, as `linear` takes them.
      slots: the parked inputs.
      spares: for each slot with a reading, the input on the device.
      linear: f_lin, a function of `kept` and the tangents.
    """

    values: list[Any]
    kept: list[Any]
    slots: tuple[Slot, ...]
    spares: list[Any]
    linear: Callable[..., Any]


def residuals_of(linear: Callable[..., Any], primals: Sequence[Any], offers: Sequence[Offer], *, waits: bool) -> Residuals:
    """The residuals of `linear`, the linear function that `jax.linearize` returned for a block at `primals`.

    Args:
      offers: the inputs to park. An input is not parked if it is not a residual, is in host memory already, or is shared.
      waits: whether more readers may follow.
    """
    leaves, treedef = jax.tree.flatten(linear)
    places: ByIdentity[int] = ByIdentity()
    order = [places.setdefault(leaf, len(places)) for leaf in leaves]
    kept = list(places)

    def run(residuals: Sequence[Any], *directions: Any) -> list[Any]:
        return jax.tree.unflatten(treedef, [residuals[place] for place in order])(*directions)

    values, slots, spares = list(kept), [], []
    for offer in offers:
        primal = primals[offer.place]
        place = places.get(primal)
        if place is None or values[place] is not primal or offer.reading.is_shared or compat.is_on_host(primal):
            continue
        if waits:
            leaving = choice_p.bind(primal, name=offer.name, reading=offer.reading, on_host=True)
            spares.append(choice_p.bind(primal, name=offer.name, reading=offer.reading, on_host=False))
        else:
            leaving = compat.named(primal, offer.name)
        values[place] = jax.device_put(leaving, jax.memory.Space.Host)
        slots.append(Slot(place, offer.reading if waits else None))
    return Residuals(values, kept, tuple(slots), spares, run)


def back_on_device(residuals: Sequence[Any], slots: Sequence[Slot], spares: Sequence[Any]) -> list[Any]:
    """`residuals` in the form of `Residuals.kept`: each parked input is replaced by its spare, or fetched from the host."""
    filled, waiting = list(residuals), iter(spares)
    for slot in slots:
        if slot.reading is not None:
            filled[slot.place] = next(waiting)
        else:
            filled[slot.place] = jax.device_put(filled[slot.place], jax.memory.Space.Device)
    return filled


def staying_spares(slots: Sequence[Slot], spares: Sequence[Any]) -> dict[int, Any]:
    """The parked inputs that stay on the device because other blocks read them: index among the residuals → array."""
    waiting = [slot for slot in slots if slot.reading is not None]
    return {slot.place: spare for slot, spare in zip(waiting, spares, strict=True) if slot.reading and slot.reading.stays()}
