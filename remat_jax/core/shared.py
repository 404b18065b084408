"""Arrays that several blocks read: a mask, positions, an encoder's output.

Such an array is alive from its first reader to the last one's backward pass whatever any of them does with it, so that sending
it to the host frees nothing and fetching it once for each block costs the time of as many copies. It stays on the device.

Whether another block will read an array is not known while the first block is traced. What is known at that time goes into a
`Reading`, and where the answer must wait the backward pass is given both the array and its copy on the host (`choice_p`); the
backward pass is traced when all blocks are known, and takes one of the two. The compiler drops the other.
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
      aval: its type.
      blocks: how many blocks read it.
      in_every_round: whether a block in a loop reads it from outside the loop: the same array in every round.
      name: its residual name in the first block whose policy offloads it; empty where no policy does.
    """

    aval: Any
    blocks: int = 0
    in_every_round: bool = False
    name: str = ""
    _stays: bool | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several blocks, or rounds of a loop, read it, as far as is known now."""
        return self.in_every_round or self.blocks > 1

    @property
    def left(self) -> bool:
        """Whether a backward pass has taken it from the host already."""
        return self._stays is False

    def stays(self) -> bool:
        """Whether it stays on the device; the first answer holds."""
        if self._stays is None:
            self._stays = self.is_shared
        return self._stays


# By the id of an array and that of the program that reads it. An entry goes with its array, so that no trace is kept alive.
_readings: dict[tuple[int, int], tuple[weakref.ref[Any], Reading]] = {}
_collected: ContextVar[list[Reading] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[Reading]]:
    """While this holds, every array that a block reads is entered in the list once."""
    found: list[Reading] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def readings(values: Sequence[Any], names: Sequence[str | None]) -> dict[int, Reading]:
    """Note that a block reads those of `values` that have a name: place → who reads it. Empty where ops run one by one."""
    if not compat.is_staging():
        return {}
    found: dict[int, Reading] = {}
    counted: set[int] = set()
    for place, (value, name) in enumerate(zip(values, names, strict=True)):
        if name is None or not getattr(value, "ndim", 0):
            continue
        found[place] = reading = _reading(value)
        if id(value) not in counted:
            counted.add(id(value))
            reading.blocks += 1
            reading.in_every_round |= compat.is_fixed_in_loops(value)
    return found


def note_fixed(values: Sequence[Any]) -> None:
    """Note that blocks in a loop read the same `values` in every round."""
    for value in values:
        if getattr(value, "ndim", 0):
            _reading(value).in_every_round = True


def note_loop_inputs(eqn: Any, body_inputs: Sequence[Any]) -> None:
    """Note which inputs of the body of the loop `eqn` are the same in every round, where the body is traced again."""
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
    """The places of arrays that several blocks read, as far as is known now."""
    return frozenset(place for place, reading in read.items() if reading.is_shared)


# An array that the backward pass may be given, `on_host` or as it is: its value. The `reading` says which of the two is taken.
choice_p = jex.Primitive("shared_input_choice")


def choice(value: Any, name: str, reading: Reading, *, on_host: bool) -> Any:
    """`value`, marked as what the backward pass reads where the array `name` is offloaded (`on_host`) or where it stays."""
    return choice_p.bind(value, name=name, reading=reading, on_host=on_host)


def is_taken(eqn: Any) -> bool | None:
    """Whether the backward pass reads the choice that `eqn` is; None of any other equation."""
    if eqn.primitive is not choice_p:
        return None
    return bool(eqn.params["reading"].stays() != eqn.params["on_host"])


def offloaded_name(eqn: Any) -> str | None:
    """The residual name of what `eqn` chooses to offload; None of any other equation."""
    return eqn.params["name"] if eqn.primitive is choice_p and eqn.params["on_host"] else None


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return choice_p.bind(*primals, **params), tangents[0]


choice_p.def_impl(lambda value, **_: value)
choice_p.to_lojax = lambda value, **_: value
choice_p.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(choice_p, lambda _, value, **__: [value])
ad.primitive_jvps[choice_p] = _jvp
batching.primitive_batchers[choice_p] = lambda args, axes, **params: (choice_p.bind(*args, **params), axes[0])
