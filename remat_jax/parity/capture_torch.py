"""The inputs, outputs and cotangents of every module of a PyTorch model, read by hooks, also inside checkpoints."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from remat_jax.parity.capture import LOSS, ModuleCall, Recomputed, Trace, argument_names, probe
from remat_jax.parity.trees import fields, in_order
from remat_jax.porting import as_numpy

Loss = Callable[[Any], Any]


def capture_torch(module: Any, inputs: Any, loss: Loss | None = None, *, call: Callable[..., Any] | None = None) -> Trace:
    """Run `loss(module(*inputs))` forward and backward once; return every module's inputs, outputs and cotangents by path.

    `inputs` is a tuple of arguments or a dict of keywords, of tensors or arrays; floating-point inputs get gradients. The loss
    is a scalar. Without `loss` it is the sum of all outputs, weighted by fixed random numbers (`capture.probe`).
    `call(module, *inputs)` replaces `module(*inputs)`. A checkpointed module is listed once, with the values of its forward
    pass. Existing gradients of parameters are kept. A module whose `forward` is called directly is not recorded.

    >>> import torch
    >>> trace = capture_torch(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()), (np.ones((1, 3)),))
    >>> [(call.path, call.kind) for call in trace.calls]
    [('0', 'Linear'), ('1', 'Tanh'), ('', 'Sequential')]
    """
    import torch

    recorder = _Recorder({inner: path.replace(".", "/") for path, inner in module.named_modules()})
    args, kwargs = _arguments(module, inputs)
    with _gradients_put_aside(module), recorder.watching(module), torch.enable_grad():
        outputs = module(*args, **kwargs) if call is None else call(module, *args, **kwargs)
        value = recorder.run_loss(_probed if loss is None else loss, outputs)
        recorder.recording = False
        value.backward()
        gradients = {name: as_numpy(each.grad) for name, each in module.named_parameters() if each.grad is not None}
        shapes = tuple(tuple(x.shape) for x in _floating(outputs))
        return replace(recorder.trace(), outputs=shapes, gradients=gradients, ties=_ties(module))


@dataclass
class _Seen:
    """A call while it is recorded."""

    module: Any
    parent: _Seen | None
    started: int
    finished: int = -1
    names: dict[str, list[str]] = field(default_factory=lambda: {"input": [], "output": []})
    values: dict[str, list[np.ndarray]] = field(default_factory=lambda: {"input": [], "output": []})
    cotangents: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    has_graph: bool = False
    aliases: set[int] = field(default_factory=set)
    recomputed: Recomputed = field(default_factory=Recomputed)


class _Recorder:
    def __init__(self, paths: Mapping[Any, str]) -> None:
        self.paths, self.recording, self.clock = paths, True, 0
        self.calls: list[_Seen] = []
        self.running: list[_Seen] = []
        self.recomputing: list[tuple[Any, _Seen | None]] = []
        self.loss: _Seen | None = None

    @contextmanager
    def watching(self, module: Any) -> Iterator[None]:
        """Hook every module of `module` inside the context."""
        with ExitStack() as stack:
            for inner in module.modules():
                handles = (
                    inner.register_forward_pre_hook(self._before, with_kwargs=True),
                    inner.register_forward_hook(self._after, with_kwargs=True),
                )
                for handle in handles:
                    stack.callback(handle.remove)
            yield

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        if not self.recording:
            seen = self._recomputed(module, (args, kwargs))
            self.recomputing.append((module, seen))
            return self._tap((args, kwargs), seen, "input", new=False)
        seen = _Seen(module, self.running[-1] if self.running else None, self._tick())
        self.running.append(seen)
        return self._tap((args, kwargs), seen, "input", new=True, named=argument_names(module.forward, args, kwargs))

    def _after(self, module: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        if not self.recording:
            # A recomputation stops by an exception once backward has the tensors it needs: such calls never end.
            while self.recomputing and self.recomputing[-1][0] is not module:
                self.recomputing.pop()
            seen = self.recomputing.pop()[1] if self.recomputing else None
            return self._tap(outputs, seen, "output", new=False)
        while self.running[-1].module is not module:
            self.running.pop()
        seen = self.running.pop()
        seen.finished = self._tick()
        seen.state = {name: as_numpy(x) for name, x in module.named_buffers(recurse=False) if x.is_floating_point()}
        self.calls.append(seen)
        return self._tap(outputs, seen, "output", new=True, named=fields(outputs).items())

    def run_loss(self, loss: Loss, outputs: Any) -> Any:
        """The loss of a model's outputs, recorded like a module that follows the model."""
        self.loss = _Seen(loss, None, self._tick())
        value = loss(self._tap(outputs, self.loss, "input", new=True))
        self.loss.finished = self._tick()
        return self._tap(value, self.loss, "output", new=True)

    def _recomputed(self, module: Any, arguments: Any) -> _Seen | None:
        """The call that is recomputed: the last call with equal inputs, else the last; calls without a graph go first."""
        arrays: list[np.ndarray] = []
        _map_tensors(arguments, lambda tensor: arrays.append(as_numpy(tensor)))

        def fits(seen: _Seen) -> tuple[bool, bool, int]:
            same = all(_close(one, other) for one, other in zip(seen.values["input"], arrays, strict=False))
            return not seen.has_graph, same, seen.started

        return max((seen for seen in self.calls if seen.module is module), key=fits, default=None)

    def _tap(self, values: Any, seen: _Seen | None, role: str, *, new: bool, named: Iterable[tuple[str, Any]] = ()) -> Any:
        """`values` with an alias for every tensor that has a gradient: the alias's cotangent is this call's alone."""
        import torch

        made: dict[int, Any] = {}  # a tensor that occurs several times has a single alias and cotangent
        names = dict[int, str]()
        for name, value in named:
            _map_tensors(value, functools.partial(_note, names, name))
        hooked = seen is not None and seen.has_graph and not new

        def tap(tensor: Any) -> Any:
            if seen is None or id(tensor) in made:
                return made.get(id(tensor), tensor)
            number = len(made)
            made[id(tensor)] = tensor
            if new:
                seen.values[role].append(as_numpy(tensor))
                seen.names[role].append(names.get(id(tensor), ""))
            elif len(seen.values[role]) > number:
                seen.recomputed.compare(role, seen.values[role][number], as_numpy(tensor))
            if torch.is_grad_enabled() and tensor.requires_grad:
                # An in-place addition to a view takes its cotangent away, so an output made by the module is copied.
                fresh = role == "output" and id(tensor) not in seen.aliases
                alias = made[id(tensor)] = tensor.clone() if fresh else tensor.view_as(tensor)
                seen.aliases.add(id(alias))
                if not hooked:
                    seen.has_graph |= role == "output"
                    alias.register_hook(lambda gradient: self._arrived(seen, role, number, gradient))
            return made[id(tensor)]

        return _map_tensors(values, tap)

    def _arrived(self, seen: _Seen, role: str, number: int, gradient: Any) -> None:
        before = seen.cotangents.get((role, number), 0)
        seen.cotangents[role, number] = before + as_numpy(gradient)

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def trace(self) -> Trace:
        """The recorded calls."""
        places = {id(seen): place for place, seen in enumerate(self.calls)}
        numbers, number_of = Counter[str](), {}
        for seen in sorted(self.calls, key=lambda seen: seen.started):
            number_of[id(seen)] = numbers[self.paths[seen.module]]
            numbers[self.paths[seen.module]] += 1
        calls = tuple(self._call(seen, number_of[id(seen)], places) for seen in self.calls)
        return Trace(calls, loss=None if self.loss is None else self._call(self.loss, 0, {}))

    def _call(self, seen: _Seen, number: int, places: Mapping[int, int]) -> ModuleCall:
        def cotangents(role: str) -> tuple[np.ndarray | None, ...]:
            return tuple(seen.cotangents.get((role, place)) for place in range(len(seen.values[role])))

        _forget_padding(seen)
        parameters = () if seen is self.loss else seen.module.named_parameters(recurse=False)
        return ModuleCall(
            path=LOSS if seen is self.loss else self.paths[seen.module],
            kind=type(seen.module).__name__,
            number=number,
            inputs=tuple(seen.values["input"]),
            outputs=tuple(seen.values["output"]),
            input_cotangents=cotangents("input"),
            output_cotangents=cotangents("output"),
            started=seen.started,
            finished=seen.finished,
            parent=places.get(id(seen.parent)),
            gradients={name: as_numpy(parameter.grad) for name, parameter in parameters if parameter.grad is not None},
            state=seen.state,
            stale=seen.recomputed.stale,
            misled=seen.recomputed.misled,
            input_names=tuple(seen.names["input"]),
            output_names=tuple(seen.names["output"]),
        )


