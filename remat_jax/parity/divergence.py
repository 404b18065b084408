"""Compare two traces: pair their calls, measure the distances between their arrays, and find the first pair that diverges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from remat_jax.parity.align import Distance, distance, pairs, shown_norm
from remat_jax.parity.capture import LOSS, ModuleCall, Trace
from remat_jax.parity.match import MatchedModule, sort_of
from remat_jax.parity.tolerances import TOLERANCES

_TORCH_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "mean": "running_mean", "var": "running_var"}
_OTHER_INPUTS = "the two models get different inputs"


@dataclass(frozen=True)
class Divergence:
    """A module that computes something different from its original.

    Attributes:
        torch_path, flax_path: the module's path in each model; "" is the whole model.
        what: the array that differs, such as "output 0", "gradient of input 0" or "gradient of kernel".
        error, reference: the norm of the difference, and the norm of PyTorch's array, in float64.
        note: a possible explanation, such as an inner module that ran in only one of the models.

    >>> print(Divergence("ffn.up", "ffn/up", "output 0", error=0.5, reference=10.0))
    ffn/up against ffn.up: output 0 is 0.5 off, of 10
    """

    torch_path: str
    flax_path: str
    what: str
    error: float
    reference: float
    note: str = ""

    def __str__(self) -> str:
        """One line that names both modules and how far apart they are."""
        torch, flax = (path or "(the whole model)" for path in (self.torch_path, self.flax_path))
        line = f"{flax} against {torch}: {self.what} is {self.error:.2g} off, of {self.reference:.2g}"
        return f"{line} ({self.note})" if self.note else line


@dataclass(frozen=True, eq=False)
class TensorPair:
    """A PyTorch call and a Flax call that should compute the same values.

    Attributes:
        around: the pairs whose calls enclose both calls, innermost first.
        distances: kind ("input", "output", "state", "input cotangent", "output cotangent", "gradient") → label of an array
            (such as "output 0") → distance.
        floors: kind → a norm; an error is divided by the reference's norm, or by the floor if the floor is larger.
    """

    torch: ModuleCall
    flax: ModuleCall
    around: tuple[TensorPair, ...]
    distances: Mapping[str, Mapping[str, Distance]]
    floors: Mapping[str, float]

    def bad(self, kind: str) -> tuple[str, Distance] | None:
        """Of the arrays of one kind, the label and distance of the array that differs most; None if all agree."""
        floor = self.floors[kind]
        wrong = [(label, apart) for label, apart in self.distances[kind].items() if apart.is_bad(floor)]
        return max(wrong, key=lambda entry: entry[1].relative(floor), default=None)

    def divergence(self, what: str, apart: Distance, note: str = "") -> Divergence:
        """A `Divergence` at the pair's modules."""
        return Divergence(self.torch.name, self.flax.name, what, apart.error, apart.reference, note)

    @property
    def is_stopped(self) -> bool:
        """Whether the module's outputs have cotangents in PyTorch, and none in Flax, where it stops their gradients."""
        theirs = [x for x in self.torch.output_cotangents if x is not None]
        return any(map(np.any, theirs)) and not any(x is not None for x in self.flax.output_cotangents)

    @property
    def is_cut_otherwise(self) -> bool:
        """Whether the output cotangent differs, but without effect on the input cotangents and parameter gradients."""
        made = {**self.distances["input cotangent"], **self.distances["gradient"]}
        return bool(made and self.bad("output cotangent")) and not (self.bad("input cotangent") or self.bad("gradient"))


def modules(trace: Trace) -> list[MatchedModule]:
    """The modules of a trace, each once, in the order of their first calls.

    The kind of a module without inner modules and weights is "norm" if it normalises, whatever the name of its class.
    """
    callers = {trace.calls[call.parent].name for call in trace.calls if call.parent is not None}
    first = sorted((call for call in trace.calls if not call.number), key=lambda call: call.started)
    sizes = [call.outputs[0].size if call.outputs else None for call in first]
    return [
        MatchedModule(
            call.path, _kind(call, is_leaf=call.name not in callers), size, call.name not in callers, bool(call.gradients)
        )
        for call, size in zip(first, sizes, strict=True)
    ]


