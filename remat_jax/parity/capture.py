"""The trace of a PyTorch or Flax model: every module call with its inputs, its outputs and their cotangents."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from remat_jax.identity import ByIdentity
from remat_jax.parity.align import Distance, shown_norm
from remat_jax.parity.trees import is_floating

Slot = tuple[str, int]
"""Identifies an array of a call: its role ("input", "output" or "state") and its index among the arrays of that role."""

Instance = tuple[int, tuple[int, ...]]
"""Identifies a Flax call: its index in `Recorder.calls` (`recorder.py`), and the iteration of each loop, outermost first."""

LOSS = "loss"
"""The path of the loss; the loss is recorded like a module that follows the model."""


@dataclass(eq=False)
class CallArray:
    """An input, an output or a written variable of a module call.

    Attributes:
        name: the name of the function's parameter, or the key of the result, that contains the array; "" if there is none.
        cotangent: the gradient of the loss with respect to the array, through this call only; None if no cotangent arrived.
    """

    value: np.ndarray
    name: str = ""
    cotangent: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.value = as_numbers(self.value)

    def add_cotangent(self, cotangent: np.ndarray) -> None:
        """Add a cotangent that arrived at the array."""
        cotangent = as_numbers(cotangent)
        self.cotangent = cotangent if self.cotangent is None else self.cotangent + cotangent


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        path: the module's path; `""` is the outermost module. A layer in a loop has its index in the path: `layers/1/ffn`.
        kind: the name of the module's class.
        number: 0 for the first call of this module, 1 for its second, …
        started: the call's rank in the order in which calls began.
        parent: the index of the enclosing call in `Trace.calls`; None for the outermost call.
        arrays: the inputs, outputs and written variables, by slot.
        gradients: the gradients of the module's own parameters, by the parameter's name in the module.
        state: the variables that the module itself wrote, such as the statistics of a batch norm, by name.
        instance: the `Instance` of a Flax call.
        changed: role → distance between an array and its recomputed value, for the role's first array that differs; a role
            whose arrays all agree is absent.
        padding_idx: the index whose outputs of an embedding get no gradient in PyTorch; None if there is none.
    """

    path: str
    kind: str
    number: int = 0
    started: int = -1
    parent: int | None = None
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)
    state: Mapping[str, np.ndarray] = field(default_factory=dict)
    arrays: dict[Slot, CallArray] = field(default_factory=dict)
    instance: Instance = (-1, ())
    changed: dict[str, Distance] = field(default_factory=dict)
    padding_idx: int | None = None

    @property
    def padding(self) -> np.ndarray | None:
        """Where an embedding's input is `padding_idx`; None if it is nowhere."""
        if self.padding_idx is None or not self.inputs or not self.outputs:
            return None
        is_padding = self.inputs[0] == self.padding_idx
        return is_padding if is_padding.any() and is_padding.shape == self.outputs[0].shape[:-1] else None

    @property
    def name(self) -> str:
        """The path, followed by the call's number unless it is the first call."""
        return f"{self.path}#{self.number}" if self.number else self.path

    def slots(self, role: str) -> list[Slot]:
        """The slots of a role's arrays, in order."""
        return sorted(slot for slot in self.arrays if slot[0] == role)

    def arrays_of(self, role: str) -> list[CallArray]:
        """The arrays of a role, in order."""
        return [self.arrays[slot] for slot in self.slots(role)]

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """The arrays among the arguments."""
        return tuple(array.value for array in self.arrays_of("input"))

    @property
    def outputs(self) -> tuple[np.ndarray, ...]:
        """The arrays among the results."""
        return tuple(array.value for array in self.arrays_of("output"))

    @property
    def input_names(self) -> tuple[str, ...]:
        """The name of the function's parameter that contains each input; "" if there is none."""
        return tuple(array.name for array in self.arrays_of("input"))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The key of the result that contains each output; "" if there is none."""
        return tuple(array.name for array in self.arrays_of("output"))

    @property
    def input_cotangents(self) -> tuple[np.ndarray | None, ...]:
        """The cotangents of the inputs."""
        return tuple(array.cotangent for array in self.arrays_of("input"))

    @property
    def output_cotangents(self) -> tuple[np.ndarray | None, ...]:
        """The cotangents of the outputs."""
        return tuple(array.cotangent for array in self.arrays_of("output"))

    @property
    def misled(self) -> bool:
        """Whether a checkpoint recomputed this call from inputs that differ from those of the forward pass."""
        return "input" in self.changed

    @property
    def stale(self) -> Distance | None:
        """The distance between an output and its value recomputed from equal inputs; None if outputs agree or inputs differ."""
        return None if self.misled else self.changed.get("output")

    def compare(self, slot: Slot, again: np.ndarray) -> None:
        """If an array differs from its recomputed value `again`, enter their distance in `changed`."""
        before = self.arrays[slot].value
        if not is_close(before, again):
            comparable = before.shape == again.shape and before.dtype.kind == "f"
            apart = shown_norm(before - again) if comparable else np.inf
            self.changed.setdefault(slot[0], Distance(apart, shown_norm(before)))


@dataclass(frozen=True, eq=False)
class Trace:
    """The calls of one forward and backward pass.

    Attributes:
        calls: the calls, in the order in which they ended.
        outputs: the shapes of the model's floating-point outputs, which the loss reads.
        hidden: paths of modules called where capture is impossible, such as inside a `while` loop.
        loss: the call of the loss; its inputs are the model's outputs.
        gradients: the gradients of all parameters, by parameter name in a PyTorch trace, by variable path in a Flax trace.
        ties: for a PyTorch parameter with several names, each name that `named_parameters()` omits → the name that it lists.
    """

    calls: tuple[ModuleCall, ...]
    outputs: tuple[tuple[int, ...], ...] = ()
    hidden: tuple[str, ...] = ()
    loss: ModuleCall | None = None
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)

    @property
    def stale(self) -> tuple[str, ...]:
        """The names of the calls whose recomputation in a checkpoint gave another output from equal inputs."""
        return tuple(call.name for call in self.calls if call.stale)

    def __getitem__(self, name: str) -> ModuleCall:
        """The call with this name: a module's path, followed by `#1` for the module's second call."""
        for call in self.calls:
            if call.name == name:
                return call
        raise KeyError(f"{name!r} is not a call of this trace: {', '.join(repr(call.name) for call in self.calls)}")

    def __contains__(self, name: str) -> bool:
        """Whether there is a call of that name."""
        return any(call.name == name for call in self.calls)

    def ancestors(self, call: ModuleCall) -> Iterator[ModuleCall]:
        """The calls that enclose `call`, innermost first."""
        while call.parent is not None:
            call = self.calls[call.parent]
            yield call


def is_close(before: np.ndarray, again: np.ndarray) -> bool:
    """Whether two runs of the same operation gave the same array, up to rounding."""
    return before.shape == again.shape and np.allclose(before, again, rtol=1e-6, atol=1e-9, equal_nan=True)


def number_calls(calls: Iterable[ModuleCall]) -> None:
    """Set every call's `number`, in the order in which the calls began."""
    begun = Counter[str]()
    for call in sorted(calls, key=lambda call: call.started):
        call.number = begun[call.path]
        begun[call.path] += 1


