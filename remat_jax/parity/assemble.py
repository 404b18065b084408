"""Assemble the module calls of a traced Flax step from the values at its taps; a loop's calls are listed one by one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from remat_jax.parity.capture import ModuleCall, Recomputed, Trace
from remat_jax.parity.recorder import RecordedTrace, Recorder
from remat_jax.parity.tapped import Label, TapPlace

Instance = tuple[int, tuple[int, ...]]
Key = tuple[int, ...]


class ParameterSlot(NamedTuple):
    """The owner of an array at a tap: a position in the trace's calls, the array's role, and its number in that role."""

    call: int
    role: str
    number: int


Slots = list[dict[tuple[int, ...], ParameterSlot]]
"""For every tap, and every iteration of its enclosing loops, the owner of the array."""


def assemble(
    places: Sequence[TapPlace],
    recorder: Recorder,
    hidden: frozenset[int],
    arrived: Sequence[np.ndarray],
    gradients: Mapping[str, np.ndarray],
) -> tuple[Trace, Slots]:
    """The calls of a step: `arrived` has each tap's array, stacked over its loops; `gradients` are by variable path."""
    seen, traced = _collected(places, arrived), recorder.calls
    kept = {key: one for key, one in seen.items() if one.keys["output"] and not _is_wrapped(key, seen, traced)}
    clock = {key: number for number, key in enumerate(sorted(time for one in kept.values() for time in one.times()))}
    ordered = sorted(kept, key=lambda key: (max(kept[key].keys["output"]), -key[0]))
    numbers, counts = {}, Counter[str]()
    for key in sorted(kept, key=lambda key: (kept[key].started, key[0])):
        numbers[key] = counts[kept[key].path]
        counts[kept[key].path] += 1
    place_of = {key: place for place, key in enumerate(ordered)}
    calls = tuple(
        ModuleCall(
            path=kept[key].path,
            kind=type(traced[key[0]].module).__name__,
            number=numbers[key],
            inputs=kept[key].arrays("input"),
            outputs=kept[key].arrays("output"),
            input_cotangents=kept[key].cotangents_of("input", key[0], recorder.differentiated),
            output_cotangents=kept[key].cotangents_of("output", key[0], recorder.differentiated),
            started=clock[kept[key].started],
            finished=clock[max(kept[key].keys["output"])],
            parent=None if (around := _parent(key, kept, traced)) is None else place_of[around],
            gradients=_own(traced[key[0]], key[1], gradients),
            state={traced[key[0]].state[which[1]]: x for which, x in kept[key].values.items() if which[0] == "state"},
            stale=kept[key].recomputed.stale,
            misled=kept[key].recomputed.misled,
            input_names=kept[key].names_of("input", traced[key[0]]),
            output_names=kept[key].names_of("output", traced[key[0]]),
        )
        for key in ordered
    )
    closed = tuple(sorted({"/".join(traced[number].path) for number in hidden}))
    # The loss ends after all modules, so removing it keeps the positions of their calls.
    loss = next((call for call, key in zip(calls, ordered, strict=True) if key[0] == recorder.loss), None)
    trace = Trace(tuple(call for call in calls if call is not loss), recorder.outputs, closed, loss, gradients)
    return trace, _slots(places, kept, place_of)


def _slots(places: Sequence[TapPlace], kept: Mapping[Instance, _Seen], place_of: Mapping[Instance, int]) -> Slots:
    slots: Slots = []
    for place in places:
        call, role, number = place.label
        slots.append({})
        for index, _, _ in place.instances():
            if (call, index) in kept:
                numbers = sorted(which[1] for which in kept[call, index].values if which[0] == role)
                slots[-1][index] = ParameterSlot(place_of[call, index], role, numbers.index(number))
    return slots


class _Seen:
    """One call of a module."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.keys: dict[str, list[Key]] = {"input": [], "output": [], "state": []}
        self.values: dict[tuple[str, int], np.ndarray] = {}
        self.cotangents: dict[tuple[str, int], np.ndarray] = {}
        self.recomputed = Recomputed()

    @property
    def started(self) -> Key:
        return min(self.keys["input"] or self.keys["output"])

    def times(self) -> list[Key]:
        return [self.started, max(self.keys["output"])]

    def add(self, place: TapPlace, key: Key, value: np.ndarray) -> None:
        which = (place.label.role, place.label.number)
        if place.what == "cotangent":
            self.cotangents[which] = self.cotangents[which] + value if which in self.cotangents else value
        elif which not in self.values:
            self.values[which] = value
            self.keys[place.label.role].append(key)
        else:  # a second value at a tap is a recomputation
            self.recomputed.compare(place.label.role, self.values[which], value)

    def arrays(self, role: str) -> tuple[np.ndarray, ...]:
        return tuple(self.values[which] for which in sorted(self.values) if which[0] == role)

    def names_of(self, role: str, call: RecordedTrace) -> tuple[str, ...]:
        return tuple(call.names.get(which, "") for which in sorted(self.values) if which[0] == role)

    def cotangents_of(self, role: str, call: int, differentiated: Set[Label]) -> tuple[np.ndarray | None, ...]:
        """The cotangents of a role's arrays; if none arrived, zeros, or None for an array that is not differentiated."""
        return tuple(
            self.cotangents.get(which, np.zeros_like(self.values[which])) if Label(call, *which) in differentiated else None
            for which in sorted(self.values)
            if which[0] == role
        )


def _collected(places: Sequence[TapPlace], arrived: Sequence[np.ndarray]) -> dict[Instance, _Seen]:
    seen: dict[Instance, _Seen] = {}
    for place, values in zip(places, arrived, strict=True):
        for index, path, key in place.instances():
            call = seen.setdefault((place.label.call, index), _Seen(path))
            call.add(place, key, values[index])
    return seen


def _is_wrapped(key: Instance, seen: Mapping[Instance, _Seen], traced: Sequence[RecordedTrace]) -> bool:
    """Whether a wrapper with the same path makes this call: `nn.remat` calls a module inside a module."""
    around = _parent(key, seen, traced)
    return around is not None and seen[around].path == seen[key].path and bool(seen[around].keys["output"])


def _parent(key: Instance, kept: Mapping[Instance, _Seen], traced: Sequence[RecordedTrace]) -> Instance | None:
    """The nearest enclosing call, in the same iteration of the loops that both calls are in."""
    number, index = key
    parent = traced[number].parent
    while parent is not None:
        for length in range(len(index), -1, -1):
            if (parent, index[:length]) in kept:
                return parent, index[:length]
        parent = traced[parent].parent
    return None


def _own(call: RecordedTrace, index: tuple[int, ...], gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradients of the module's own parameters; stacked gradients of a loop are indexed by the iteration."""
    selected = {}
    for name, parameter in call.parameters.items():
        path = re.sub(r"/(\d+)(?=/|$)", r"_\1", "/".join(("params", *call.path, name)))
        whole = gradients.get(path)
        if whole is not None and whole.ndim >= len(index) and whole.shape[len(index) :] == parameter.shape:
            selected[name] = whole[index]
    return selected