def _kind(call: ModuleCall, *, is_leaf: bool) -> str:
    is_own = is_leaf and sort_of(call.kind) == "other" and not call.gradients
    return "norm" if is_own and _normalises(call) else call.kind


def _normalises(call: ModuleCall) -> bool:
    """Whether the outputs of different positions have almost the same norm over the features, and the inputs have not."""
    if len(call.inputs) != 1 or len(call.outputs) != 1 or call.inputs[0].shape != call.outputs[0].shape:
        return False
    x, y = call.inputs[0], call.outputs[0]
    axes = {x.ndim - 1, 1} if x.ndim > 1 and x.dtype.kind == y.dtype.kind == "f" else set()  # PyTorch's images: axis 1
    return any(_spread(y, axis) < _NORMALISED * _spread(x, axis) for axis in axes)


_NORMALISED = 0.2
"""`_normalises`: the largest ratio of the outputs' spread to the inputs'; an epsilon leaves some spread."""


def _spread(x: np.ndarray, axis: int) -> float:
    """The standard deviation of the norms over an axis, relative to their mean."""
    with np.errstate(invalid="ignore"):  # infinite numbers
        norms = np.linalg.norm(x, axis=axis)
        return float(np.std(norms) / (np.mean(norms) or 1.0))


def compared(
    torch: Trace, flax: Trace, matched: Mapping[str, str], gradients: Mapping[str, np.ndarray] | None = None
) -> list[TensorPair]:
    """The pairs of calls of matched modules, in the order in which PyTorch's calls ended; the last pair is the loss.

    `gradients` are Flax's gradients, which a weight map has converted to PyTorch's names and shapes. If None, gradients of
    equal names are compared.
    """
    floors = _floors(torch)
    flax_calls = {(call.path, call.number): call for call in flax.calls}
    by_owner = None if gradients is None else _by_owner(torch, matched, gradients)
    paired: dict[ModuleCall, TensorPair] = {}
    # A call ends after its inner calls, so in reverse order an enclosing pair comes before its inner pairs.
    for call in reversed(torch.calls):
        if call.path not in matched or (matched[call.path], call.number) not in flax_calls:
            continue
        other = flax_calls[matched[call.path], call.number]
        outside = set(flax.ancestors(other))
        enclosing = (paired[outer] for outer in torch.ancestors(call) if outer in paired)
        around = next(((pair, *pair.around) for pair in enclosing if pair.flax in outside), ())
        # A parameter's gradient, summed over all calls, is compared at the first call, which the backward pass reaches last.
        of_gradients = {} if call.number else None if by_owner is None else by_owner.get(call.path, {})
        paired[call] = TensorPair(call, other, around, _distances(call, other, of_gradients), floors)
    pairs_of_calls = list(paired.values())[::-1]
    if torch.loss and flax.loss:
        pairs_of_calls.append(TensorPair(torch.loss, flax.loss, (), _distances(torch.loss, flax.loss), floors))
    return pairs_of_calls


def _distances(
    torch: ModuleCall, flax: ModuleCall, gradients: Mapping[str, Distance] | None = None
) -> dict[str, dict[str, Distance]]:
    """The distances between two calls, by kind; `gradients` has the distances of the parameters' gradients, if known."""
    distances: dict[str, dict[str, Distance]] = {
        "state": _by_name("{} afterwards", torch.state, flax.state),
        "gradient": _by_name("gradient of {}", torch.gradients, flax.gradients) if gradients is None else dict(gradients),
    }
    for role in ("input", "output"):
        values, cotangents = dict[str, Distance](), dict[str, Distance]()
        names = [array.name for array in flax.arrays_of(role)]
        for i, j in pairs_of(role, torch, flax):
            theirs, ours = torch.arrays_of(role)[i], flax.arrays_of(role)[j]
            # An array is labelled by a name that is unique and in both calls, else by its number.
            is_named = ours.name and ours.name == theirs.name and names.count(ours.name) == 1
            label = f"{role} {ours.name if is_named else j}"
            values[label] = distance(theirs.value, ours.value)
            # A cotangent that exists in only one framework is ignored: the array may be constant or frozen in the other.
            if theirs.cotangent is not None and ours.cotangent is not None:
                padding = torch.padding if role == "output" else None
                both = [_without(padding, cotangent) for cotangent in (theirs.cotangent, ours.cotangent)]
                cotangents[f"gradient of {label}"] = distance(*both)
        distances |= {role: values, f"{role} cotangent": cotangents}
    return distances


