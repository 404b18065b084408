"""The state of tracing: loops, tracers, memory spaces, the trace context."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _pe

_LOOPS = frozenset({"scan", "while_body", "while_loop", "fori_loop", "map", "associative_scan"})
_DIFFERENTIATIONS = ("JVPTrace", "LinearizeTrace")


def in_loop(*, around_gradient: bool = True) -> bool:
    """Whether the current trace is inside the body of a `scan` or `while` loop, at any depth of `jit`, `vmap`, `grad`.

    Without `around_gradient`, a loop around the differentiation does not count, because its body contains both passes.
    """
    trace, ends = _core.trace_ctx.trace, () if around_gradient else _DIFFERENTIATIONS
    while trace is not None and type(trace).__name__ not in ends:
        debug = getattr(getattr(trace, "frame", None), "debug_info", None)
        if getattr(debug, "traced_for", None) in _LOOPS:
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def is_fixed_in_loops(leaf: Any) -> bool:
    """Whether every iteration of the loops that are being traced reads the same array `leaf`.

    This holds for arrays from before the outermost of these loops, and for arrays computed from such arrays alone. A loop
    around the differentiation does not count.
    """
    inside = _traces_in_loops()
    return bool(inside) and _is_fixed(leaf, inside)


def _traces_in_loops() -> list[Any]:
    """The traces from the innermost to the body of the outermost loop; empty outside loops."""
    trace, passed, inside = _core.trace_ctx.trace, [], []
    while trace is not None and type(trace).__name__ not in _DIFFERENTIATIONS:
        passed.append(trace)
        if getattr(getattr(getattr(trace, "frame", None), "debug_info", None), "traced_for", None) in _LOOPS:
            inside = list(passed)
        trace = getattr(trace, "parent_trace", None)
    return inside


def _is_fixed(leaf: Any, inside: Sequence[Any]) -> bool:
    waiting, seen = [leaf], set()
    while waiting:
        tracer = waiting.pop()
        while isinstance(tracer, _core.Tracer) and not isinstance(tracer, _pe.DynamicJaxprTracer):
            tracer = getattr(tracer, "primal", getattr(tracer, "val", None))
        if id(tracer) in seen or not isinstance(tracer, _core.Tracer) or not any(tracer._trace is trace for trace in inside):
            continue
        seen.add(id(tracer))
        outer = tracer._trace.get_const(tracer)
        if outer is not None:
            # The array comes from outside this body, maybe from the body of an outer loop.
            waiting.append(outer)
        elif tracer.parent is None and _is_broadcast(tracer):
            continue
        elif tracer.parent is None or len(seen) > _MOST_EQUATIONS:
            # An input of a loop or call has no equation. The search stops after some equations, because most arrays have many.
            return False
        else:
            waiting += tracer.parent.in_tracers
    return True


_MOST_EQUATIONS = 100


def is_staging() -> bool:
    """Whether calls are being traced into a program, under any transformations; False if JAX runs op by op."""
    trace = _core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, _pe.DynamicJaxprTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def program_id(leaf: Any) -> int:
    """The id of the program that contains the tracer `leaf`; for an array, of the outermost program that is being traced."""
    frame = _frame_of(leaf)
    if frame is None:
        trace = _core.trace_ctx.trace
        while trace is not None:
            frame = trace if isinstance(trace, _pe.DynamicJaxprTrace) else frame
            trace = getattr(trace, "parent_trace", None)
    return id(frame)


# `nnx.scan` carries broadcast values through the iterations, in a list of its own: `args[0][3][0].data`.
_BROADCAST = re.compile(r"\w+\[0\]\[3\]\[\d+\]\.data\b")


def _is_broadcast(leaf: Any) -> bool:
    """Whether the tracer `leaf` is an argument of a loop's body that `nnx.scan` broadcasts to all iterations."""
    frame = getattr(leaf._trace, "frame", None)
    arguments = getattr(frame, "invars", ())
    names = getattr(getattr(frame, "debug_info", None), "arg_names", None) or ()
    return any(
        var is getattr(leaf, "val", None) and bool(_BROADCAST.match(str(name)))
        for var, name in zip(arguments, names, strict=False)
    )


def is_differentiated(leaf: Any) -> bool:
    """Whether the tracer `leaf` is being differentiated now; a later derivative of its program does not count."""
    while isinstance(leaf, _core.Tracer):
        if type(leaf).__name__ in ("LinearizeTracer", "JVPTracer"):
            return True
        leaf = getattr(leaf, "primal", getattr(leaf, "val", None))
    return False


