"""The pair of calls at which two models diverge: the innermost pair whose inputs agree and whose outputs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat_jax.parity.align import Distance
from remat_jax.parity.capture import LOSS
from remat_jax.parity.compared import TensorPair

_OTHER_INPUTS = "the two models get different inputs"


@dataclass(frozen=True)
class Divergence:
    """A module that computes something different from its original.

    Attributes:
        torch_path, flax_path: the module's path in each model; "" is the whole model.
        what: the array that differs, such as "output 0", "gradient of input 0" or "gradient of kernel".
        error, reference: the norm of the difference, and of PyTorch's array, in float64.
        note: a possible explanation, such as a module inside that ran in only one of the models.

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


def divergence_of(pair: TensorPair, what: str, found: Distance, note: str = "") -> Divergence:
    """The divergence of a pair's modules."""
    return Divergence(pair.torch.name, pair.flax.name, what, found.error, found.reference, note)


def first_forward(pairs: Sequence[TensorPair]) -> Divergence | None:
    """The first pair to end whose inputs agree and whose outputs, or written state, differ.

    A real divergence also reaches the outputs of all enclosing modules. A mere difference in structure, such as a residual
    connection inside the module in one model and outside in the other, does not, and is not reported.
    """
    for pair in pairs:
        wrong = pair.bad("output")
        if pair.bad("input"):
            continue
        if wrong and all(around.bad("output") for around in pair.all_around()):
            inner = _given_otherwise(pair, pairs)
            if inner and pair.torch.name == "":  # no enclosing module to name: name the array that the model's code makes
                what, found = inner.bad("input") or wrong
                return divergence_of(pair, f"{what} of {inner.flax.name!r}", found)
            given = inner and inner.bad("input")
            return divergence_of(pair, *wrong, f"it gives {inner.flax.name!r} another {given[0]}" if inner and given else "")
        if written := pair.bad("state"):
            return divergence_of(pair, *written)
    return _around_the_model(pairs)


def _given_otherwise(pair: TensorPair, pairs: Sequence[TensorPair]) -> TensorPair | None:
    """The first module inside a pair's modules whose inputs differ, such as in their mask."""
    inside = (inner for inner in sorted(pairs, key=lambda inner: inner.torch.started) if pair in inner.all_around())
    return next((inner for inner in inside if inner.bad("input")), None)


def _around_the_model(pairs: Sequence[TensorPair]) -> Divergence | None:
    """A difference in the whole model's inputs, or in the processing of its outputs before the loss."""
    whole = next((pair for pair in pairs if pair.torch.name == ""), None)
    if whole and (given := whole.bad("input")) and whole.bad("output"):
        return divergence_of(whole, *given, _OTHER_INPUTS)
    loss = next((pair for pair in pairs if pair.torch.path == LOSS and pair.torch.parent is None), None)
    if whole and loss and (made := loss.bad("input")) and not whole.bad("output"):
        return divergence_of(whole, made[0].replace("input", "output"), made[1], "after the model, in the code that calls it")
    return None


def first_backward(pairs: Sequence[TensorPair], *, forward_agrees: bool) -> Divergence | None:
    """The first pair in backward order that is sound in the forward pass and makes wrong cotangents from correct ones.

    A module whose recomputation is stale is named too: later modules of its block recompute from wrong inputs, and their
    cotangents are wrong for that reason. If no module is at fault and gradients still differ, a cotangent is lost between
    two modules, and the enclosing module is named.
    """
    backwards = sorted(pairs, key=lambda pair: -pair.torch.started)
    sound = [pair for pair in backwards if not (pair.bad("input") or pair.bad("output") or pair.flax.misled)]
    for pair in sound:
        if pair.flax.stale:
            return divergence_of(pair, "recomputed output", pair.flax.stale)
        wrong = pair.bad("input cotangent") or pair.bad("gradient")
        if wrong and pair.distances["output cotangent"] and not pair.bad("output cotangent"):
            return divergence_of(pair, *wrong)
    if not (forward_agrees and any(pair.bad("gradient") or pair.bad("input cotangent") for pair in pairs)):
        return None
    # Every module is right about the cotangent that it gets, so one is lost between two modules.
    for pair in sound:
        wrong = pair.bad("output cotangent")
        if wrong and pair.around and not pair.around.bad("output cotangent"):
            return divergence_of(pair.around, *wrong, f"between its modules: at {pair.flax.name!r}")
    return None


def noted(found: Divergence, unmatched_torch: Sequence[str], unmatched_flax: Sequence[str]) -> Divergence:
    """The divergence, with a note of the modules directly inside that only one of the models has."""

    def inside(path: str, others: Sequence[str]) -> list[str]:
        within = [other for other in others if other.startswith(path + "/" if path else "") and other != path]
        return [repr(other) for other in within if not any(other.startswith(outer + "/") for outer in within)]

    theirs, ours = inside(found.torch_path, unmatched_torch), inside(found.flax_path, unmatched_flax)
    unmatched = [f"{side} alone has {', '.join(paths[:4])}" for side, paths in (("PyTorch", theirs), ("Flax", ours)) if paths]
    return found if found.note == _OTHER_INPUTS else replace(found, note="; ".join(filter(None, (found.note, *unmatched))))