def _without(padding: np.ndarray | None, cotangent: np.ndarray) -> np.ndarray:
    """The cotangent of an embedding's output, with zeros at the padding index, where PyTorch ignores it."""
    if padding is None or cotangent.shape[:-1] != padding.shape:
        return cotangent
    return np.where(padding[..., None], 0, cotangent)


def pairs_of(role: str, torch: ModuleCall, flax: ModuleCall) -> list[tuple[int, int]]:
    """Index pairs (PyTorch, Flax) of two calls' inputs, or of their outputs: the arrays to compare."""
    theirs, ours = torch.arrays_of(role), flax.arrays_of(role)
    names = [array.name for array in theirs], [array.name for array in ours]
    return pairs([array.value for array in theirs], [array.value for array in ours], names)


def _by_name(label: str, torch: Mapping[str, np.ndarray], flax: Mapping[str, np.ndarray]) -> dict[str, Distance]:
    """The distances of a module's arrays that have the same name in both frameworks, or names paired in `_TORCH_NAMES`."""
    distances = {}
    for name, ours in flax.items():
        theirs = torch.get(name, torch.get(_TORCH_NAMES.get(name, name)))
        if theirs is not None and theirs.size == ours.size and ours.dtype.kind == "f":
            distances[label.format(name)] = distance(theirs, ours)
    return distances


def _by_owner(torch: Trace, matched: Mapping[str, str], gradients: Mapping[str, np.ndarray]) -> dict[str, dict[str, Distance]]:
    """Path of the innermost matched module that contains a parameter → label → distance of the parameter's gradient."""
    called = {call.path for call in torch.calls if call.path in matched}
    by_owner: dict[str, dict[str, Distance]] = {}
    for name in torch.gradients.keys() & gradients.keys():
        path, inside = name.split("."), list[str]()
        while not inside or "/".join(path) not in called:
            inside.insert(0, path.pop())
        also = "".join(f", the same tensor as {other}" for other, listed in torch.ties.items() if listed == name)
        label = f"gradient of {'.'.join(inside)}{also}"
        by_owner.setdefault("/".join(path), {})[label] = distance(torch.gradients[name], gradients[name])
    return by_owner


def _floors(torch: Trace) -> dict[str, float]:
    """Kind → floor: a fixed fraction of the joint norm of all PyTorch tensors of that kind."""

    def floor(arrays: Iterator[np.ndarray | None]) -> float:
        norms = (shown_norm(x) for x in arrays if x is not None and x.dtype.kind == "f")
        return TOLERANCES["float64_floor"].value * math.hypot(*norms)

    values = floor(x for call in torch.calls for x in call.outputs)
    cotangents = floor(x for call in torch.calls for x in call.output_cotangents)
    return {
        "input": values,
        "output": values,
        "state": floor(x for call in torch.calls for x in call.state.values()),
        "input cotangent": cotangents,
        "output cotangent": cotangents,
        "gradient": floor(x for call in torch.calls for x in call.gradients.values()),
    }


# Where the calls diverge.


