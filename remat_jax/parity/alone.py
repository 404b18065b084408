"""Every Flax module by itself: each gets its original's inputs and cotangents, so that no error propagates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remat_jax.parity.align import best_layout, visible
from remat_jax.parity.assemble import Slots
from remat_jax.parity.capture import Trace
from remat_jax.parity.capture_flax import TracedPass, read
from remat_jax.parity.compared import TensorPair, compared, pairs_of
from remat_jax.parity.divergence import Divergence, divergence_of
from remat_jax.parity.tapped import TapPlace


def each_alone(
    step: TracedPass, slots: Slots, theirs: Trace, ours: Trace, matched: dict[str, str], plain: Sequence[TensorPair]
) -> tuple[Divergence, ...]:
    """Every module that is wrong by itself, in the order of execution; listed once, for its forward pass before backward."""
    modules = [pair for pair in plain if pair.flax is not ours.loss]
    trusted = [pair for pair in modules if not pair.bad("output") or all(around.bad("output") for around in pair.all_around())]
    calls = {id(call): place for place, call in enumerate(ours.calls)}
    chosen = {calls[id(pair.flax)]: number for number, pair in enumerate(trusted)}
    again, _ = read(step, substitutes(step.places, slots, trusted, chosen))
    before = {pair.torch.name: pair for pair in trusted}
    listed: dict[str, Divergence] = {}

    def add(pair: TensorPair | None, wrong: Any, note: str = "") -> None:
        if pair is not None and wrong:
            what, error = wrong
            listed.setdefault(pair.torch.name, divergence_of(pair, what, error, note))

    judged = [pair for pair in compared(theirs, again, matched) if pair.torch.name in before]
    for pair in judged:
        add(pair.around, pair.bad("input") if before[pair.torch.name].bad("output") else None, f"before {pair.flax.name!r}")
        add(pair, pair.bad("output"))
    for pair in judged:
        was = before[pair.torch.name]
        add(pair.around, None if was.is_cut_otherwise else pair.bad("output cotangent"), f"behind {pair.flax.name!r}")
        add(pair, pair.bad("input cotangent") or pair.bad("gradient"))
    order = {call.name: call.finished for call in theirs.calls}
    return tuple(sorted(listed.values(), key=lambda one: order[one.torch_path]))


def substitutes(
    places: Sequence[TapPlace], slots: Slots, found: Sequence[TensorPair], calls: Mapping[int, int]
) -> dict[int, Any]:
    """The argument `given` of `read`: PyTorch's activations and cotangents in place of Flax's, for the calls of a pair.

    `calls` maps a Flax call's position in its trace to the position of its pair. Masks, integers and arrays without a
    counterpart keep Flax's values.
    """
    given: dict[int, Any] = {}
    for number, (place, who) in enumerate(zip(places, slots, strict=True)):
        for index, slot in who.items():
            if slot.call in calls and slot.role != "state":
                reference = _reference(found[calls[slot.call]], slot.role, slot.number, place.what)
                _put(given, number, index, place.loops, reference)
    return given


def _reference(pair: TensorPair, role: str, number: int, what: str) -> np.ndarray | None:
    theirs, ours = (pair.torch.inputs, pair.flax.inputs) if role == "input" else (pair.torch.outputs, pair.flax.outputs)
    other = next((i for i, j in pairs_of(role, pair.torch, pair.flax) if j == number), None)
    if other is None or ours[number].dtype.kind != "f" or visible(ours[number]) is not None:
        return None
    if what == "value":
        return best_layout(theirs[other], ours[number])
    both = (side.input_cotangents if role == "input" else side.output_cotangents for side in (pair.torch, pair.flax))
    if role == "output" and pair.is_cut_otherwise:
        return None
    cotangent, found = (cotangents[k] for cotangents, k in zip(both, (other, number), strict=True))
    if cotangent is None or found is None:
        return None
    return best_layout(cotangent, found)


def _put(given: dict[int, Any], number: int, index: tuple[int, ...], loops: tuple[int, ...], value: Any) -> None:
    """Set `given[number][i][j]… = value`, creating lists as long as the loops."""
    if not index:
        given[number] = value
        return
    rows = given.setdefault(number, _empty(loops))
    for i in index[:-1]:
        rows = rows[i]
    rows[index[-1]] = value


def _empty(loops: tuple[int, ...]) -> Any:
    return [_empty(loops[1:]) for _ in range(abs(loops[0]))] if loops else None
