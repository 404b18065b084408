"""What both frameworks' captures give: every call of a module, what came in and out, and the cotangents of both."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from remat_jax.parity.align import Distance, norm

Arrays = tuple[np.ndarray, ...]
Cotangents = tuple["np.ndarray | None", ...]

LOSS = "loss"
"""The path of the loss, as if it were a module behind the model."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module.

    Attributes:
        path: of the module from the outermost one, which is `""`; layers in a loop have their index in it: `layers/1/ffn`.
        kind: the name of the module's class.
        number: 0 for the first call of this module, 1 for its second, …
        inputs, outputs: the arrays among its arguments and its results, in order.
        input_names, output_names: the parameter, or the key of a result, that each of these belongs to; "" where it has none.
        input_cotangents, output_cotangents: the loss's gradients with respect to these, as far as they go through this very
            call; None where none arrived, or where the array is no floating-point one.
        gradients: of the parameters that the module itself has, by their own names.
        state: what the module itself wrote, such as the statistics of a batch norm, by their own names.
        started, finished: places in the order of execution.
        parent: the place in the trace's `calls` of the call around this one; None for the outermost.
        stale: how far from its output it gave when a checkpoint computed it again of the same inputs; None for the same.
        misled: whether it got other inputs when it was computed again: what came before it is stale.
    """

    path: str
    kind: str
    number: int
    inputs: Arrays
    outputs: Arrays
    input_cotangents: Cotangents
    output_cotangents: Cotangents
    started: int
    finished: int
    parent: int | None
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)
    state: Mapping[str, np.ndarray] = field(default_factory=dict)
    stale: Distance | None = None
    misled: bool = False
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The path, with the number of the call where it is not the first."""
        return f"{self.path}#{self.number}" if self.number else self.path


@dataclass(frozen=True, eq=False)
class Trace:
    """The calls of one forward and backward pass.

    Attributes:
        calls: in the order in which they ended.
        outputs: the shapes of the floating-point arrays that the loss is a function of.
        hidden: paths of modules that were called where nothing could be captured, such as inside a `while` loop.
        loss: the loss as a call: of what the model gave, to a scalar.
        gradients: of all parameters, by PyTorch's names or by the paths of Flax's variables.
        ties: PyTorch's name of a parameter → its other names, where it has several.
    """

    calls: tuple[Call, ...]
    outputs: tuple[tuple[int, ...], ...] = ()
    hidden: tuple[str, ...] = ()
    loss: Call | None = None
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def stale(self) -> tuple[str, ...]:
        """The names of the calls whose recomputation, under a checkpoint, gave something else of the same inputs."""
        return tuple(call.name for call in self.calls if call.stale)

    def __getitem__(self, name: str) -> Call:
        """The call of that name: a path, and `#1` behind it for the second call."""
        for call in self.calls:
            if call.name == name:
                return call
        raise KeyError(f"{name!r} is no call of this trace: {', '.join(repr(call.name) for call in self.calls)}")

    def __contains__(self, name: str) -> bool:
        """Whether there is a call of that name."""
        return any(call.name == name for call in self.calls)

    def leaves(self) -> frozenset[int]:
        """The places of the calls that call no other module."""
        parents = {call.parent for call in self.calls}
        return frozenset(index for index in range(len(self.calls)) if index not in parents)

    def ancestors(self, index: int) -> list[int]:
        """The places of the calls around a call, the innermost first."""
        found, parent = [], self.calls[index].parent
        while parent is not None:
            found.append(parent)
            parent = self.calls[parent].parent
        return found


def argument_names(function: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """The arguments of a call by the names of the function's parameters; "" for those that it takes as `*args`.

    >>> argument_names(lambda x, *rest, **options: None, (1, 2), {"mask": 3})
    [('x', 1), ('', (2,)), ('mask', 3)]
    """
    try:
        signature = inspect.signature(function)
        bound = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return [("", args), *kwargs.items()]
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    found: list[tuple[str, Any]] = []
    for name, value in bound.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            found += value.items()
        else:
            found.append(("" if kinds[name] is inspect.Parameter.VAR_POSITIONAL else name, value))
    return found


def probe(index: int, shape: tuple[int, ...]) -> np.ndarray:
    """The fixed random numbers by which an output is weighted where no loss is given: the sum of all products is the loss.

    The same in both frameworks, so that the backward passes start alike whatever the forward passes gave.

    >>> probe(0, (2,)).tolist() == probe(0, (2,)).tolist() != probe(1, (2,)).tolist()
    True
    """
    return np.random.default_rng(index).normal(size=shape)


class Recomputed:
    """What of a call was another thing when it was computed again."""

    def __init__(self) -> None:
        self._changed: dict[str, Distance] = {}

    def compare(self, role: str, before: np.ndarray, again: np.ndarray) -> None:
        """Note an "input" or an "output" if it has changed by more than rounding."""
        if before.shape != again.shape or not np.allclose(before, again, rtol=1e-6, atol=1e-9, equal_nan=True):
            apart = norm(before - again) if before.shape == again.shape and before.dtype.kind == "f" else np.inf
            self._changed.setdefault(role, Distance(apart, norm(before)))

    @property
    def misled(self) -> bool:
        """Whether it got something else."""
        return "input" in self._changed

    @property
    def stale(self) -> Distance | None:
        """How far apart its outputs are, its inputs being the same."""
        return None if self.misled else self._changed.get("output")


def in_float64(value: Any) -> np.ndarray:
    """A NumPy copy of an array, floating-point ones in float64."""
    array = np.array(value)
    return array.astype(np.float64) if array.dtype.kind not in "biu" else array