def _frame_of(leaf: Any) -> Any:
    while isinstance(leaf, _core.Tracer):
        if isinstance(leaf, _pe.DynamicJaxprTracer):
            return leaf._trace
        leaf = getattr(leaf, "primal", getattr(leaf, "val", None))
    return None


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array or a tracer (Python scalars, strings, None and objects are not)."""
    return isinstance(leaf, jax.Array | _core.Tracer) or (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))


def is_traced(leaf: Any) -> bool:
    """Whether `leaf` is a tracer, whose value is unknown while Python runs."""
    return isinstance(leaf, _core.Tracer)


def is_staged(leaf: Any) -> bool:
    """Whether `leaf` is a tracer of a program, under any transformations; False if JAX runs op by op."""
    while isinstance(leaf, _core.Tracer):
        if isinstance(leaf, _pe.DynamicJaxprTracer):
            return True
        leaf = getattr(leaf, "primal", getattr(leaf, "val", None))
    return False


def type_of(leaf: Any) -> Any:
    """The type of an array or a tracer; a type is returned unchanged."""
    return leaf if isinstance(leaf, _core.AbstractValue) else jax.typeof(leaf)


def on_device(leaf: Any) -> Any:
    """The type of the array `leaf`, moved to device memory."""
    return _core.shaped_abstractify(leaf).update(memory_space=jax.memory.Space.Device)


def is_on_host(leaf: Any) -> bool:
    """Whether `leaf`, an array, tracer or `jax.ShapeDtypeStruct`, is in host memory."""
    # Reading the sharding of a tracer is slow: it formats a long error first.
    if not is_traced(leaf) and getattr(getattr(leaf, "sharding", None), "memory_kind", None) == "pinned_host":
        return True
    return getattr(_core.shaped_abstractify(leaf), "memory_space", None) is jax.memory.Space.Host


def made_by(leaf: Any) -> tuple[int, Any, Any] | None:
    """The equation behind the tracer `leaf`: its index in the trace, the equation, and its output; None without one."""
    frame: Any = getattr(getattr(leaf, "_trace", None), "frame", None)
    parent = getattr(leaf, "parent", None)
    if parent is None or not hasattr(frame, "tracing_eqns"):
        return None
    eqns = (eqn() if callable(eqn) else eqn for eqn in frame.tracing_eqns)
    place = next((place for place, eqn in enumerate(eqns) if eqn is parent), None)
    return None if place is None else (place, parent, getattr(leaf, "val", None))


def bound_axes() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context that binds again the axes (of `vmap`, of a mesh) that are bound now.

    A derivative rule is traced when its function is differentiated. The body of a scan or `jit` may be differentiated after a
    `vmap` has ended, while a collective in the body names the axis of that `vmap`.
    """
    axes = _core.get_axis_env().axis_sizes

    def bound() -> contextlib.AbstractContextManager[Any]:
        here = _core.get_axis_env()
        return _core.extend_axis_env_nd([(name, size) for name, size in axes.items() if not here.axis_exists(name)])

    return bound


def axes_of_vmaps(vmaps: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """A context that binds the axis of each `vmap` (its `name` and `size`), for collectives of a jaxpr from inside them."""
    return _core.extend_axis_env_nd([(vmap.name, vmap.size) for vmap in vmaps])


def trace_context(default: Any, *, reaches_blocks: bool = True) -> Callable[[Any], contextlib.AbstractContextManager[Any]]:
    """A context whose value is a key of JAX's trace caches: under a new value, every `jit` inside is traced again.

    Without `reaches_blocks`, the value does not distinguish blocks with equal jaxprs (`block_settings`).
    """
    context = jax.make_user_context(default)
    if not reaches_blocks:
        _outside_blocks.append((context, default))
    return context


_outside_blocks: list[tuple[Any, Any]] = []


def trace_context_value(context: Any) -> Any:
    """The current value of a `trace_context`."""
    return context.value


def trace_settings() -> Any:
    """All JAX settings that a trace depends on, as one comparable value."""
    return _config.trace_context()


def block_settings() -> Any:
    """`trace_settings` without contexts that do not reach blocks, so that they are equal under all policies."""
    with contextlib.ExitStack() as defaults:
        for context, default in _outside_blocks:
            defaults.enter_context(context(default))
        return trace_settings()
