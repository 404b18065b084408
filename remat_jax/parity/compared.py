"""Two traces side by side: which calls are which, and how far apart what goes in and out of them is, in both passes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remat_jax.parity.align import Distance, distance, norm, pairs
from remat_jax.parity.capture import Cotangents, ModuleCall, Trace
from remat_jax.parity.match import MatchedModule
from remat_jax.parity.tolerances import TOLERANCES

GRADIENT_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
STATE_NAMES = {"mean": "running_mean", "var": "running_var"}


@dataclass(frozen=True, eq=False)
class TensorPair:
    """A call of either model that are to do the same.

    Attributes:
        torch, flax: the calls.
        around: the pair of the nearest calls around both that are a pair as well; None for the outermost.
        distances: "input", "output", "state", "input cotangent", "output cotangent", "gradient" → what → how far apart, as far
            as there is something to compare.
        floors: the same, without what → the size below which a reference is no measure of an error.
    """

    torch: ModuleCall
    flax: ModuleCall
    around: TensorPair | None
    distances: Mapping[str, Mapping[str, Distance]]
    floors: Mapping[str, float]

    def bad(self, kind: str) -> tuple[str, Distance] | None:
        """The worst of the things of a kind that disagree, and how far apart it is."""
        wrong = {what: found for what, found in self.distances[kind].items() if found.is_bad(self.floors[kind])}
        return max(wrong.items(), key=lambda entry: entry[1].relative(self.floors[kind]), default=None)

    @property
    def is_cut_otherwise(self) -> bool:
        """Whether the cotangent is another one and all that is made of it the same: what leaves a part out is outside here."""
        made = {**self.distances["input cotangent"], **self.distances["gradient"]}
        return bool(made and self.bad("output cotangent")) and not (self.bad("input cotangent") or self.bad("gradient"))

    def all_around(self) -> Iterator[TensorPair]:
        """The pairs around this one, the innermost first."""
        pair = self.around
        while pair is not None:
            yield pair
            pair = pair.around


def modules(trace: Trace) -> list[MatchedModule]:
    """The modules of a trace, each once, in the order of their first calls."""
    leaves = trace.leaves()
    first = {call.path: (place, call) for place, call in reversed(list(enumerate(trace.calls))) if not call.number}
    ordered = sorted(first.values(), key=lambda entry: entry[1].started)
    return [
        MatchedModule(
            call.path, call.kind, call.outputs[0].size if call.outputs else None, place in leaves, bool(call.gradients)
        )
        for place, call in ordered
    ]


def compared(
    torch: Trace, flax: Trace, matched: Mapping[str, str], gradients: Mapping[str, np.ndarray] | None = None
) -> list[TensorPair]:
    """The pairs of calls, call by call of matched modules, in the order in which PyTorch's ended; the loss is the last.

    `gradients` are Flax's by the names of PyTorch's parameters, where a weight map tells them; without one, parameters of one
    name in matched modules are compared.
    """
    floors = _floors(torch)
    flax_places = {call.name: place for place, call in enumerate(flax.calls)}
    owned = None if gradients is None else _by_owner(torch, matched, gradients)
    found: dict[int, TensorPair] = {}
    # Calls end after those inside them: from the last on, what is around a call is there already.
    for place, call in reversed(list(enumerate(torch.calls))):
        if call.path not in matched:
            continue
        name = matched[call.path] + (f"#{call.number}" if call.number else "")
        if name not in flax_places:
            continue
        other = flax.calls[flax_places[name]]
        outside = {id(flax.calls[index]) for index in flax.ancestors(flax_places[name])}
        around = (found[index] for index in torch.ancestors(place) if index in found)
        nearest = next((pair for pair in around if id(pair.flax) in outside), None)
        # The gradient of a parameter is the sum over all calls: the first call is the last to add to it.
        known = {} if call.number else None if owned is None else owned.get(call.path, {})
        found[place] = TensorPair(call, other, nearest, distances(call, other, known), floors)
    losses = (
        [TensorPair(torch.loss, flax.loss, None, distances(torch.loss, flax.loss), floors)] if torch.loss and flax.loss else []
    )
    return [*(found[place] for place in sorted(found)), *losses]


def distances(
    torch: ModuleCall, flax: ModuleCall, gradients: Mapping[str, Distance] | None = None
) -> dict[str, dict[str, Distance]]:
    """How far apart what two calls got and gave is, kind by kind; `gradients` are those of the parameters, where known."""
    inputs, outputs = pairs_of("input", torch, flax), pairs_of("output", torch, flax)
    names = {"input": _labels("input", inputs, torch, flax), "output": _labels("output", outputs, torch, flax)}
    return {
        "input": {names["input"][j]: distance(torch.inputs[i], flax.inputs[j]) for i, j in inputs},
        "output": {names["output"][j]: distance(torch.outputs[i], flax.outputs[j]) for i, j in outputs},
        "state": dict(_state(torch, flax)),
        "input cotangent": dict(_cotangents(names["input"], inputs, torch.input_cotangents, flax.input_cotangents)),
        "output cotangent": dict(_cotangents(names["output"], outputs, torch.output_cotangents, flax.output_cotangents)),
        "gradient": dict(_gradients(torch, flax) if gradients is None else gradients),
    }


def pairs_of(role: str, torch: ModuleCall, flax: ModuleCall) -> list[tuple[int, int]]:
    """Which of the inputs or outputs of two calls to compare, by their places."""
    names = (f"{role}s", f"{role}_names")
    theirs, ours = ([getattr(call, name) for name in names] for call in (torch, flax))
    return pairs(theirs[0], ours[0], (theirs[1], ours[1]))


def _labels(role: str, which: Sequence[tuple[int, int]], torch: ModuleCall, flax: ModuleCall) -> dict[int, str]:
    """What Flax's arrays are called: by a name that both sides and no other array have, else by number."""
    theirs, ours = (getattr(call, f"{role}_names") for call in (torch, flax))
    named = {j: ours[j] for i, j in which if i < len(theirs) and j < len(ours) and theirs[i] == ours[j]}
    once = {j for j, name in named.items() if name and ours.count(name) == 1}
    return {j: f"{role} {named[j] if j in once else j}" for _, j in which}


