"""Why two models differ: the first module that diverges; and what random weights show of gradients that are 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import flax.linen as nn
import numpy as np

from remat_jax.errors import RematError
from remat_jax.parity.capture_torch import capture_torch
from remat_jax.parity.case import Case, running
from remat_jax.parity.localise import first_divergences
from remat_jax.parity.report_data import Check
from remat_jax.parity.torch_side import TorchSide
from remat_jax.porting import Rules
from remat_jax.porting.auto.pair import LIMIT, ModelPair, Values
from remat_jax.porting.float64 import keep_float64

_DRAWS = 4
"""Random weights that are tried for gradients that are 0 with the model's own."""


def first_difference(
    case: Case, torch_model: Any, variables: Any, rules: Any, transform: Callable[..., Any] | None
) -> tuple[dict[str, Any], tuple[str, ...], list[Check]]:
    """The first module that differs in each pass, by direction; the hidden modules; and failed checks.

    `transform` applies the mode in which tensors differ to the differentiated function.
    """
    module, inputs = case.flax("float64"), _arguments(case)
    call = call_of(case, module)
    try:
        found = first_divergences(
            torch_model,
            module,
            variables,
            inputs,
            loss=case.loss,
            torch_call=case.torch_call,
            flax_call=call,
            transform=transform,
            rules=rules,
        )
    except RematError as error:
        return {}, (), [Check("first difference", False, f"not found: {error}")]
    stale = (
        (f"{', '.join(found.stale)}: the recomputation of a checkpoint gave other values than its forward pass")
        if found.stale
        else ""
    )
    checks = [Check("recomputation", False, stale)] if stale else []
    divergences = {side: one and asdict(one) for side, one in (("forward", found.forward), ("backward", found.backward))}
    return divergences, found.hidden, checks


def computed_otherwise(case: Case, torch: TorchSide, mode: str) -> str:
    """The PyTorch modules whose recomputation differs in a mode, as text; or why that is unknown."""
    try:
        model = torch.make("float64")
        with keep_float64(), torch.in_mode(model, mode), running("torch_module"):
            trace = capture_torch(model, _arguments(case), case.loss and case.loss[0], call=case.torch_call)
    except RematError as error:
        return f"it is unknown whether a module's recomputation differs: {error}"
    return f"the recomputation of {', '.join(trace.stale)} gives other values" if trace.stale else ""


def with_random_weights(case: Case, torch: TorchSide, rules: Rules, zero: Sequence[str]) -> tuple[set[str], str]:
    """Those of the `zero` gradients that agree where they are not 0, in float64 with random weights; and what differs there.

    The loss is a sum of all outputs with random factors.
    """
    shown = set[str]()
    try:
        inputs = dict(case.inputs.arrays)
        calls = (case.by_name(case.torch_call), case.by_name(case.flax_call))
        pair = ModelPair(torch.make("float64"), case.flax_module, inputs, case.variables, calls)
        for seed in range(_DRAWS):
            values = _signed(pair.generic(seed), seed)
            gradients = pair.run_torch(values)[1]
            alive = {name for name in zero if name in gradients and np.any(gradients[name])}
            error, where = pair.disagreement(rules, values) if alive - shown else (0.0, "")
            if not error <= LIMIT:
                return shown, f"{where} is {error:.1e} off"
            shown |= alive
    except RematError:
        return shown, ""
    return shown, ""


def _signed(values: Values, seed: int) -> Values:
    """The weights with random signs, but variances: a ReLU that no input reaches is often reached then."""
    random = np.random.default_rng(seed)
    return {
        name: x * random.choice((-1.0, 1.0), x.shape) if x.dtype == np.float64 and not name.endswith("running_var") else x
        for name, x in values.items()
    }


def _arguments(case: Case) -> Any:
    args, kwargs = case.inputs.arguments(case.inputs.arrays)
    return kwargs or args


def call_of(case: Case, module: Any) -> Callable[..., Any]:
    """The user's `flax_call`, for a Linen module as a function that also takes its variables."""
    if not isinstance(module, nn.Module):
        return case.flax_call

    def call(module: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        mutable = [name for name in variables if name != "params"]
        result = nn.apply(case.flax_call, module, mutable=mutable or False)(variables, *args, **kwargs)
        return result[0] if mutable else result

    return call
