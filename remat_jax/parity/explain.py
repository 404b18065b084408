"""Explain a comparison: which settings differ, which module diverges first, and what gradients of 0 may hide."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import numpy as np

from remat_jax.errors import RematError
from remat_jax.parity.capture_flax import TracedPass, trace_step
from remat_jax.parity.capture_torch import capture_torch
from remat_jax.parity.case import Case, arguments, running
from remat_jax.parity.flax_side import arrays_in, shapes_in
from remat_jax.parity.localise import Divergences, first_divergences
from remat_jax.parity.masks import FAR, flax_masks, opposed, torch_masks
from remat_jax.parity.report_data import Check
from remat_jax.parity.semantics import Difference, step_differences
from remat_jax.parity.torch_side import TorchSide
from remat_jax.parity.trees import is_floating
from remat_jax.porting import Rules
from remat_jax.porting.auto.pair import LIMIT, ModelPair, Values
from remat_jax.porting.float64 import keep_float64
from remat_jax.porting.tensors import as_torch
from remat_jax.porting.variables import Variables

_NAMED = 4
"""The largest number of settings that the text of the settings check names."""
_DRAWS = 4
"""The number of random sets of weights that are tried if gradients are 0 with the model's own weights."""


# Settings.


def settings(case: Case, structure: Callable[[str], tuple[Any, Any]]) -> tuple[list[Difference], str]:
    """The settings that differ, read in PyTorch's dtype, and the reason why the modules could not be read, or ""."""
    model = case.torch()
    dtype = next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()), "float32")
    differing = _precision()
    try:
        with jax.enable_x64(dtype == "float64"):
            variables, module = Variables(structure(dtype)[1]), case.flax(dtype)
            # The comparison casts the variables, so a difference in their original dtype is not reported.
            shapes = variables.rebuild(shapes_in(dtype, variables.leaves))
            inputs = arguments(case, arrays_in(case, dtype))
            with running("flax_module"):
                step = trace_step(module, shapes, inputs, call=case.traced_call(module), backward=False)
            differing += [*step_differences(model, step), *_masks(case, model, dtype, step)]
    except RematError as error:
        return differing, f"the modules could not be read: {error}"
    # A comparison refuses active dropout, and without dropout its rate has no effect.
    return [each for each in differing if each.what != "dropout rates"], ""


def settings_check(differing: Sequence[Difference], problem: str) -> Check:
    """A check that lists settings; it always passes, because only the tensors decide whether a setting matters."""
    texts = [problem] if problem else []
    texts += map(str, differing[:_NAMED])
    texts += [f"and {len(differing) - _NAMED} more"] if len(differing) > _NAMED else []
    return Check("settings", True, "; ".join(texts) or "no setting that modules state differs")


def without_effect(difference: Difference, agreeing: Collection[str]) -> bool:
    """Whether a setting has no effect: padding that another operation makes up for, in a module whose outputs agree."""
    return difference.what == "padding" and difference.path in agreeing


def _precision() -> list[Difference]:
    """The precision of float32 matmuls, if a global setting of either framework lowers it."""
    import torch

    theirs, ours = torch.get_float32_matmul_precision(), jax.config.jax_default_matmul_precision
    exact = theirs == "highest" and ours in (None, "highest", "float32")
    return [] if exact else [Difference("", "precision of float32 matmuls", theirs, ours or "highest")]


def _masks(case: Case, torch_model: Any, dtype: str, step: TracedPass) -> Iterator[Difference]:
    """The input masks by which one framework shows a position and the other hides the same position."""
    import torch

    shows = {name: _shows(array) for name, array in case.inputs.arrays.items()}
    added = {name for name, number in shows.items() if number == 0}
    # JAX sorts keywords by name.
    in_order = sorted(shows) if case.inputs.positional is None else list(shows)
    places = zip(jax.tree.leaves(step.numbers[1]), in_order, strict=True)
    names = {place: name for place, name in places if shows[name] is not None}
    ours = flax_masks(step.jaxpr, names, step.recorder.paths, added) if names else {}
    if not ours:
        return
    arrays = {name: as_torch(x) for name, x in arrays_in(case, dtype).items()}
    args, kwargs = case.inputs.arguments(arrays)
    model = copy.deepcopy(torch_model)  # a forward pass may write statistics
    with torch.random.fork_rng(devices=[]), running("torch_module"):
        theirs = torch_masks(lambda: case.torch_call(model, *args, **kwargs), {name: arrays[name] for name in ours}, added)
    words = {1: "shown", -1: "hidden"}
    for path, name, sign in opposed(theirs, ours):
        which = name if case.inputs.positional is None else f"input {name}"
        yield Difference(path, f"a position where {which} is {shows[name]}", words[-sign], words[sign])