def _note(names: dict[int, str], name: str, tensor: Any) -> Any:
    names.setdefault(id(tensor), name)
    return tensor


def _ties(module: Any) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}


def _forget_padding(seen: _Seen) -> None:
    """Zero an embedding's cotangents at `padding_idx`, which train nothing; a model without `padding_idx` has zeros there."""
    padding = getattr(seen.module, "padding_idx", None)
    if padding is not None and ("output", 0) in seen.cotangents:
        cotangent = seen.cotangents["output", 0]
        seen.cotangents["output", 0] = np.where((seen.values["input"][0] == padding)[..., None], 0, cotangent)


@contextmanager
def _gradients_put_aside(module: Any) -> Iterator[None]:
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _arguments(module: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)

    def tensor(value: Any) -> Any:
        if not hasattr(value, "__array__"):
            return value
        made = torch.tensor(as_numpy(value))
        return made.to(dtype or made.dtype).requires_grad_() if made.is_floating_point() else made

    if isinstance(inputs, Mapping):
        return (), {name: tensor(value) for name, value in inputs.items()}
    return tuple(tensor(value) for value in inputs), {}


def _probed(outputs: Any) -> Any:
    import torch

    floating = _floating(outputs)
    return sum(
        ((x * torch.tensor(probe(k, tuple(x.shape)), dtype=x.dtype)).sum() for k, x in enumerate(floating)), torch.zeros(())
    )


def _floating(outputs: Any) -> list[Any]:
    import torch

    return [x for x in in_order(outputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to every tensor in tuples, lists and dicts; other objects stay the same."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        made = [_map_tensors(item, change) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, Mapping):
        mapped = {key: _map_tensors(item, change) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(**mapped)
    return value


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)
