"""Where a Flax model first leaves its PyTorch original: the module, in the forward pass and in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from remat_jax.errors import ArgumentError
from remat_jax.parity.align import Distance
from remat_jax.parity.align import pairs as pairs_of
from remat_jax.parity.alone import substitutes
from remat_jax.parity.assemble import Slots
from remat_jax.parity.capture import Trace, in_float64
from remat_jax.parity.capture_flax import Step, read, trace_step
from remat_jax.parity.capture_torch import capture_torch
from remat_jax.parity.compared import Pair, compared, modules
from remat_jax.parity.match import match
from remat_jax.parity.wide import keep_float64
from remat_jax.porting import as_numpy


@dataclass(frozen=True)
class Divergence:
    """A module that does something else than its original.

    Attributes:
        torch_path, flax_path: the module's path in either model; "" is the whole model.
        what: which array shows it, such as "output 0", "gradient of input 0" or "gradient of kernel".
        error, reference: the norm of the difference, and of PyTorch's array, in float64.
        note: what may explain it, such as a module inside that ran in one model only.
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
        said = f"{flax} against {torch}: {self.what} is {self.error:.2g} off, of {self.reference:.2g}"
        return f"{said} ({self.note})" if self.note else said


@dataclass(frozen=True)
class Divergences:
    """What `first_divergences` finds.

    Attributes:
        forward: the first module, in the order of execution, whose inputs agree and whose output does not; None if there is none.
        backward: the first module, in the order of the backward pass, whose forward pass agrees, and the cotangents of its
            output, and not those of its inputs or its parameters' gradients; None if there is none.
        alone: every module that is wrong by itself, where that was asked for.
        matched: PyTorch's path → Flax's of the modules that were compared.
        unmatched_torch, unmatched_flax: paths of the modules that have no counterpart.
        stale: Flax modules whose recomputation, under a checkpoint, gave something else than their forward pass.
        hidden: Flax modules that ran where nothing can be captured.
    """

    forward: Divergence | None
    backward: Divergence | None
    alone: tuple[Divergence, ...]
    matched: dict[str, str]
    unmatched_torch: tuple[str, ...]
    unmatched_flax: tuple[str, ...]
    stale: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

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
    single_step: bool = False,
) -> Divergences:
    """Run both models in both passes in float64; name the first module that differs in each.

    A module is named where what it got agrees and what it gave does not: the innermost one, so that an attention is named whose
    projections are right and whose products are wrong. The backward pass names only what the forward pass does not explain.

    With `single_step` every Flax module is given what its original got, in both passes, so that no error is carried on, and all
    modules that are wrong by themselves are listed in `alone`.

    Args:
        torch_module: a PyTorch module; a copy in float64 is run where it is in another dtype.
        flax_module, variables: a Linen module and its variables, or an NNX module (variables None: its own), with the
            weights of the other.
        inputs: a tuple of arguments or a dict of keywords; those of Flax are `flax_inputs` where they are others.
        loss: a function of the outputs to a scalar, for both models, or a pair of them, PyTorch's first. Without one it is the
            sum of all outputs, weighted by fixed random numbers.
        mapping: PyTorch's paths → Flax's of modules, as a dict or as a JSON file's path, for what names, order and sizes do not
            tell; None for a path means that it has no counterpart.
        torch_call, flax_call, transform: as `call` of `capture_torch`, and as `call` and `transform` of `capture_flax`.

    Raises:
        ArgumentError: a path of `mapping` is no module's, the outputs of the two are not alike, or the PyTorch module is in
            train mode and has dropout.

    >>> import flax.linen as nn, torch
    >>> theirs, ours = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3)), nn.Sequential([nn.Dense(3), nn.LayerNorm()])
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
    with _wide(flax_module, variables, inputs if flax_inputs is None else flax_inputs) as (module, given, arguments):
        step = trace_step(module, given, arguments, losses[1], call=flax_call, transform=transform)
        ours, slots = read(step)
        _refuse_other_outputs(theirs, ours)
        matched = match(modules(theirs), modules(ours), mapping)
        pairs = compared(theirs, ours, matched)
        alone = _alone(step, slots, theirs, ours, matched, pairs) if single_step else ()
    forward = _first_forward(pairs)
    unmatched = _unmatched(theirs, matched), _unmatched(ours, matched.values())
    return Divergences(
        forward=forward and _noted(forward, *unmatched),
        backward=_first_backward(pairs, forward is None),
        alone=alone,
        matched=matched,
        unmatched_torch=unmatched[0],
        unmatched_flax=unmatched[1],
        stale=ours.stale,
        hidden=ours.hidden,
    )


def _torch_trace(module: Any, inputs: Any, loss: Any, call: Any) -> Trace:
    import torch

    dropping = [
        name
        for name, inner in module.named_modules()
        if inner.training and getattr(inner, "p", 0) and "Dropout" in type(inner).__name__
    ]
    if dropping:
        raise ArgumentError(
            f"torch_module is in train mode and drops out in {', '.join(dropping[:3])}: the frameworks draw other numbers; "
            "call .eval(), or set the rate to 0"
        )
    floating = [x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()]
    with keep_float64():
        if any(x.dtype != torch.float64 for x in floating):
            module = copy.deepcopy(module).double()
        return capture_torch(module, _map_arrays(inputs, in_float64), loss, call=call)


def _map_arrays(inputs: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to the arrays and tensors among arguments."""

    def one(value: Any) -> Any:
        return change(as_numpy(value)) if hasattr(value, "__array__") else value

    if isinstance(inputs, Mapping):
        return {name: one(value) for name, value in inputs.items()}
    return tuple(jax.tree.map(one, value) for value in inputs)


