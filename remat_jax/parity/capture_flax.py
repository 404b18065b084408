"""The inputs, outputs and cotangents of every module of a Flax model, read from the traced training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from remat_jax import compat
from remat_jax.parity.assemble import Owners, assemble
from remat_jax.parity.capture import Trace, probe
from remat_jax.parity.recorder import Recorder, tag
from remat_jax.parity.tapped import TapPlace, evaluate, places
from remat_jax.parity.trees import in_order, is_floating
from remat_jax.porting.variables import Variables


@dataclass(frozen=True, eq=False)
class TracedPass:
    """A traced training step of a Flax model, with taps.

    Attributes:
        jaxpr: takes the arrays of (variables, inputs), floating-point arrays first; gives the loss and their gradients.
        arguments: the arrays that the jaxpr takes.
        places: the jaxpr's taps, in order.
        recorder: the calls that the taps belong to.
        numbers: a tree like (variables, inputs) with each gradient's position; None for leaves that are not floating-point.
        hidden: the calls whose taps cannot be read.
    """

    jaxpr: Any
    arguments: list[Any]
    places: list[TapPlace]
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

    `module` is a Linen module with its `variables`, or an NNX module; `variables=None` takes the NNX module's own state.
    `inputs` is a tuple of arguments or a dict of keywords. The loss is a scalar. Without `loss` it is the sum of all outputs,
    weighted by fixed random numbers (`capture.probe`). `call(module, variables, *inputs)` replaces a Linen model's
    `module.apply` (train mode, RNGs, mutable collections); an NNX model is run by `call(module, *inputs)`. `transform` is
    applied to the function of (variables, inputs) before it is differentiated, such as
    `lambda f: rj.checkpoint_blocks(f, {Block: "full"})`.

    Layers in `nn.scan` or `nnx.scan` are listed one by one: `layers/0`, `layers/1`, …. A checkpointed module is listed once.

    >>> import flax.linen as nn
    >>> x = jnp.ones((1, 3))
    >>> model = nn.Sequential([nn.Dense(2), nn.tanh])
    >>> trace = capture_flax(model, model.init(jax.random.key(0), x), (x,))
    >>> [(call.path, call.kind) for call in trace.calls]
    [('layers_0', 'Dense'), ('', 'Sequential')]
    """
    return read(trace_step(module, variables, inputs, loss, call=call, transform=transform))[0]


def trace_step(
    module: Any,
    variables: Any,
    inputs: Any,
    loss: Any = None,
    *,
    call: Any = None,
    transform: Any = None,
    backward: bool = True,
) -> TracedPass:
    """Trace the training step that `capture_flax` runs; `backward=False` traces the loss alone. Arguments may be shapes."""
    recorder = Recorder()
    if isinstance(module, nnx.Module):
        module = nnx.clone(module)
        tag(module)
        graph, state = nnx.split(module)
        variables = state if variables is None else variables

    def apply(variables: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, nnx.Module):
            model = nnx.merge(graph, variables)
            return model(*args, **kwargs) if call is None else call(model, *args, **kwargs)
        return module.apply(variables, *args, **kwargs) if call is None else call(module, variables, *args, **kwargs)

    leaves, treedef = jax.tree.flatten((variables, inputs if isinstance(inputs, Mapping) else tuple(inputs)))
    floating = [index for index, leaf in enumerate(leaves) if is_floating(leaf)]
    others = [index for index, leaf in enumerate(leaves) if compat.is_array(leaf) and index not in floating]

    def run(variables: Any, inputs: Any) -> Any:
        outputs = apply(variables, **inputs) if isinstance(inputs, Mapping) else apply(variables, *inputs)
        recorder.outputs = tuple(tuple(x.shape) for x in _floating(outputs))
        loss_of = _probed if loss is None else loss
        return recorder.run_loss(loss_of, outputs) if backward else loss_of(outputs)

    transformed = run if transform is None else transform(run)

    def scalar(given: list[Any], rest: list[Any]) -> Any:
        whole = dict(enumerate(leaves)) | dict(zip(floating, given, strict=True)) | dict(zip(others, rest, strict=True))
        return transformed(*jax.tree.unflatten(treedef, list(whole.values())))

    arguments = tuple([leaves[index] for index in which] for which in (floating, others))
    with recorder.recording(module):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(scalar) if backward else scalar)(*arguments)
    taps, hidden = places(jaxpr, recorder.paths)
    numbers = {index: place for place, index in enumerate(floating)}
    tree = jax.tree.unflatten(treedef, [numbers.get(index) for index in range(len(leaves))])
    unread = frozenset(hidden - {place.label.call for place in taps})
    return TracedPass(jaxpr, [*arguments[0], *arguments[1]], taps, recorder, tree, unread)


def _floating(outputs: Any) -> list[Any]:
    return [x for x in (in_order(outputs) or jax.tree.leaves(outputs)) if is_floating(x)]


def _probed(outputs: Any) -> Any:
    products = (x * jnp.asarray(probe(k, x.shape), x.dtype) for k, x in enumerate(_floating(outputs)))
    return sum(map(jnp.sum, products), jnp.zeros(()))


def read(step: TracedPass, given: Mapping[int, Any] | None = None) -> tuple[Trace, Owners]:
    """Run a traced step; return its calls, and the owner of the array at each tap.

    `given` maps a tap's position to the array that replaces its value; in loops it is an array of such arrays, one for each
    iteration. None keeps the value.
    """
    chosen = [(given or {}).get(index) for index in range(len(step.places))]

    # Evaluated operation by operation: compiling one program that returns every intermediate takes many times longer.
    outputs, values = evaluate(step.jaxpr, step.arguments, chosen)
    arrived = [np.asarray(value) for value in values]
    tree = jax.tree.map(lambda number: np.asarray(outputs[1 + number]), step.numbers)[0] if len(outputs) > 1 else None
    gradients = {} if tree is None else Variables(tree, trainable=True).leaves
    return assemble(step.places, step.recorder, step.hidden, arrived, gradients)
