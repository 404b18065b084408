"""The inputs, outputs and cotangents of every module of a Flax model, read from the traced training step."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from remat_jax import compat
from remat_jax.core.walk import equations
from remat_jax.parity.capture import CallArray, Instance, ModuleCall, Trace, number_calls, probed
from remat_jax.parity.recorder import RecordedTrace, Recorder, tag
from remat_jax.parity.tapped import Label, TapVisit, evaluate, is_tap, visits
from remat_jax.parity.trees import in_order, is_floating
from remat_jax.porting.variables import Variables


@dataclass(frozen=True, eq=False)
class TracedPass:
    """A traced training step of a Flax model, with a tap (`parity.tapped`) on every input and output of its modules.

    Attributes:
        jaxpr: the closed jaxpr from `arguments` to the loss and the gradients of the floating-point arguments.
        arguments: the arrays of (variables, inputs), floating-point arrays first.
        visits: the visits of taps in the order of execution; a tap in a loop is visited in every iteration.
        numbers: a tree like (variables, inputs) with each array's index in `arguments`, and None for other leaves.
        hidden: indices in `recorder.calls` of the calls whose taps cannot be read, such as calls in a `while` loop.
    """

    jaxpr: Any
    arguments: list[Any]
    visits: list[TapVisit]
    recorder: Recorder
    numbers: Any
    hidden: frozenset[int]


def capture_flax(
    module: Any,
    variables: Any,
    inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    *,
    call: Callable[..., Any] | None = None,
    transform: Callable[..., Any] | None = None,
) -> Trace:
    """Run `loss(module(*inputs))` forward and backward once; return every module's inputs, outputs and cotangents by path.

    `module` is a Linen module with its `variables`, or an NNX module; `variables=None` uses the NNX module's own state.
    `inputs` is a tuple of arguments or a dict of keywords. The default loss is the sum of all outputs, weighted by fixed random
    numbers. `call(module, variables, *inputs)` replaces a Linen model's `module.apply`, for instance to set train mode, RNGs or
    mutable collections; an NNX model is run by `call(module, *inputs)`. `transform`, such as
    `lambda f: rj.checkpoint_blocks(f, {Block: "full"})`, is applied to the function of (variables, inputs) before
    differentiation.

    Layers in `nn.scan` or `nnx.scan` are listed one by one: `layers/0`, `layers/1`, …. A checkpointed module is listed once.

    >>> import flax.linen as nn
    >>> x = jnp.ones((1, 3))
    >>> model = nn.Sequential([nn.Dense(2), nn.tanh])
    >>> trace = capture_flax(model, model.init(jax.random.key(0), x), (x,))
    >>> [(call.path, call.kind) for call in trace.calls]
    [('layers_0', 'Dense'), ('', 'Sequential')]
    """
    return read(trace_step(module, variables, inputs, loss, call=call, transform=transform))


def trace_step(
    module: Any,
    variables: Any,
    inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    *,
    call: Callable[..., Any] | None = None,
    transform: Callable[..., Any] | None = None,
    backward: bool = True,
) -> TracedPass:
    """Trace the step that `capture_flax` runs, or only its loss (`backward=False`); arrays may be `jax.ShapeDtypeStruct`."""
    recorder = Recorder()
    if isinstance(module, nnx.Module):
        module = nnx.clone(module)
        tag(module)
        graph, state = nnx.split(module)
        variables = state if variables is None else variables

        def apply(variables: Any, /, *args: Any, **kwargs: Any) -> Any:
            return (call or operator.call)(nnx.merge(graph, variables), *args, **kwargs)
    else:
        apply = functools.partial(call, module) if call else module.apply

    leaves, treedef = jax.tree.flatten((variables, inputs if isinstance(inputs, Mapping) else tuple(inputs)))
    floating = [index for index, leaf in enumerate(leaves) if is_floating(leaf)]
    others = [index for index, leaf in enumerate(leaves) if compat.is_array(leaf) and index not in floating]

    def run(variables: Any, inputs: Any) -> Any:
        outputs = apply(variables, **inputs) if isinstance(inputs, Mapping) else apply(variables, *inputs)
        recorder.outputs = tuple(tuple(x.shape) for x in _floating(outputs))
        loss_of = loss or (lambda outputs: probed(_floating(outputs), jnp.asarray))
        return recorder.run_loss(loss_of, outputs) if backward else loss_of(outputs)

    transformed = run if transform is None else transform(run)

    def scalar(floats: list[Any], rest: list[Any]) -> Any:
        whole = dict(enumerate(leaves)) | dict(zip(floating, floats, strict=True)) | dict(zip(others, rest, strict=True))
        return transformed(*jax.tree.unflatten(treedef, list(whole.values())))

    arguments = tuple([leaves[index] for index in which] for which in (floating, others))
    with recorder.recording(module):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(scalar) if backward else scalar)(*arguments)
    reached = visits(jaxpr, recorder.paths)
    tapped = {eqn.params["label"].call for eqn in equations(jaxpr) if is_tap(eqn)}
    numbers = {index: place for place, index in enumerate([*floating, *others])}
    tree = jax.tree.unflatten(treedef, [numbers.get(index) for index in range(len(leaves))])
    hidden = frozenset(tapped - {visit.label.call for visit in reached})
    return TracedPass(jaxpr, [*arguments[0], *arguments[1]], reached, recorder, tree, hidden)


def _floating(outputs: Any) -> list[Any]:
    return [x for x in (in_order(outputs) or jax.tree.leaves(outputs)) if is_floating(x)]


def read(step: TracedPass, given: Mapping[int, Any] | None = None) -> Trace:
    """Run a traced step; return its calls. `given` is as in `tapped.evaluate`."""
    # The step runs operation by operation: compiling a program that returns every intermediate value takes many times longer.
    outputs, values = evaluate(step.jaxpr, step.arguments, given or {})
    computed = [np.asarray(gradient) for gradient in outputs[1:]]
    tree = jax.tree.map(lambda number: computed[number] if number < len(computed) else None, step.numbers[0])
    gradients = Variables(tree, trainable=True).leaves if computed else {}
    return _assembled(step, [np.asarray(value) for value in values], gradients)


# The calls of a step.


def _assembled(step: TracedPass, values: Sequence[np.ndarray], gradients: Mapping[str, np.ndarray]) -> Trace:
    """The trace of a step from the values at its taps; `gradients` are by variable path."""
    recorder, traced = step.recorder, step.recorder.calls
    tapped = _tapped_calls(step, values)
    kept = {key: call for key, call in tapped.items() if call.ended >= 0 and not _is_wrapped(key, tapped, traced)}
    number_calls(kept.values())
    ended = sorted(kept, key=lambda key: kept[key].ended)
    place_of = {key: place for place, key in enumerate(ended)}
    for key, call in kept.items():
        record, around = traced[key[0]], _parent(key, kept, traced)
        call.parent = None if around is None else place_of[around]
        call.gradients = _own_gradients(record, key[1], gradients)
        call.state = {record.state[slot[1]]: call.arrays[slot].value for slot in call.slots("state")}
    # The loss ends after all modules, so removing it does not change the indices of their calls.
    loss = None if recorder.loss is None else kept.get((recorder.loss, ()))
    calls = tuple(kept[key] for key in ended if kept[key] is not loss)
    hidden = tuple(sorted({"/".join(traced[number].path) for number in step.hidden}))
    return Trace(calls, recorder.outputs, hidden, loss, gradients)


class _TappedCall(ModuleCall):
    """A call whose `started` and `ended` are indices in `TracedPass.visits`; `ended` is -1 if no output was visited."""

    ended = -1


def _tapped_calls(step: TracedPass, values: Sequence[np.ndarray]) -> dict[Instance, _TappedCall]:
    calls: dict[Instance, _TappedCall] = {}
    for time, (visit, value) in enumerate(zip(step.visits, values, strict=True)):
        (number, role, _), slot, record = visit.label, visit.label[1:], step.recorder.calls[visit.label.call]
        kind, instance = type(record.module).__name__, (number, visit.index)
        call = calls.setdefault(instance, _TappedCall(visit.path, kind, instance=instance))
        array = call.arrays.get(slot)
        if array is None and visit.what == "value":
            if call.started < 0 or (role == "input" and not call.inputs):
                call.started = time
            call.ended = time if role == "output" else call.ended
            call.arrays[slot] = CallArray(value, record.names.get(slot, ""))
        elif array and visit.what == "cotangent":
            array.add_cotangent(value)
        elif array:  # a second value at a tap is a recomputation
            call.compare(slot, value)
    for (number, _), call in calls.items():
        for slot, array in call.arrays.items():
            if array.cotangent is None and Label(number, *slot) in step.recorder.differentiated:
                array.cotangent = np.zeros_like(array.value)
    return calls


def _is_wrapped(key: Instance, calls: Mapping[Instance, _TappedCall], traced: Sequence[RecordedTrace]) -> bool:
    """Whether the enclosing call is a wrapper with the same path: `nn.remat` calls the module inside a second module."""
    around = _parent(key, calls, traced)
    return around is not None and calls[around].path == calls[key].path and calls[around].ended >= 0


def _parent(key: Instance, kept: Mapping[Instance, _TappedCall], traced: Sequence[RecordedTrace]) -> Instance | None:
    """The nearest enclosing call in `kept`, in the same iteration of every loop around both calls; None if there is none."""
    number, index = key
    parent = traced[number].parent
    while parent is not None:
        for length in range(len(index), -1, -1):
            if (parent, index[:length]) in kept:
                return parent, index[:length]
        parent = traced[parent].parent
    return None


def _own_gradients(call: RecordedTrace, index: tuple[int, ...], gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradients of the module's own parameters; gradients that a scan stacks are indexed by the iteration."""
    selected = {}
    for name, parameter in call.parameters.items():
        path = re.sub(r"/(\d+)(?=/|$)", r"_\1", "/".join(("params", *call.path, name)))
        whole = gradients.get(path)
        if whole is not None and whole.ndim >= len(index) and whole.shape[len(index) :] == parameter.shape:
            selected[name] = whole[index]
    return selected
