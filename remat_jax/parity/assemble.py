"""Assemble the module calls of a traced Flax step from the values at its taps; a loop's calls are listed one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from remat_jax.parity.capture import RecordedCall, Trace, call_numbers
from remat_jax.parity.recorder import RecordedTrace, Recorder
from remat_jax.parity.tapped import Label, TapPlace

Instance = tuple[int, tuple[int, ...]]
"""A traced call, and the iteration of the loops around it."""
Key = tuple[int, ...]

Owners = list[dict[tuple[int, ...], Label]]
"""For every tap, and every iteration of its loops, the array that it is on; the label's call is a position in the trace."""


def assemble(
    places: Sequence[TapPlace],
    recorder: Recorder,
    hidden: frozenset[int],
    arrived: Sequence[np.ndarray],
    gradients: Mapping[str, np.ndarray],
) -> tuple[Trace, Owners]:
    """The calls of a step: `arrived` has each tap's array, stacked over its loops; `gradients` are by variable path."""
    traced = recorder.calls
    recorded = _collected(places, arrived, recorder)
    kept = {key: call for key, call in recorded.items() if call.keys["output"] and not _is_wrapped(key, recorded, traced)}
    begun = sorted(kept, key=lambda key: (kept[key].started, key[0]))
    ended = sorted(kept, key=lambda key: (max(kept[key].keys["output"]), -key[0]))
    started = {key: place for place, key in enumerate(begun)}
    numbers = dict(zip(begun, call_numbers(kept[key].path for key in begun), strict=True))
    place_of = {key: place for place, key in enumerate(ended)}
    calls = tuple(
        kept[key].module_call(
            path=kept[key].path,
            kind=type(traced[key[0]].module).__name__,
            number=numbers[key],
            started=started[key],
            parent=None if (around := _parent(key, kept, traced)) is None else place_of[around],
            gradients=_own_gradients(traced[key[0]], key[1], gradients),
            state={traced[key[0]].state[slot[1]]: kept[key].values[slot] for slot in kept[key].slots("state")},
        )
        for key in ended
    )
    hidden_paths = tuple(sorted({"/".join(traced[number].path) for number in hidden}))
    # The loss ends after all modules, so removing it keeps the positions of their calls.
    loss = next((call for call, key in zip(calls, ended, strict=True) if key[0] == recorder.loss), None)
    trace = Trace(tuple(call for call in calls if call is not loss), recorder.outputs, hidden_paths, loss, gradients)
    return trace, _owners(places, kept, place_of)


def _owners(places: Sequence[TapPlace], kept: Mapping[Instance, _TappedCall], place_of: Mapping[Instance, int]) -> Owners:
    owners: Owners = []
    for place in places:
        call, role, number = place.label
        owners.append({})
        for index, _, _ in place.instances():
            if (call, index) in kept:
                numbers = [slot[1] for slot in kept[call, index].slots(role)]
                owners[-1][index] = Label(place_of[call, index], role, numbers.index(number))
    return owners


class _TappedCall(RecordedCall):
    """A call, with the positions of its taps in the order of execution."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.keys: dict[str, list[Key]] = {"input": [], "output": [], "state": []}

    @property
    def started(self) -> Key:
        return min(self.keys["input"] or self.keys["output"])

    def add(self, place: TapPlace, key: Key, value: np.ndarray) -> None:
        slot = (place.label.role, place.label.number)
        if place.what == "cotangent":
            self.add_cotangent(slot, value)
        elif slot in self.values:  # a second value at a tap is a recomputation
            self.compare(slot, value)
        else:
            self.values[slot] = value
            self.keys[place.label.role].append(key)


def _collected(places: Sequence[TapPlace], arrived: Sequence[np.ndarray], recorder: Recorder) -> dict[Instance, _TappedCall]:
    calls: dict[Instance, _TappedCall] = {}
    for place, values in zip(places, arrived, strict=True):
        for index, path, key in place.instances():
            call = calls.setdefault((place.label.call, index), _TappedCall(path))
            call.add(place, key, values[index])
    for (number, _), call in calls.items():
        call.names = recorder.calls[number].names
        for slot, value in call.values.items():
            if Label(number, *slot) in recorder.differentiated:
                call.cotangents.setdefault(slot, np.zeros_like(value))
    return calls


def _is_wrapped(key: Instance, calls: Mapping[Instance, _TappedCall], traced: Sequence[RecordedTrace]) -> bool:
    """Whether a wrapper with the same path makes this call: `nn.remat` calls a module inside a module."""
    around = _parent(key, calls, traced)
    return around is not None and calls[around].path == calls[key].path and bool(calls[around].keys["output"])


def _parent(key: Instance, kept: Mapping[Instance, _TappedCall], traced: Sequence[RecordedTrace]) -> Instance | None:
    """The nearest enclosing call, in the same iteration of the loops that both calls are in."""
    number, index = key
    parent = traced[number].parent
    while parent is not None:
        for length in range(len(index), -1, -1):
            if (parent, index[:length]) in kept:
                return parent, index[:length]
        parent = traced[parent].parent
    return None


def _own_gradients(call: RecordedTrace, index: tuple[int, ...], gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradients of the module's own parameters; stacked gradients of a loop are indexed by the iteration."""
    selected = {}
    for name, parameter in call.parameters.items():
        path = re.sub(r"/(\d+)(?=/|$)", r"_\1", "/".join(("params", *call.path, name)))
        whole = gradients.get(path)
        if whole is not None and whole.ndim >= len(index) and whole.shape[len(index) :] == parameter.shape:
            selected[name] = whole[index]
    return selected
