"""Compares two traces: pairs their module calls and measures the distances of inputs, outputs and cotangents."""

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
    """A PyTorch call and a Flax call that should compute the same.

    Attributes:
        torch, flax: the calls.
        around: the innermost pair of calls that encloses both; None for the outermost pair.
        distances: "input", "output", "state", "input cotangent", "output cotangent", "gradient" → label → distance, for all
            quantities present in both.
        floors: by the same kinds, the norm below which a reference cannot measure a relative error.
    """

    torch: ModuleCall
    flax: ModuleCall
    around: TensorPair | None
    distances: Mapping[str, Mapping[str, Distance]]
    floors: Mapping[str, float]

    def bad(self, kind: str) -> tuple[str, Distance] | None:
        """The label and the distance of the worst disagreement of a kind; None if none disagrees."""
        wrong = {what: found for what, found in self.distances[kind].items() if found.is_bad(self.floors[kind])}
        return max(wrong.items(), key=lambda entry: entry[1].relative(self.floors[kind]), default=None)

    @property
    def is_cut_otherwise(self) -> bool:
        """Whether the output cotangent differs but all results agree: then the dropped part lies outside this pair."""
        made = {**self.distances["input cotangent"], **self.distances["gradient"]}
        return bool(made and self.bad("output cotangent")) and not (self.bad("input cotangent") or self.bad("gradient"))

    def all_around(self) -> Iterator[TensorPair]:
        """The enclosing pairs, the innermost first."""
        pair = self.around
        while pair is not None:
            yield pair
            pair = pair.around


def modules(trace: Trace) -> list[MatchedModule]:
    """The modules of a trace, each once, by first call."""
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
    """The pairs of calls of matched modules, in the order in which PyTorch's calls ended; the loss is the last.

    `gradients` are Flax's gradients by PyTorch's parameter names, from a weight map. Without them, parameters with the same
    name in matched modules are compared.
    """
    floors = _floors(torch)
    flax_places = {call.name: place for place, call in enumerate(flax.calls)}
    owned = None if gradients is None else _by_owner(torch, matched, gradients)
    found: dict[int, TensorPair] = {}
    # A call ends after its inner calls: in reverse order, an enclosing pair comes before its inner pairs.
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
        # A parameter's gradient is the sum over all calls; the first call adds to it last in the backward pass.
        known = {} if call.number else None if owned is None else owned.get(call.path, {})
        found[place] = TensorPair(call, other, nearest, distances(call, other, known), floors)
    losses = (
        [TensorPair(torch.loss, flax.loss, None, distances(torch.loss, flax.loss), floors)] if torch.loss and flax.loss else []
    )
    return [*(found[place] for place in sorted(found)), *losses]


def distances(
    torch: ModuleCall, flax: ModuleCall, gradients: Mapping[str, Distance] | None = None
) -> dict[str, dict[str, Distance]]:
    """The distances between two calls, by kind; `gradients` are the distances of the parameters' gradients, if known."""
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
    """The pairs of inputs or outputs of two calls to compare, by position."""
    names = (f"{role}s", f"{role}_names")
    theirs, ours = ([getattr(call, name) for name in names] for call in (torch, flax))
    return pairs(theirs[0], ours[0], (theirs[1], ours[1]))


def _labels(role: str, which: Sequence[tuple[int, int]], torch: ModuleCall, flax: ModuleCall) -> dict[int, str]:
    """The labels of Flax's arrays: a name that is unique and in both calls, else a number."""
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
        if one is not None and other is not None:  # a gradient on one side only may belong to a constant or frozen array
            yield f"gradient of {labels[j]}", distance(one, other)


def _gradients(torch: ModuleCall, flax: ModuleCall) -> Iterator[tuple[str, Distance]]:
    for name, gradient in flax.gradients.items():
        other = torch.gradients.get(name, torch.gradients.get(GRADIENT_NAMES.get(name, name)))
        if other is not None and other.size == gradient.size:
            yield f"gradient of {name}", distance(other, gradient)


def _by_owner(torch: Trace, matched: Mapping[str, str], gradients: Mapping[str, np.ndarray]) -> dict[str, dict[str, Distance]]:
    """For every module the distances of its parameters' gradients, including those of inner modules without a counterpart."""
    called = {call.path for call in torch.calls if call.path in matched}
    found: dict[str, dict[str, Distance]] = {}
    for name in torch.gradients.keys() & gradients.keys():
        path, own = name.split("."), list[str]()
        while not own or "/".join(path) not in called:
            own.insert(0, path.pop())
        also = "".join(f", the same tensor as {other}" for other in torch.ties.get(name, ()))
        what = f"gradient of {'.'.join(own)}{also}"
        found.setdefault("/".join(path), {})[what] = distance(torch.gradients[name], gradients[name])
    return found


def _floors(torch: Trace) -> dict[str, float]:
    """For every kind, the norm that a tensor must exceed: a share of the joint norm of all tensors of the kind."""

    def floor(arrays: Iterator[np.ndarray | None]) -> float:
        return TOLERANCES["float64_floor"].value * math.hypot(
            *(norm(x) for x in arrays if x is not None and x.dtype.kind == "f")
        )

    values = floor(x for call in torch.calls for x in call.outputs)
    cotangents = floor(x for call in torch.calls for x in call.output_cotangents)
    gradients = floor(x for call in torch.calls for x in call.gradients.values())
    of_values = {"input": values, "output": values, "state": floor(x for call in torch.calls for x in call.state.values())}
    return of_values | {"input cotangent": cotangents, "output cotangent": cotangents, "gradient": gradients}