def _shows(array: np.ndarray) -> int | None:
    """The number that marks a shown position, if an array may be a mask: 1, or 0 in an additive mask; else None.

    >>> _shows(np.array([True, False])), _shows(np.array([0.0, -np.inf])), _shows(np.array([0.5])), _shows(np.zeros(2))
    (1, 0, None, None)
    """
    if array.dtype.kind == "c":
        return None
    values = np.unique(np.asarray(array, np.float64))
    if is_floating(array) and set(values) <= {0}:
        return None  # an array of zeros may be either kind of mask
    if set(values) <= {0, 1}:
        return 1
    return 0 if all(value == 0 or value <= FAR for value in values) else None


# The first module that differs.


class Explanation(NamedTuple):
    """The first module that differs in each pass.

    Attributes:
        divergences: `forward` and `backward` → a `Divergence` as a dict, or None if no module differs.
        found: the result of `first_divergences`; None if it raised an error.
        checks: the failed checks.
    """

    divergences: dict[str, Any]
    found: Divergences | None
    checks: list[Check]


def first_difference(
    case: Case, torch_model: Any, variables: Any, rules: Any, transform: Callable[..., Any] | None
) -> Explanation:
    """Find the first module that differs in each pass; `transform` applies the Flax model's mode (None: `off`)."""
    module = case.flax("float64")
    try:
        found = first_divergences(
            torch_model,
            module,
            variables,
            arguments(case, case.inputs.arrays),
            loss=case.loss,
            torch_call=case.torch_call,
            flax_call=case.traced_call(module),
            transform=transform,
            rules=rules,
        )
    except RematError as error:
        return Explanation({}, None, [Check("first difference", False, f"not found: {error}")])
    by_pass = {"forward": found.forward, "backward": found.backward}
    divergences = {direction: first and asdict(first) for direction, first in by_pass.items()}
    stale = f"{', '.join(found.stale)}: a checkpoint recomputed values that differ from those of its forward pass"
    return Explanation(divergences, found, [Check("recomputation", False, stale)] if found.stale else [])


def computed_otherwise(case: Case, torch: TorchSide, mode: str) -> str:
    """A text that names the PyTorch modules whose recomputation differs in a mode; "" if there are none.

    If the modules cannot be found, the text gives the reason.
    """
    try:
        model, inputs = torch.make("float64"), arguments(case, case.inputs.arrays)
        with keep_float64(), torch.in_mode(model, mode), running("torch_module"):
            trace = capture_torch(model, inputs, case.loss and case.loss[0], call=case.torch_call)
    except RematError as error:
        return f"it is unknown whether a module's recomputation differs: {error}"
    return f"recomputing {', '.join(trace.stale)} gives different values" if trace.stale else ""


# Gradients that are 0.


def with_random_weights(case: Case, torch: TorchSide, rules: Rules, zero: Sequence[str]) -> tuple[set[str], str]:
    """Compare the gradients named in `zero` again, in float64 with random weights; they are 0 with the model's own weights.

    Returns the names in `zero` whose gradients are then equal and not 0, and a text that names the tensor that differs.
    """
    agreeing = set[str]()
    try:
        calls = (case.by_name(case.torch_call), case.by_name(case.flax_call))
        pair = ModelPair(torch.make("float64"), case.flax_module, dict(case.inputs.arrays), case.variables, calls)
        for seed in range(_DRAWS):
            values = _signed(pair.generic(seed), seed)
            gradients = pair.run_torch(values)[1]
            alive = {name for name in zero if name in gradients and np.any(gradients[name])}
            error, where = pair.disagreement(rules, values) if alive - agreeing else (0.0, "")
            if not error <= LIMIT:
                return agreeing, f"{where} is {error:.1e} off"
            agreeing |= alive
    except RematError:
        pass  # return the names that agreed so far
    return agreeing, ""


def _signed(values: Values, seed: int) -> Values:
    """The weights with random signs, except variances: a ReLU that was inactive for all inputs often becomes active."""
    random = np.random.default_rng(seed)
    return {
        name: x * random.choice((-1.0, 1.0), x.shape) if x.dtype == np.float64 and not name.endswith("running_var") else x
        for name, x in values.items()
    }
