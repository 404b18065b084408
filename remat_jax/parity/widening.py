"""Whether the float64 runs of a comparison need `keep_float64`, because float32 is hard-coded inside the Flax model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from remat_jax.errors import RematError
from remat_jax.parity.capture_flax import TracedPass, trace_step
from remat_jax.parity.case import Case, arguments, running
from remat_jax.parity.flax_side import arrays_in, shapes_in
from remat_jax.parity.recorder import RecordedTrace
from remat_jax.parity.report_data import Check
from remat_jax.porting.dataflow import down_casts
from remat_jax.porting.float64 import with_wider_retry
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
    if case.keep_float64 is not None or "float64" not in case.dtypes:
        return Widening(bool(case.keep_float64), [])
    try:
        step, is_needed = with_wider_retry(lambda: _traced(case, structure))
    except RematError:
        return Widening(False, [])  # a later run raises this error with more context
    casts = down_casts(step.jaxpr)
    if is_needed:
        text = "the Flax model runs on float64 inputs only with keep_float64=True, which is on"
        return Widening(True, [Check("Flax stays in float64", True, text)])
    hard_coded = all("float64 to float32" in cast for cast in casts) and (torch_narrows or not _is_mixed(step))
    if not casts or not hard_coded:
        return Widening(False, [])
    text = (
        f"its float64 step casts to float32: {'; '.join(casts[:4])}; keep_float64=True is on, and runs these casts in float64"
    )
    return Widening(True, [Check("Flax stays in float64", True, text)])


def _traced(case: Case, structure: Callable[[str], tuple[Any, Any]]) -> TracedPass:
    module, variables = case.flax("float64"), Variables(structure("float64")[1])
    shapes = variables.rebuild(shapes_in("float64", variables.leaves))
    with running("flax_module"):
        inputs = arguments(case, arrays_in(case, "float64"))
        return trace_step(module, shapes, inputs, call=case.traced_call(module), backward=False)


def _is_mixed(step: TracedPass) -> bool:
    """Whether some modules with parameters were given a narrow `dtype`, and others compute in float64."""
    calls = step.recorder.calls
    return len({_is_narrowed(call, calls) for call in calls if call.parameters}) > 1


def _is_narrowed(call: RecordedTrace, calls: Sequence[RecordedTrace]) -> bool:
    """Whether a module was given a narrow `dtype`, by a caller for whose class it is not the default."""
    dtype = getattr(call.module, "dtype", None)
    if dtype is None or jnp.dtype(dtype) == _FLOAT64:
        return False
    while call.parent is not None and getattr(calls[call.parent].module, "dtype", None) == dtype:
        call = calls[call.parent]
    parameter = inspect.signature(type(call.module)).parameters.get("dtype")
    return parameter is None or parameter.default != dtype