def _state(torch: ModuleCall, flax: ModuleCall) -> Iterator[tuple[str, Distance]]:
    for name, value in flax.state.items():
        other = torch.state.get(STATE_NAMES.get(name, name))
        if other is not None and other.size == value.size and value.dtype.kind == "f":
            yield f"{name} afterwards", distance(other, value)


def _cotangents(
    labels: Mapping[int, str], which: Sequence[tuple[int, int]], torch: Cotangents, flax: Cotangents
) -> Iterator[tuple[str, Distance]]:
    for i, j in which:
        one, other = torch[i], flax[j]
        if one is not None and other is not None:  # on one side alone it may be a constant, or frozen
            yield f"gradient of {labels[j]}", distance(one, other)


def _gradients(torch: ModuleCall, flax: ModuleCall) -> Iterator[tuple[str, Distance]]:
    for name, gradient in flax.gradients.items():
        other = torch.gradients.get(name, torch.gradients.get(GRADIENT_NAMES.get(name, name)))
        if other is not None and other.size == gradient.size:
            yield f"gradient of {name}", distance(other, gradient)


def _by_owner(torch: Trace, matched: Mapping[str, str], gradients: Mapping[str, np.ndarray]) -> dict[str, dict[str, Distance]]:
    """For every module how far apart its parameters' gradients are, and those of modules inside that have no counterpart."""
    called = {call.path for call in torch.calls if call.path in matched}
    found: dict[str, dict[str, Distance]] = {}
    for name in torch.gradients.keys() & gradients.keys():
        path, own = name.split("."), list[str]()
        while not own or "/".join(path) not in called:
            own.insert(0, path.pop())
        also = "".join(f", one tensor with {other}" for other in torch.ties.get(name, ()))
        what = f"gradient of {'.'.join(own)}{also}"
        found.setdefault("/".join(path), {})[what] = distance(torch.gradients[name], gradients[name])
    return found


def _floors(torch: Trace) -> dict[str, float]:
    """For every kind of quantity the part of the norm of all of them together that a tensor's own norm must exceed."""

    def floor(arrays: Iterator[np.ndarray | None]) -> float:
        return TOLERANCES["float64_floor"].value * math.hypot(
            *(norm(x) for x in arrays if x is not None and x.dtype.kind == "f")
        )

    values = floor(x for call in torch.calls for x in call.outputs)
    cotangents = floor(x for call in torch.calls for x in call.output_cotangents)
    gradients = floor(x for call in torch.calls for x in call.gradients.values())
    of_values = {"input": values, "output": values, "state": floor(x for call in torch.calls for x in call.state.values())}
    return of_values | {"input cotangent": cotangents, "output cotangent": cotangents, "gradient": gradients}
