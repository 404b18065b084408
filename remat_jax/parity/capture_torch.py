"""The inputs, outputs and cotangents of every module of a PyTorch model, read by hooks, also inside checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from remat_jax.identity import ByIdentity
from remat_jax.parity.capture import (
    LOSS,
    CallArray,
    ModuleCall,
    Trace,
    argument_names,
    is_close,
    names_of_arrays,
    number_calls,
    probed,
)
from remat_jax.parity.trees import fields, in_order
from remat_jax.porting import as_numpy

Loss = Callable[[Any], Any]


def capture_torch(module: Any, inputs: Any, loss: Loss | None = None, *, call: Callable[..., Any] | None = None) -> Trace:
    """Run `loss(module(*inputs))` forward and backward once; return every module's inputs, outputs and cotangents by path.

    `inputs` is a tuple of arguments or a dict of keywords, of tensors or arrays; floating-point inputs get gradients. The
    default loss is the sum of all outputs, weighted by fixed random numbers. `call(module, *inputs)` replaces
    `module(*inputs)`. A checkpointed module is listed once, with the values of its forward pass. The parameters' existing
    `.grad` is restored. A module whose `forward` is called directly is not recorded.

    >>> import numpy as np, torch
    >>> trace = capture_torch(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()), (np.ones((1, 3)),))
    >>> [(call.path, call.kind) for call in trace.calls]
    [('0', 'Linear'), ('1', 'Tanh'), ('', 'Sequential')]
    """
    import torch

    recorder = _Recorder({inner: path.replace(".", "/") for path, inner in module.named_modules()})
    args, kwargs = _arguments(module, inputs)
    with _gradients_put_aside(module), recorder.watching(module), torch.enable_grad():
        outputs = module(*args, **kwargs) if call is None else call(module, *args, **kwargs)
        value = recorder.run_loss(loss or (lambda outputs: probed(_floating(outputs), torch.tensor)), outputs)
        recorder.recording = False
        value.backward()
        gradients = {name: as_numpy(each.grad) for name, each in module.named_parameters() if each.grad is not None}
        shapes = tuple(tuple(x.shape) for x in _floating(outputs))
        return replace(recorder.trace(), outputs=shapes, gradients=gradients, ties=names_of_shared(module))


@dataclass(eq=False)
class _HookedCall(ModuleCall):
    """A call of a module or of the loss, recorded by hooks."""

    module: Any = None
    caller: _HookedCall | None = None
    has_graph: bool = False
    aliases: ByIdentity[None] = field(default_factory=ByIdentity)


class _Recorder:
    def __init__(self, paths: Mapping[Any, str]) -> None:
        self.paths, self.recording, self.begun = paths, True, 0
        self.calls: list[_HookedCall] = []
        self.running: list[tuple[Any, _HookedCall | None]] = []
        self.loss: _HookedCall | None = None

    @contextmanager
    def watching(self, module: Any) -> Iterator[None]:
        """Register hooks on every module of `module` while the context is open."""
        with ExitStack() as stack:
            for inner in module.modules():
                stack.callback(inner.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                stack.callback(inner.register_forward_hook(self._after, with_kwargs=True).remove)
            yield

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        call = self._begin(module, self.paths[module]) if self.recording else self._recomputed(module, (args, kwargs))
        self.running.append((module, call))
        return self._tap((args, kwargs), call, "input", argument_names(module.forward, args, kwargs))

    def _after(self, module: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        # PyTorch stops a recomputation by an exception once all saved tensors are recomputed. Calls in progress at that moment
        # never reach `_after`, so they are removed here.
        while self.running and self.running[-1][0] is not module:
            self.running.pop()
        call = self.running.pop()[1] if self.running else None
        if call and self.recording:
            call.state = {name: as_numpy(x) for name, x in module.named_buffers(recurse=False) if x.is_floating_point()}
            self.calls.append(call)
        return self._tap(outputs, call, "output", fields(outputs).items())

    def run_loss(self, loss: Loss, outputs: Any) -> Any:
        """The loss of a model's outputs, recorded like a module that follows the model."""
        self.loss = self._begin(loss, LOSS)
        tapped = self._tap(outputs, self.loss, "input", fields(outputs).items())
        return self._tap(loss(tapped), self.loss, "output")

    def _begin(self, module: Any, path: str) -> _HookedCall:
        self.begun += 1
        caller = self.running[-1][1] if self.running else None
        return _HookedCall(path, type(module).__name__, started=self.begun, module=module, caller=caller)

    def _recomputed(self, module: Any, arguments: Any) -> _HookedCall | None:
        """The recorded call of `module` that is recomputed now; None if `module` was not called.

        Among several calls, a call without a graph is preferred, then a call with equal inputs, then the latest call.
        """
        arrays = [as_numpy(tensor) for tensor in _tensors(arguments)]

        def fits(call: _HookedCall) -> tuple[bool, bool, int]:
            same = all(map(is_close, call.inputs, arrays))
            return not call.has_graph, same, call.started

        return max((call for call in self.calls if call.module is module), key=fits, default=None)

    def _tap(self, values: Any, call: _HookedCall | None, role: str, named: Iterable[tuple[str, Any]] = ()) -> Any:
        """`values` with an alias for every tensor that requires a gradient; the alias's cotangent excludes other uses."""
        import torch

        if call is None:
            return values
        made: ByIdentity[Any] = ByIdentity()  # a tensor that occurs several times has only one alias and one cotangent
        names = names_of_arrays(named, _tensors)
        hooked = call.has_graph and not self.recording

        def tap(tensor: Any) -> Any:
            if tensor in made:
                return made[tensor]
            slot = (role, len(made))
            made[tensor] = tensor
            if self.recording:
                call.arrays[slot] = CallArray(as_numpy(tensor), names.get(tensor, ""))
            elif slot in call.arrays:
                call.compare(slot, as_numpy(tensor))
            if torch.is_grad_enabled() and tensor.requires_grad:
                # An in-place addition to a view loses the view's cotangent, so an output that the module computed is copied.
                fresh = role == "output" and tensor not in call.aliases
                alias = made[tensor] = tensor.clone() if fresh else tensor.view_as(tensor)
                call.aliases[alias] = None
                if slot in call.arrays and not hooked:
                    call.has_graph |= role == "output"
                    alias.register_hook(lambda gradient: call.arrays[slot].add_cotangent(as_numpy(gradient)))
            return made[tensor]

        try:
            return _map_tensors(values, tap)
        finally:
            if role == "output":
                call.aliases.clear()

    def trace(self) -> Trace:
        """The recorded calls."""
        number_calls(self.calls)
        places = ByIdentity((call, place) for place, call in enumerate(self.calls))
        for call in self.calls:
            call.parent = places.get(call.caller)
            call.padding_idx = getattr(call.module, "padding_idx", None)
            parameters = call.module.named_parameters(recurse=False)
            call.gradients = {name: as_numpy(parameter.grad) for name, parameter in parameters if parameter.grad is not None}
        return Trace(tuple(self.calls), loss=self.loss)


def names_of_shared(module: Any) -> dict[str, str]:
    """For a parameter with several names, each name that `named_parameters()` omits → the name that it lists."""
    names: ByIdentity[str] = ByIdentity()
    parameters = module.named_parameters(remove_duplicate=False)
    first = {name: names.setdefault(parameter, name) for name, parameter in parameters}
    return {name: listed for name, listed in first.items() if name != listed}


@contextmanager
def _gradients_put_aside(module: Any) -> Iterator[None]:
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
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


def _floating(outputs: Any) -> list[Any]:
    import torch

    return [x for x in in_order(outputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _tensors(value: Any) -> list[Any]:
    tensors: list[Any] = []

    def collect(tensor: Any) -> Any:
        tensors.append(tensor)
        return tensor

    _map_tensors(value, collect)
    return tensors


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
