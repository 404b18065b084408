"""The settings in which the two models differ, and the check that lists them in every report."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from remat_jax.errors import RematError
from remat_jax.parity.capture_flax import TracedPass, trace_step
from remat_jax.parity.case import Case, is_floating, running
from remat_jax.parity.explain import call_of
from remat_jax.parity.flax_side import arrays_in
from remat_jax.parity.masks import FAR, flax_masks, opposed, torch_masks
from remat_jax.parity.report_data import Check
from remat_jax.parity.semantics import Difference, step_differences
from remat_jax.porting.tensors import as_torch
from remat_jax.porting.variables import Variables

_NAMED = 4
"""The number of findings that the check's text names."""


def settings(case: Case, structure: Callable[[str], tuple[Any, Any]]) -> tuple[tuple[dict[str, Any], ...], Check]:
    """The settings that differ, as plain data, and a check that lists them.

    The check always passes: the compared values decide whether a setting matters. Both models are read in the dtype of the
    given PyTorch model. If the modules cannot be read, the check says why.
    """
    model = case.torch()
    dtype = next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()), "float32")
    found, unread = _precision(), ""
    try:
        with jax.enable_x64(dtype == "float64"):
            _, variables = structure(dtype)
            module = case.flax(dtype)
            args, kwargs = case.inputs.arguments(arrays_in(case, dtype))
            call = call_of(case, module)
            with running("flax_module"):
                step = trace_step(module, _cast(variables, dtype), kwargs or args, call=call, backward=False)
            found += [*step_differences(model, step), *_masks(case, model, dtype, step)]
    except RematError as error:
        unread = f"the modules could not be read: {error}"
    texts = [unread] * bool(unread) + [str(difference) for difference in found[:_NAMED]]
    texts += [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
    data = tuple({**asdict(each), "torch": str(each.torch), "flax": str(each.flax)} for each in found)
    return data, Check("settings", True, "; ".join(texts) or "no setting that modules state differs")


def _precision() -> list[Difference]:
    """The precision of float32 products, if the frameworks' global settings differ."""
    import torch

    theirs, ours = torch.get_float32_matmul_precision(), jax.config.jax_default_matmul_precision
    exact = theirs == "highest", ours in (None, "highest", "float32")
    return [] if all(exact) else [Difference("", "precision of float32 products", theirs, ours or "highest")]


def _masks(case: Case, torch_model: Any, dtype: str, step: TracedPass) -> Iterator[Difference]:
    """The masks among the inputs that show a position in one framework and hide it in the other.

    A mask consists of 0 and 1, or is additive: 0, and numbers far below.
    """
    import torch

    shows = {name: _shows(array) for name, array in case.inputs.arrays.items()}
    added = {name for name, number in shows.items() if number == 0}
    names = {place: name for place, name in _places(case, step).items() if shows[name] is not None}
    ours = flax_masks(step.jaxpr, names, step.recorder.paths, added) if names else {}
    if not ours:
        return
    arrays = {n: as_torch(x) for n, x in arrays_in(case, dtype).items()}
    args, kwargs = case.inputs.arguments(arrays)
    model = copy.deepcopy(torch_model)  # a forward pass may write statistics
    with torch.random.fork_rng(devices=[]), running("torch_module"):
        theirs = torch_masks(lambda: case.torch_call(model, *args, **kwargs), {name: arrays[name] for name in ours}, added)
    words = {1: "shown", -1: "hidden"}
    for path, name, sign in opposed(theirs, ours):
        which = name if case.inputs.positional is None else f"input {name}"
        yield Difference(path, f"a position where {which} is {shows[name]}", words[-sign], words[sign])


def _shows(array: Any) -> int | None:
    """The number that shows a position, if an array may be a mask: 1, or 0 in an additive mask; else None.

    >>> _shows(np.array([True, False])), _shows(np.array([0.0, -np.inf])), _shows(np.array([0.5])), _shows(np.zeros(2))
    (1, 0, None, None)
    """
    values = np.unique(np.asarray(array, np.float64)) if array.dtype.kind != "c" else np.ones(1) / 2
    if is_floating(array.dtype) and set(values) <= {0}:
        return None  # all zeros: either kind of mask
    if set(values) <= {0, 1}:
        return 1
    return 0 if all(value == 0 or value <= FAR for value in values) else None


def _places(case: Case, step: TracedPass) -> dict[int, str]:
    """The step's argument positions of the model's inputs → their names, in the order of JAX's trees, floats first."""
    floating, numbers = case.inputs.floating, jax.tree.leaves(step.numbers[1])
    ordered = sorted(case.inputs.arrays, key=_order(case))
    places = dict(zip(numbers, (name for name in ordered if name in floating), strict=True))
    whole = [name for name in ordered if name not in floating]
    first = len(step.jaxpr.jaxpr.invars) - len(whole)
    return places | {first + place: name for place, name in enumerate(whole)}


def _order(case: Case) -> Callable[[str], Any]:
    """The sort key of inputs: keywords by name, as JAX sorts them, others by position."""
    return (lambda name: name) if case.inputs.positional is None else case.inputs.positional.index


def _cast(variables: Any, dtype: str) -> Any:
    """The variables' shapes, floating-point ones in `dtype`: the comparison casts them, so their dtype is no finding."""
    tree = Variables(variables)
    shapes = {
        path: jax.ShapeDtypeStruct(x.shape, dtype if is_floating(x.dtype) else x.dtype) for path, x in tree.leaves.items()
    }
    return tree.rebuild(shapes)
