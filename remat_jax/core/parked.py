"""The residuals of a tied block, with those of its inputs that a policy offloads parked in host memory.

An input may turn out to be read by other blocks, too, and then it stays on the device (`graph.shared`). So it is not JAX's
policy that offloads it, which decides while the block is traced, but the tie: the block keeps its input, and here a copy on the
host takes its place among the residuals. Where other blocks may still come, the array itself is a `spare` beside it, and the
backward pass takes one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat_jax import compat
from remat_jax.core.shared import Reading, choice


@dataclass(frozen=True)
class Offer:
    """An input that a policy offloads: its place among the inputs, its residual name, and who reads it."""

    place: int
    name: str
    reading: Reading


@dataclass(frozen=True)
class Slot:
    """The place of a parked input among the residuals, and who reads it; None where it is known to leave the device."""

    place: int
    reading: Reading | None


@dataclass
class Residuals:
    """What a block's linear function reads, each array once.

    Attributes:
      values: the arrays; parked inputs are on the host.
      kept: the same before inputs were parked, as the linear function takes them.
      slots: the parked inputs.
      spares: for each slot with a reading, the array itself.
      linear: the linear function of `kept` and the tangents.
    """

    values: list[Any]
    kept: list[Any]
    slots: tuple[Slot, ...]
    spares: list[Any]
    linear: Callable[..., Any]


def residuals_of(linear: Any, primals: Sequence[Any], offers: Sequence[Offer], *, waits: bool) -> Residuals:
    """The residuals of `linear`, what `jax.linearize` gives of a block at `primals`.

    Args:
      offers: the inputs to park, as far as they are residuals and no other block is known to read them.
      waits: whether other blocks may still come.
    """
    leaves, treedef = jax.tree.flatten(linear)
    places: dict[int, int] = {}
    order = [places.setdefault(id(leaf), len(places)) for leaf in leaves]
    kept = list({id(leaf): leaf for leaf in leaves}.values())

    def run(residuals: Sequence[Any], *directions: Any) -> Any:
        return jax.tree.unflatten(treedef, [residuals[place] for place in order])(*directions)

    values, slots, spares = list(kept), [], []
    for offer in offers:
        primal = primals[offer.place]
        place = places.get(id(primal))
        if place is None or values[place] is not primal or offer.reading.is_shared or compat.is_on_host(primal):
            continue
        if waits:
            leaving = choice(primal, offer.name, offer.reading, on_host=True)
            spares.append(choice(primal, offer.name, offer.reading, on_host=False))
        else:
            leaving = compat.named(primal, offer.name)
        values[place] = jax.device_put(leaving, jax.memory.Space.Host)
        slots.append(Slot(place, offer.reading if waits else None))
    return Residuals(values, kept, tuple(slots), spares, run)


def back_on_device(residuals: Sequence[Any], slots: Sequence[Slot], spares: Sequence[Any]) -> list[Any]:
    """`residuals` as the linear function takes them: a spare where there is one, and what is parked fetched."""
    filled, waiting = list(residuals), iter(spares)
    for slot in slots:
        if slot.reading is not None:
            filled[slot.place] = next(waiting)
        else:
            filled[slot.place] = jax.device_put(filled[slot.place], jax.memory.Space.Device)
    return filled


def staying_spares(slots: Sequence[Slot], spares: Sequence[Any]) -> dict[int, Any]:
    """Of the parked inputs those that stay on the device after all: their place → the array."""
    waiting = [slot for slot in slots if slot.reading is not None]
    return {slot.place: spare for slot, spare in zip(waiting, spares, strict=True) if slot.reading and slot.reading.stays()}
