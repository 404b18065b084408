"""Arrays that several blocks read: a mask, positions, an encoder's output.

Such an array stays on the device. It is alive from its first reader until the backward pass of its last reader, so offloading
it frees nothing, and each block would spend the time of a copy to fetch it.

While the first block is traced, it is not known whether another block will read the array. A `Reading` counts the readers so
far. If more may follow, the backward pass gets both the array and its copy on the host (`choice_p`). The backward pass is
traced when all blocks are known, and reads one of the two; the compiler drops the other.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from remat_jax import compat


@dataclass(eq=False)
class Reading:
    """The blocks that read one array.

    Attributes:
      aval: the array's type.
      blocks: how many blocks read it.
      in_every_round: whether a block in a loop reads it from outside the loop, so that every iteration reads the same array.
      name: its residual name in the first block whose policy offloads it; empty if no policy does.
    """

    aval: Any
    blocks: int = 0
    in_every_round: bool = False
    name: str = ""
    _stays: bool | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several blocks, or several iterations of a loop, are known to read it by now."""
        return self.in_every_round or self.blocks > 1

    @property
    def left(self) -> bool:
        """Whether a backward pass has read it from the host already."""
        return self._stays is False

    def stays(self) -> bool:
        """Whether it stays on the device. The first answer is final."""
        if self._stays is None:
            self._stays = self.is_shared
        return self._stays


# (id of an array, id of the program that reads it) → its reading. An entry dies with its array, so no trace is kept alive.
_readings: dict[tuple[int, int], tuple[weakref.ref[Any], Reading]] = {}
_collected: ContextVar[list[Reading] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[Reading]]:
    """Collects the reading of every array that a block reads inside this context, each once."""
    collected: list[Reading] = []
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


def readings(values: Sequence[Any], names: Sequence[str | None]) -> dict[int, Reading]:
    """Record that a block reads the `values` that have a name: index → reading. Empty if JAX runs op by op."""
    if not compat.is_staging():
        return {}
    by_place: dict[int, Reading] = {}
    counted: set[int] = set()
    for place, (value, name) in enumerate(zip(values, names, strict=True)):
        if name is None or not getattr(value, "ndim", 0):
            continue
        by_place[place] = reading = _reading(value)
        if id(value) not in counted:
            counted.add(id(value))
            reading.blocks += 1
            reading.in_every_round |= compat.is_fixed_in_loops(value)
    return by_place


def note_fixed(values: Sequence[Any]) -> None:
    """Record that blocks in a loop read the same `values` in every iteration."""
    for value in values:
        if getattr(value, "ndim", 0):
            _reading(value).in_every_round = True


def note_loop_inputs(eqn: Any, body_inputs: Sequence[Any]) -> None:
    """Record which inputs of a loop's body are the same in every iteration, when the body of the loop `eqn` is traced again."""
    if eqn.primitive.name == "scan":
        note_fixed(body_inputs[: compat.scan_layout(eqn)[0]])


def _reading(value: Any) -> Reading:
    key = id(value), compat.program_id(value)
    itself, reading = _readings.get(key, (None, None))
    if reading is None or itself is None or itself() is not value or reading.left:
        reading = Reading(compat.on_device(value))
        _readings[key] = weakref.ref(value, functools.partial(_forget, key)), reading
    collected = _collected.get()
    if collected is not None and all(one is not reading for one in collected):
        collected.append(reading)
    return reading


def _forget(key: tuple[int, int], _: Any) -> None:
    _readings.pop(key, None)


def staying(read: Mapping[int, Reading]) -> frozenset[int]:
    """The indices of arrays that several blocks are known to read by now."""
    return frozenset(place for place, reading in read.items() if reading.is_shared)


# The identity, on each of the two arrays that a backward pass may read: the one `on_host` or the one on the device.
# The `reading` decides between them.
choice_p = jex.Primitive("shared_input_choice")


def choice(value: Any, name: str, reading: Reading, *, on_host: bool) -> Any:
    """`value`, marked as the array to read if the array `name` is offloaded (`on_host`), or if it stays on the device."""
    return choice_p.bind(value, name=name, reading=reading, on_host=on_host)


def is_taken(eqn: Any) -> bool | None:
    """Whether the backward pass reads the output of the choice `eqn`; None if `eqn` is no choice."""
    if eqn.primitive is not choice_p:
        return None
    return bool(eqn.params["reading"].stays() != eqn.params["on_host"])


def offloaded_name(eqn: Any) -> str | None:
    """The residual name of the array that the choice `eqn` offloads; None if `eqn` is no such choice."""
    return eqn.params["name"] if eqn.primitive is choice_p and eqn.params["on_host"] else None


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return choice_p.bind(*primals, **params), tangents[0]


choice_p.def_impl(lambda value, **_: value)
choice_p.to_lojax = lambda value, **_: value
choice_p.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(choice_p, lambda _, value, **__: [value])
ad.primitive_jvps[choice_p] = _jvp
batching.primitive_batchers[choice_p] = lambda args, axes, **params: (choice_p.bind(*args, **params), axes[0])
