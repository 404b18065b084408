"""The first module of a Flax model that diverges from its PyTorch original, in the forward and in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from remat_jax.errors import ArgumentError
from remat_jax.parity.align import best_layout, pairs, visible
from remat_jax.parity.capture import Slot, Trace, in_float64
from remat_jax.parity.capture_flax import TracedPass, read, trace_step
from remat_jax.parity.capture_torch import capture_torch
from remat_jax.parity.case import running
from remat_jax.parity.divergence import (
    Divergence,
    TensorPair,
    compared,
    first_backward,
    first_forward,
    modules,
    noted,
    pairs_of,
)
from remat_jax.parity.match import match, pairs_by_weights
from remat_jax.parity.semantics import Difference
from remat_jax.parity.tapped import TapVisit
from remat_jax.parity.trees import is_floating
from remat_jax.parity.trimming import trim
from remat_jax.porting import as_numpy, as_rules, gradients_to_torch
from remat_jax.porting.float64 import keep_float64
from remat_jax.porting.links import links_of_places, tied_pairs
from remat_jax.porting.variables import Variables


@dataclass(frozen=True)
class Divergences:
    """The divergences that `first_divergences` finds.

    Attributes:
        forward: the first module, in the order of execution, whose inputs agree and whose outputs or written variables differ;
            None if no module diverges. The path `loss` is the loss function.
        backward: the first module, in the order of the backward pass, that agrees in the forward pass and has one of two
            faults: its recomputed output differs, or its output cotangents agree while its input cotangents or parameter
            gradients differ. If a cotangent is lost between two modules, `backward` is their parent. None if no module
            diverges.
        alone: with `single_step`, a divergence for every module that is wrong even with PyTorch's inputs and cotangents.
        matched: PyTorch path → Flax path of the compared modules.
        unmatched_torch, unmatched_flax: paths of the modules without a counterpart.
        stale: Flax modules whose recomputation in a checkpoint gave another output from equal inputs; innermost first.
        hidden: Flax modules that ran where capture is impossible, such as in a `while` loop.
        agreeing: Flax modules whose outputs agree.
        differences: settings that differ, seen by running the models: an embedding's `padding_idx`.

    >>> found = Divergences(None, None, (), {"": ""}, (), ())
    >>> found.none, found.matched
    (True, {'': ''})
    """

    forward: Divergence | None
    backward: Divergence | None
    alone: tuple[Divergence, ...]
    matched: dict[str, str]
    unmatched_torch: tuple[str, ...]
    unmatched_flax: tuple[str, ...]
    stale: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    agreeing: frozenset[str] = frozenset()
    differences: tuple[Difference, ...] = ()

    @property
    def none(self) -> bool:
        """Whether nothing diverges."""
        return not (self.forward or self.backward or self.alone or self.stale)


def first_divergences(
    torch_module: Any,
    flax_module: Any,
    variables: Any,
    inputs: Any,
    *,
    flax_inputs: Any = None,
    loss: Any = None,
    mapping: Any = None,
    torch_call: Callable[..., Any] | None = None,
    flax_call: Callable[..., Any] | None = None,
    transform: Callable[..., Any] | None = None,
    rules: Any = None,
    single_step: bool = False,
) -> Divergences:
    """Run both models forward and backward in float64; name the first module that differs in each pass.

    The named module is the innermost module whose inputs agree and whose outputs differ. If only the attention scores differ,
    for example, the attention module is named, not one of its projections. In the backward pass, a module is named only if its
    forward pass agrees. `single_step` gives every Flax module PyTorch's inputs and cotangents, so no error propagates: `alone`
    lists all modules that are wrong.

    Args:
        torch_module: a PyTorch module; a float64 copy is run if its dtype is different.
        flax_module, variables: a Linen module and its variables, or an NNX module (`variables=None` uses its own state). The
            weights must be those of the PyTorch module.
        inputs: a tuple of arguments or a dict of keywords. `flax_inputs` are the Flax model's inputs if they differ.
        loss: a function from the outputs to a scalar, for both models, or a pair of functions, PyTorch's first; by default the
            sum of all outputs, weighted by fixed random numbers.
        mapping: a dict or the path of a JSON file: PyTorch module path → Flax module path, or None for no counterpart. Other
            modules are matched by names, order and sizes.
        rules: the weight map (`remat_jax.porting`). It converts Flax's gradients to PyTorch's names and shapes, even if several
            Flax arrays form one PyTorch tensor. Without rules, gradients are compared by name.
        torch_call, flax_call, transform: `call` of `capture_torch`, and `call` and `transform` of `capture_flax`.

    Raises:
        ArgumentError: `mapping` contains a path that no module has, the outputs differ in shape, a model cannot be run on the
            inputs, or the PyTorch module is in train mode and has dropout.

    >>> import flax.linen as nn, numpy as np, torch
    >>> theirs = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    >>> ours = nn.Sequential([nn.Dense(3), nn.LayerNorm()])
    >>> weights = {name: np.asarray(x.detach()) for name, x in theirs.state_dict().items()}
    >>> variables = {"params": {
    ...     "layers_0": {"kernel": weights["0.weight"].T, "bias": weights["0.bias"]},
    ...     "layers_1": {"scale": weights["1.weight"], "bias": weights["1.bias"]}}}
    >>> found = first_divergences(theirs, ours, variables, (np.ones((2, 3)),))
    >>> found.forward.flax_path, found.backward  # epsilon is 1e-5 in PyTorch and 1e-6 in Flax
    ('layers_1', None)
    """
    losses = loss if isinstance(loss, tuple) else (loss, loss)
    theirs = _torch_trace(torch_module, inputs, losses[0], torch_call)
    with _wide(flax_module, variables, inputs if flax_inputs is None else flax_inputs) as (module, wide_variables, arguments):
        with running("flax_module"):
            step = trace_step(module, wide_variables, arguments, losses[1], call=flax_call, transform=transform)
        ours = read(step)
        _refuse_other_outputs(theirs, ours, probed=loss is None)
        by_weights = set[tuple[str, str]]()
        if rules is not None:
            shapes = {path: tuple(leaf.shape) for path, leaf in Variables(wide_variables).leaves.items()}
            called = {call.path for call in ours.calls}
            by_weights = pairs_by_weights(links_of_places(as_rules(rules), shapes), called)
            trim(theirs, ours, by_weights)
        matched = match(modules(theirs), modules(ours), mapping, by_weights)
        calls = compared(theirs, ours, matched, None if rules is None else _under_torch_names(ours.gradients, rules))
        alone = _each_alone(step, theirs, ours, matched, calls) if single_step else ()
        forward = _first_forward(step, theirs, matched, calls)
    unmatched_torch, unmatched_flax = _unmatched(theirs, matched), _unmatched(ours, matched.values())
    return Divergences(
        forward=forward and noted(forward, unmatched_torch, unmatched_flax),
        backward=first_backward(calls, forward_agrees=forward is None),
        alone=alone,
        matched=matched,
        unmatched_torch=unmatched_torch,
        unmatched_flax=unmatched_flax,
        stale=ours.stale,
        hidden=ours.hidden,
        agreeing=frozenset(pair.flax.name for pair in calls if pair.distances["output"] and not pair.bad("output")),
        differences=tuple(_padding_settings(calls)),
    )


def _padding_settings(pairs: Sequence[TensorPair]) -> Iterator[Difference]:
    """The embeddings whose gradients differ although PyTorch ignores the padding's output cotangents."""
    for pair in pairs:
        if pair.torch.padding is not None and pair.bad("gradient"):
            yield Difference(pair.flax.path, "padding_idx", f"{pair.torch.padding_idx} (its row gets no gradient)", None)