def first_forward(pairs: Sequence[TensorPair]) -> Divergence | None:
    """The divergence of the first pair, in the order of `pairs`, with equal inputs and different outputs or written variables.

    An output counts only if the outputs of all enclosing modules differ too. Otherwise only the structure differs: a residual
    connection, for example, is inside the module in one model and outside in the other.
    """
    for pair in pairs:
        wrong = pair.bad("output")
        if pair.bad("input"):
            continue
        if wrong and all(outer.bad("output") for outer in pair.around):
            module, label, apart = _other_inputs_inside(pair, pairs) or ("", "", None)
            if apart and pair.torch.name == "":  # the model's own code computes this array, so the array is named
                return pair.divergence(f"{label} of {module!r}", apart)
            return pair.divergence(*wrong, f"it passes a different {label} to {module!r}" if apart else "")
        if written := pair.bad("state"):
            return pair.divergence(*written)
    return _around_the_model(pairs)


def _other_inputs_inside(pair: TensorPair, pairs: Sequence[TensorPair]) -> tuple[str, str, Distance] | None:
    """(Flax name, input label, distance) of the first inner module with an input that differs; None if there is none."""
    for inner in sorted(pairs, key=lambda inner: inner.torch.started):
        if pair in inner.around and (wrong := inner.bad("input")):
            return inner.flax.name, *wrong
    return None


def _around_the_model(pairs: Sequence[TensorPair]) -> Divergence | None:
    """A difference in the whole model's inputs, or in the processing of its outputs before the loss."""
    whole = next((pair for pair in pairs if pair.torch.name == ""), None)
    if whole is None:
        return None
    if (wrong := whole.bad("input")) and whole.bad("output"):
        return whole.divergence(*wrong, _OTHER_INPUTS)
    loss = next((pair for pair in pairs if pair.torch.path == LOSS and pair.torch.parent is None), None)
    if loss and (wrong := loss.bad("input")) and not whole.bad("output"):
        label, apart = wrong
        return whole.divergence(label.replace("input", "output"), apart, "after the model, in the code that calls it")
    return None


def first_backward(pairs: Sequence[TensorPair], *, forward_agrees: bool) -> Divergence | None:
    """The divergence of the first pair, in backward order, whose outputs agree but whose recomputation or gradients differ.

    If no module is at fault and gradients still differ, a cotangent is lost between two modules; their parent is named.
    """
    backwards = sorted(pairs, key=lambda pair: -pair.torch.started)
    sound = [pair for pair in backwards if not (pair.bad("input") or pair.bad("output") or pair.flax.misled)]
    for pair in sound:
        if pair.flax.stale:
            return pair.divergence("recomputed output", pair.flax.stale)
        wrong = pair.bad("input cotangent") or pair.bad("gradient")
        if wrong and pair.is_stopped:
            return pair.divergence(*wrong, "in Flax, its output has no gradient")
        if wrong and pair.distances["output cotangent"] and not pair.bad("output cotangent"):
            return pair.divergence(*wrong)
    if not (forward_agrees and any(pair.bad("gradient") or pair.bad("input cotangent") for pair in pairs)):
        return None
    # Every module computes correct gradients from its output cotangent, so a cotangent is lost between two modules.
    for pair in sound:
        wrong = pair.bad("output cotangent")
        if wrong and pair.around and not pair.around[0].bad("output cotangent"):
            return pair.around[0].divergence(*wrong, f"between its modules: at {pair.flax.name!r}")
    return None


def noted(divergence: Divergence, unmatched_torch: Sequence[str], unmatched_flax: Sequence[str]) -> Divergence:
    """The divergence, with a note that names the inner modules that only one of the models has."""
    if divergence.note == _OTHER_INPUTS:
        return divergence

    def inside(path: str, others: Sequence[str]) -> list[str]:
        within = [other for other in others if other.startswith(path + "/" if path else "") and other != path]
        return [repr(other) for other in within if not any(other.startswith(outer + "/") for outer in within)]

    theirs, ours = inside(divergence.torch_path, unmatched_torch), inside(divergence.flax_path, unmatched_flax)
    unmatched = [f"{side} alone has {', '.join(paths[:4])}" for side, paths in (("PyTorch", theirs), ("Flax", ours)) if paths]
    return replace(divergence, note="; ".join(filter(None, (divergence.note, *unmatched))))
