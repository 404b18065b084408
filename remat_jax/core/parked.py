"""The residuals of a tied block, where a copy in host memory replaces each input that the policy offloads.

Other blocks may read the same input, and then it stays on the device (`core.shared`). JAX's policy cannot offload it: it
decides while the block is traced, before the other readers are known. So the block keeps its input, and the tie replaces it
among the residuals by a copy on the host. If more readers may follow, the array itself becomes a `spare`, and the backward pass
reads one of the two.
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
    """An input that a policy offloads: its place among the inputs, its residual name, and its readers."""

    place: int
    name: str
    reading: Reading


@dataclass(frozen=True)
class Slot:
    """The place of a parked input among the residuals, and its readers; None if it surely leaves the device."""

    place: int
    reading: Reading | None


@dataclass
class Residuals:
    """The arrays that a block's linear function reads, each once.

    Attributes:
      values: the arrays, with parked inputs on the host.
      kept: the same arrays before parking, as the linear function takes them.
      slots: the parked inputs.
      spares: for each slot with a reading, the input on the device.
      linear: the linear function of `kept` and the tangents.
    """

    values: list[Any]
    kept: list[Any]
    slots: tuple[Slot, ...]
    spares: list[Any]
    linear: Callable[..., Any]


def residuals_of(linear: Any, primals: Sequence[Any], offers: Sequence[Offer], *, waits: bool) -> Residuals:
    """The residuals of `linear`, the linear function of a block at `primals` from `jax.linearize`.

    Args:
      offers: the inputs to park. An input that is no residual, or that another block is known to read, is not parked.
      waits: whether more readers may follow.
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
    """`residuals` as the linear function takes them: each parked input is replaced by its spare, or fetched from the host."""
    filled, waiting = list(residuals), iter(spares)
    for slot in slots:
        if slot.reading is not None:
            filled[slot.place] = next(waiting)
        else:
            filled[slot.place] = jax.device_put(filled[slot.place], jax.memory.Space.Device)
    return filled


def staying_spares(slots: Sequence[Slot], spares: Sequence[Any]) -> dict[int, Any]:
    """The parked inputs that stay on the device because other blocks read them: place among the residuals → array."""
    waiting = [slot for slot in slots if slot.reading is not None]
    return {slot.place: spare for slot, spare in zip(waiting, spares, strict=True) if slot.reading and slot.reading.stays()}