def _under_torch_names(gradients: Mapping[str, Any], rules: Any) -> dict[str, Any]:
    """PyTorch's name → Flax's gradient; the gradient of a tied parameter is under both names."""
    renamed = gradients_to_torch(gradients, rules, numpy=True)
    for name, other in list(tied_pairs(as_rules(rules), renamed)):
        renamed[name] = renamed[other] = renamed[name if name in renamed else other]
    return renamed


def _torch_trace(module: Any, inputs: Any, loss: Any, call: Any) -> Trace:
    import torch

    dropping = [
        name
        for name, inner in module.named_modules()
        if inner.training and getattr(inner, "p", 0) and "Dropout" in type(inner).__name__
    ]
    if dropping:
        raise ArgumentError(
            f"torch_module is in train mode with dropout in {', '.join(dropping[:3])}: the frameworks draw different random "
            "numbers; call .eval(), or set the rate to 0"
        )
    floating = [x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()]
    with keep_float64():
        if any(x.dtype != torch.float64 for x in floating):
            module = copy.deepcopy(module).double()
        with running("torch_module"):
            return capture_torch(module, _map_arrays(inputs, in_float64), loss, call=call)


def _map_arrays(inputs: Any, change: Callable[[Any], Any]) -> Any:
    """The inputs with `change` applied to their arrays and tensors."""

    def changed(value: Any) -> Any:
        return change(as_numpy(value)) if hasattr(value, "__array__") else value

    if isinstance(inputs, Mapping):
        return {name: changed(value) for name, value in inputs.items()}
    return tuple(jax.tree.map(changed, value) for value in inputs)