@contextmanager
def _wide(module: Any, variables: Any, inputs: Any) -> Iterator[tuple[Any, Any, Any]]:
    """With 64-bit types on: the Flax model, its variables and its inputs in float64."""

    def wide(leaf: Any) -> Any:
        return jnp.asarray(leaf, jnp.float64) if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    with jax.enable_x64(True):
        if isinstance(module, nnx.Module) and variables is None:
            variables = nnx.state(module)
        yield module, jax.tree.map(wide, variables), _map_arrays(inputs, lambda array: jnp.asarray(in_float64(array)))


def _refuse_other_outputs(torch: Trace, flax: Trace) -> None:
    theirs, ours = ([x.shape for x in trace[""].outputs if x.dtype.kind == "f"] for trace in (torch, flax))
    if not pairs_of(torch[""].outputs, flax[""].outputs):
        raise ArgumentError(
            f"the models give outputs of shapes {theirs} (PyTorch) and {ours} (Flax): nothing can be compared; give torch_call or "
            "flax_call, which return what is to be the same"
        )


def _unmatched(trace: Trace, matched: Iterable[str]) -> tuple[str, ...]:
    known = set(matched)
    return tuple(dict.fromkeys(call.path for call in trace.calls if call.path not in known))


def _divergence(pair: Pair, what: str, found: Distance, note: str = "") -> Divergence:
    return Divergence(pair.torch.name, pair.flax.name, what, found.error, found.reference, note)


def _first_forward(pairs: Sequence[Pair]) -> Divergence | None:
    """The first pair to end whose outputs disagree and whose inputs do not.

    What is wrong reaches the outputs of all that is around it: a module that is cut otherwise, a residual being inside on one
    side and outside on the other, does not, and is none.
    """
    for pair in pairs:
        wrong = pair.bad("output")
        if wrong and not pair.bad("input") and all(around.bad("output") for around in pair.all_around()):
            return _divergence(pair, *wrong)
    return None


def _first_backward(pairs: Sequence[Pair], forward_agrees: bool) -> Divergence | None:
    backwards = sorted(pairs, key=lambda pair: -pair.torch.started)
    sound = [pair for pair in backwards if not (pair.bad("input") or pair.bad("output"))]
    for pair in sound:
        wrong = pair.bad("input cotangent") or pair.bad("gradient")
        if wrong and not pair.bad("output cotangent"):
            return _divergence(pair, *wrong)
    if not (forward_agrees and any(pair.bad("gradient") or pair.bad("input cotangent") for pair in pairs)):
        return None
    # Every module does what it should with the cotangent that it gets: one is lost between two modules.
    for pair in sound:
        wrong = pair.bad("output cotangent")
        if wrong and pair.around and not pair.around.bad("output cotangent"):
            return _divergence(pair.around, *wrong, f"between its modules: at {pair.flax.name!r}")
    return None


def _noted(found: Divergence, unmatched_torch: Sequence[str], unmatched_flax: Sequence[str]) -> Divergence:
    """The divergence, with the modules directly inside that only one of the models has."""

    def inside(path: str, others: Sequence[str]) -> list[str]:
        within = [other for other in others if other.startswith(path + "/" if path else "") and other != path]
        return [repr(other) for other in within if not any(other.startswith(outer + "/") for outer in within)]

    theirs, ours = inside(found.torch_path, unmatched_torch), inside(found.flax_path, unmatched_flax)
    said = [f"{side} alone has {', '.join(paths[:4])}" for side, paths in (("PyTorch", theirs), ("Flax", ours)) if paths]
    return replace(found, note="; ".join(said))


def _alone(
    step: Step, slots: Slots, theirs: Trace, ours: Trace, matched: dict[str, str], plain: Sequence[Pair]
) -> tuple[Divergence, ...]:
    """Every module that is wrong by itself, in the order of execution, once: in the forward pass or else in the backward pass."""
    trusted = [pair for pair in plain if not pair.bad("output") or all(around.bad("output") for around in pair.all_around())]
    calls = {id(call): place for place, call in enumerate(ours.calls)}
    chosen = {calls[id(pair.flax)]: number for number, pair in enumerate(trusted)}
    again, _ = read(step, substitutes(step.places, slots, trusted, chosen))
    before = {pair.torch.name: pair for pair in trusted}
    found: dict[str, Divergence] = {}

    def add(pair: Pair | None, wrong: Any, note: str = "") -> None:
        if pair is not None and wrong:
            found.setdefault(pair.torch.name, _divergence(pair, *wrong, note))

    judged = [pair for pair in compared(theirs, again, matched) if pair.torch.name in before]
    for pair in judged:
        add(pair.around, pair.bad("input") if before[pair.torch.name].bad("output") else None, f"before {pair.flax.name!r}")
        add(pair, pair.bad("output"))
    for pair in judged:
        was = before[pair.torch.name]
        consequences = was.bad("input cotangent") or was.bad("gradient")
        add(pair.around, pair.bad("output cotangent") if consequences else None, f"behind {pair.flax.name!r}")
        add(pair, pair.bad("input cotangent") or pair.bad("gradient"))
    order = {call.name: call.finished for call in theirs.calls}
    return tuple(sorted(found.values(), key=lambda one: order[one.torch_path]))
