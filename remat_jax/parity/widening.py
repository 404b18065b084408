"""Whether the float64 runs of a comparison need `keep_float64`, because float32 is hard-coded inside the Flax model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from remat_jax.errors import ArgumentError, RematError
from remat_jax.parity.capture_flax import TracedPass, trace_step
from remat_jax.parity.case import Case, arguments, running
from remat_jax.parity.flax_side import arrays_in, shapes_in
from remat_jax.parity.recorder import RecordedTrace
from remat_jax.parity.report_data import Check
from remat_jax.porting.dataflow import down_casts, draws_random_numbers, has_narrow_tables
from remat_jax.porting.float64 import keep_jax_float64, with_wider_retry
from remat_jax.porting.variables import Variables

_FLOAT64 = jnp.dtype("float64")


class Widening(NamedTuple):
    """Whether `keep_float64` applies, and the check that says so; no check if there is nothing to say."""

    keeps: bool
    checks: list[Check]


def widening(case: Case, structure: Callable[[str], tuple[Any, Any]], *, torch_narrows: bool) -> Widening:
    """Decide `keep_float64` if the caller leaves it open: it applies if float32 is hard-coded inside the Flax model.

    It does not apply, so that the comparison fails, if the model casts to bfloat16 or float16, or if only some of its modules
    have a narrow `dtype`: both may be faults of the port. The latter is no fault if PyTorch casts too (`torch_narrows`).
    """
    try:
        step, is_needed = with_wider_retry(lambda: _traced(case, structure))
    except RematError:
        return Widening(bool(case.keep_float64), [])  # a later run raises this error with more context
    _refuse_dropout(case.flax("float64"), step.jaxpr)
    if case.keep_float64 is not None or "float64" not in case.dtypes:
        return Widening(bool(case.keep_float64), [])
    casts = down_casts(step.jaxpr)
    if is_needed:
        text = "the Flax model runs on float64 inputs only with keep_float64=True, which is on"
        return Widening(True, [Check("Flax stays in float64", True, text)])
    with keep_jax_float64():
        has_tables = not casts and has_narrow_tables(step.jaxpr, lambda: _traced(case, structure).jaxpr)
    hard_coded = all("float64 to float32" in cast for cast in casts) and (torch_narrows or not _is_mixed(step, casts))
    if not (casts or has_tables) or not hard_coded:
        return Widening(False, [])
    text = f"its float64 step casts to float32: {'; '.join(casts[:4])}" if casts else "it makes arrays in float32"
    return Widening(True, [Check("Flax stays in float64", True, f"{text}; keep_float64=True is on, and makes them float64")])


def _traced(case: Case, structure: Callable[[str], tuple[Any, Any]]) -> TracedPass:
    module, variables = case.flax("float64"), Variables(structure("float64")[1])
    shapes = variables.rebuild(shapes_in("float64", variables.leaves))
    with running("flax_module"):
        inputs = arguments(case, arrays_in(case, "float64"))
        return trace_step(module, shapes, inputs, call=case.traced_call(module), backward=False)


def _refuse_dropout(module: object, jaxpr: ClosedJaxpr) -> None:
    """Refuse an NNX model whose results depend on random numbers, and that has an active dropout."""
    if not isinstance(module, nnx.Module) or not draws_random_numbers(jaxpr):
        return
    parts = [(path, part) for path, part in nnx.iter_graph(module) if isinstance(part, nnx.Dropout)]
    active = ["/".join(map(str, path)) for path, part in parts if part.rate and not part.deterministic]
    if active:
        raise ArgumentError(
            f"flax_module: dropout is on in {', '.join(active[:4])}, and no other framework draws the same random numbers: "
            "call flax_module.eval(), or build it with a rate of 0"
        )


def _is_mixed(step: TracedPass, casts: Sequence[str]) -> bool:
    """Whether only some modules of a kind compute in a narrower dtype: by their `dtype`, or as the places of `casts` say."""
    calls = step.recorder.calls
    by_number: dict[str, dict[str, bool]] = {}
    for call in calls:
        path = "/".join(call.path)
        if call.path and re.search(r"\d", path):
            is_cast = any(f"/{path}/" in f"/{cast.partition(' in ')[2]}/" for cast in casts)
            by_number.setdefault(re.sub(r"\d+", "*", path), {})[path] = is_cast
    uneven = any(len(set(of_kind.values())) > 1 for of_kind in by_number.values())
    return uneven or len({_is_narrowed(call, calls) for call in calls if call.parameters}) > 1


def _is_narrowed(call: RecordedTrace, calls: Sequence[RecordedTrace]) -> bool:
    """Whether a module was given a narrow `dtype`, by a caller for whose class it is not the default."""
    dtype = getattr(call.module, "dtype", None)
    if dtype is None or jnp.dtype(dtype) == _FLOAT64:
        return False
    while call.parent is not None and getattr(calls[call.parent].module, "dtype", None) == dtype:
        call = calls[call.parent]
    parameter = inspect.signature(type(call.module).__init__).parameters.get("dtype")
    return parameter is None or parameter.default != dtype