@contextmanager
def _wide(module: Any, variables: Any, inputs: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The Flax model, and its variables and inputs in float64, with 64-bit types enabled."""

    def wide(leaf: Any) -> Any:
        return jnp.asarray(leaf, jnp.float64) if is_floating(leaf) else leaf

    with jax.enable_x64(True):
        if isinstance(module, nnx.Module) and variables is None:
            variables = nnx.state(module)
        yield module, jax.tree.map(wide, variables), _map_arrays(inputs, lambda array: jnp.asarray(in_float64(array)))


def _refuse_other_outputs(torch: Trace, flax: Trace, *, probed: bool) -> None:
    # A `torch_call` or `flax_call` that calls only submodules records no call of the whole model.
    whole = [call.outputs for trace in (torch, flax) for call in trace.calls if call.name == ""]
    comparable = len(whole) < 2 or pairs(whole[0], whole[1])
    if not comparable or (probed and torch.outputs != flax.outputs):
        raise ArgumentError(
            f"the models give outputs of shapes {list(torch.outputs)} (PyTorch) and {list(flax.outputs)} (Flax), which cannot "
            "be compared; give torch_call or flax_call, so that both return the same arrays, or a loss"
        )


def _unmatched(trace: Trace, matched: Iterable[str]) -> tuple[str, ...]:
    paths = set(matched)
    return tuple(dict.fromkeys(call.path for call in trace.calls if call.path not in paths))


def _first_forward(step: TracedPass, theirs: Trace, matched: dict[str, str], calls: Sequence[TensorPair]) -> Divergence | None:
    """`first_forward`, without the modules whose difference the code around them makes up for.

    An embedding, for example, may be scaled inside the module in one model, and after it in the other.
    """
    excused = set[str]()
    while True:
        forward = first_forward([pair for pair in calls if pair.torch.name not in excused])
        suspect = next((pair for pair in calls if forward and pair.torch.name == forward.torch_path), None)
        if suspect is None or not _is_made_up_for(step, theirs, matched, calls, suspect):
            return forward
        excused.add(suspect.torch.name)


def _is_made_up_for(
    step: TracedPass, theirs: Trace, matched: dict[str, str], calls: Sequence[TensorPair], suspect: TensorPair
) -> bool:
    """Whether PyTorch's output in Flax's call would make inputs of later modules differ that agree without it."""
    later = [
        pair.torch.name
        for pair in calls
        if pair.torch.started > suspect.torch.started
        and suspect not in pair.around
        and pair.distances["input"]
        and not pair.bad("input")
    ]
    if not suspect.bad("output") or not later:
        return False
    given = {
        number: value
        for number, value in _substitutes(step.visits, [suspect]).items()
        if step.visits[number].label.role == "output" and step.visits[number].what == "value"
    }
    again = {pair.torch.name: pair for pair in compared(theirs, read(step, given), matched)}
    return any(again[name].bad("input") for name in later if name in again)


# Each module with PyTorch's inputs and cotangents.


def _each_alone(
    step: TracedPass, theirs: Trace, ours: Trace, matched: dict[str, str], plain: Sequence[TensorPair]
) -> tuple[Divergence, ...]:
    """A divergence for every module that is wrong even with PyTorch's inputs and cotangents, in the order of execution.

    A module is listed once: for its forward pass, or for its backward pass if only the backward pass is wrong.
    """
    of_modules = [pair for pair in plain if pair.flax is not ours.loss]
    trusted = [pair for pair in of_modules if not pair.bad("output") or all(outer.bad("output") for outer in pair.around)]
    again = read(step, _substitutes(step.visits, trusted))
    before = {pair.torch.name: pair for pair in trusted}
    listed: dict[str, Divergence] = {}

    def add(pair: TensorPair, wrong: Any, note: str = "") -> None:
        if wrong:
            label, apart = wrong
            listed.setdefault(pair.torch.name, pair.divergence(label, apart, note))

    judged = [pair for pair in compared(theirs, again, matched) if pair.torch.name in before]
    for pair in judged:
        for outer in pair.around[:1]:
            add(outer, pair.bad("input") if before[pair.torch.name].bad("output") else None, f"before {pair.flax.name!r}")
        add(pair, pair.bad("output"))
    for pair in judged:
        for outer in pair.around[:1]:
            is_cut = before[pair.torch.name].is_cut_otherwise
            add(outer, None if is_cut else pair.bad("output cotangent"), f"after {pair.flax.name!r}")
        add(pair, pair.bad("input cotangent") or pair.bad("gradient"))
    return tuple(listed[call.name] for call in theirs.calls if call.name in listed)


def _substitutes(visits: Sequence[TapVisit], trusted: Sequence[TensorPair]) -> dict[int, Any]:
    """The argument `given` of `read`: PyTorch's activations and cotangents for the Flax calls of the `trusted` pairs."""
    pair_of = {pair.flax.instance: pair for pair in trusted}
    return {
        number: _reference(pair_of[visit.label.call, visit.index], visit.label[1:], visit.what)
        for number, visit in enumerate(visits)
        if (visit.label.call, visit.index) in pair_of and visit.label.role != "state"
    }


def _reference(pair: TensorPair, slot: Slot, quantity: str) -> np.ndarray | None:
    """PyTorch's array in Flax's layout; None for masks, integers and arrays without a counterpart."""
    role, position = slot[0], pair.flax.slots(slot[0]).index(slot)
    theirs = next((pair.torch.arrays_of(role)[i] for i, j in pairs_of(role, pair.torch, pair.flax) if j == position), None)
    ours = pair.flax.arrays[slot]
    if theirs is None or ours.value.dtype.kind != "f" or visible(ours.value) is not None:
        return None
    if quantity == "value":
        return best_layout(theirs.value, ours.value)
    is_cut = role == "output" and pair.is_cut_otherwise
    if is_cut or theirs.cotangent is None or ours.cotangent is None:
        return None
    return best_layout(theirs.cotangent, ours.cotangent)