def argument_names(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(parameter name, value) of every argument of a call; the name of `*args` is "".

    >>> argument_names(lambda x, *rest, **options: None, (1, 2), {"mask": 3})
    [('x', 1), ('', (2,)), ('mask', 3)]
    """
    try:
        signature = inspect.signature(function)
        bound = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return [("", args), *kwargs.items()]
    named: list[tuple[str, Any]] = []
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named += value.items()
        else:
            named.append(("" if kind is inspect.Parameter.VAR_POSITIONAL else name, value))
    return named


def names_of_arrays(named: Iterable[tuple[str, Any]], arrays_in: Callable[[Any], Iterable[Any]]) -> ByIdentity[str]:
    """Every array in the named values → the name of the first value that contains the array."""
    names: ByIdentity[str] = ByIdentity()
    for name, value in named:
        for array in arrays_in(value):
            names.setdefault(array, name)
    return names


def probed(outputs: Sequence[Any], as_array: Callable[..., Any]) -> Any:
    """The default loss of `capture_torch` and `capture_flax`: the sum of all outputs, weighted by the same random numbers.

    >>> x = np.ones(2)
    >>> bool(probed([x, x], np.asarray) == probed([x, x], np.asarray) != 2 * probed([x], np.asarray))
    True
    """
    weights = (np.random.default_rng(number).normal(size=tuple(x.shape)) for number, x in enumerate(outputs))
    return sum(((x * as_array(weight, dtype=x.dtype)).sum() for x, weight in zip(outputs, weights, strict=True)), as_array(0.0))


def as_numbers(array: np.ndarray) -> np.ndarray:
    """The array; an array of bfloat16 or float8, which NumPy does not count as floating-point numbers, becomes float32."""
    return array.astype(np.float32) if array.dtype.kind == "V" and is_floating(array) else array


def in_float64(value: object) -> np.ndarray:
    """A NumPy copy of an array; a floating-point array becomes float64."""
    array = np.array(value)
    return array.astype(np.float64) if array.dtype.kind not in "biu" else array
