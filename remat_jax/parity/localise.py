"""The first module of a Flax model that diverges from its PyTorch original, in the forward and in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from remat_jax.errors import ArgumentError, PortingError
from remat_jax.parity.align import pairs as pairs_of
from remat_jax.parity.alone import each_alone
from remat_jax.parity.capture import Trace, in_float64
from remat_jax.parity.capture_flax import read, trace_step
from remat_jax.parity.capture_torch import capture_torch
from remat_jax.parity.case import running
from remat_jax.parity.compared import compared, modules
from remat_jax.parity.divergence import Divergence, first_backward, first_forward, noted
from remat_jax.parity.match import match
from remat_jax.porting import as_numpy, as_rules
from remat_jax.porting.float64 import keep_float64
from remat_jax.porting.links import tied_pairs as tied
from remat_jax.porting.transfer import take


@dataclass(frozen=True)
class Divergences:
    """The divergences that `first_divergences` finds.

    Attributes:
        forward: the first module in the order of execution whose inputs agree while its output differs, or the state that it
            wrote, such as statistics. `loss` stands for the loss function; None if no module diverges.
        backward: the first module in the order of the backward pass whose forward pass and output cotangents agree while its
            input cotangents or its parameters' gradients differ; None if no module diverges.
        alone: every module that is wrong by itself, if `single_step` was set.
        matched: PyTorch path → Flax path of the compared modules.
        unmatched_torch, unmatched_flax: paths of the modules without a counterpart.
        stale: Flax modules whose recomputation gave a different output from equal inputs; innermost first.
        hidden: Flax modules that ran where capture is impossible.

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

    The innermost module whose inputs agree and whose outputs differ is named: an attention with correct projections and wrong
    products is named itself. The backward pass names only a module that the forward pass does not explain.

    With `single_step`, every Flax module is given the inputs and cotangents of its original, so no error propagates, and
    `alone` lists all modules that are wrong by themselves.

    Args:
        torch_module: a PyTorch module; a float64 copy is run if its dtype is different.
        flax_module, variables: a Linen module and its variables, or an NNX module (variables=None: its own state), with the
            PyTorch module's weights.
        inputs: a tuple of arguments or a dict of keywords. `flax_inputs` are the Flax model's inputs if they differ.
        loss: a function from the outputs to a scalar, for both models, or a pair of functions, PyTorch's first. Without `loss`
            it is the sum of all outputs, weighted by fixed random numbers.
        mapping: PyTorch module path → Flax module path, as a dict or the path of a JSON file, for modules that names, order and
            sizes do not match; None means that a module has no counterpart.
        rules: the weight map (`remat_jax.porting`), by which every parameter's gradient is compared, even where the modules are
            divided differently, such as projections that are a single tensor in PyTorch. Without `rules` names decide.
        torch_call, flax_call, transform: `call` of `capture_torch`, and `call` and `transform` of `capture_flax`.

    Raises:
        ArgumentError: `mapping` contains a path without a module, the outputs differ in form, or the PyTorch module is in
            train mode and has dropout.

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
    with _wide(flax_module, variables, inputs if flax_inputs is None else flax_inputs) as (module, given, arguments):
        with running("flax_module"):
            step = trace_step(module, given, arguments, losses[1], call=flax_call, transform=transform)
        ours, slots = read(step)
        _refuse_other_outputs(theirs, ours, probed=loss is None)
        matched = match(modules(theirs), modules(ours), mapping)
        pairs = compared(theirs, ours, matched, None if rules is None else _under_torch_names(ours.gradients, rules))
        alone = each_alone(step, slots, theirs, ours, matched, pairs) if single_step else ()
    forward = first_forward(pairs)
    unmatched = _unmatched(theirs, matched), _unmatched(ours, matched.values())
    return Divergences(
        forward=forward and noted(forward, *unmatched),
        backward=first_backward(pairs, forward_agrees=forward is None),
        alone=alone,
        matched=matched,
        unmatched_torch=unmatched[0],
        unmatched_flax=unmatched[1],
        stale=ours.stale,
        hidden=ours.hidden,
    )


def _under_torch_names(gradients: Mapping[str, Any], rules: Any) -> dict[str, Any]:
    """Flax's gradients under PyTorch's names; a tied gradient is under both of its names."""
    rules, problems = as_rules(rules), list[str]()
    renamed = take(rules, dict(gradients), problems, direction="adjoint")
    if problems:
        raise PortingError("the gradients do not fit the rules:\n  " + "\n  ".join(problems))
    for one, other in list(tied(rules, renamed)):
        renamed[one] = renamed[other] = renamed[one if one in renamed else other]
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
        return jnp.asarray(leaf, jnp.float64) if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    with jax.enable_x64(True):
        if isinstance(module, nnx.Module) and variables is None:
            variables = nnx.state(module)
        yield module, jax.tree.map(wide, variables), _map_arrays(inputs, lambda array: jnp.asarray(in_float64(array)))


def _refuse_other_outputs(torch: Trace, flax: Trace, *, probed: bool) -> None:
    # A `torch_call` or `flax_call` that calls only submodules records no call of the whole model.
    whole = [trace[""].outputs for trace in (torch, flax) if "" in trace]
    alike = len(whole) < 2 or pairs_of(whole[0], whole[1])
    if not alike or (probed and torch.outputs != flax.outputs):
        raise ArgumentError(
            f"the models give outputs of shapes {list(torch.outputs)} (PyTorch) and {list(flax.outputs)} (Flax), which cannot "
            "be compared; give torch_call or flax_call, so that both return the same arrays, or a loss"
        )


def _unmatched(trace: Trace, matched: Iterable[str]) -> tuple[str, ...]:
    paths = set(matched)
    return tuple(dict.fromkeys(call.path for call in trace.calls if call.path not in paths))
