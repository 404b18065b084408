"""The state of tracing: loops, tracers, memory spaces, the trace context, Flax's capture of intermediates."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from flax.linen import module as _linen_module
from jax._src import config as _config
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _pe

from remat_jax.errors import ArgumentError

_LOOPS = frozenset({"scan", "while_body", "while_loop", "fori_loop", "map", "associative_scan"})
T = TypeVar("T")


@contextlib.contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside this context `variable` has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def traces() -> Iterator[Any]:
    """The current trace, then the traces around it."""
    trace = _core.trace_ctx.trace
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def _traces_inside_differentiation() -> Iterator[Any]:
    """The current trace, then the traces around it that are inside the innermost differentiation."""
    return itertools.takewhile(lambda trace: type(trace).__name__ not in ("JVPTrace", "LinearizeTrace"), traces())


def _is_loop(trace: Any) -> bool:
    """Whether `trace` traces the body of a loop."""
    return traced_for(trace) in _LOOPS


def traced_for(trace: Any) -> str | None:
    """JAX's word for what `trace` traces."""
    debug = getattr(getattr(trace, "frame", None), "debug_info", None)
    return getattr(debug, "traced_for", None)


def _wrapped(leaf: Any) -> Iterator[Any]:
    """The tracer `leaf`, then the tracers that it wraps; nothing for other values."""
    while isinstance(leaf, _core.Tracer):
        yield leaf
        leaf = getattr(leaf, "primal", getattr(leaf, "val", None))


def in_loop(*, around_gradient: bool = True) -> bool:
    """Whether the current trace is inside the body of a `scan` or `while` loop, at any depth of `jit`, `vmap`, `grad`.

    Without `around_gradient`, a loop around the differentiation does not count, because its body contains both passes.
    """
    return any(map(_is_loop, traces() if around_gradient else _traces_inside_differentiation()))


def in_solver() -> bool:
    """Whether the current trace is inside the `solve` of a `custom_linear_solve`, which JAX does not differentiate."""
    return any(traced_for(trace) in _SOLVERS for trace in traces())


# The first is the solver. The second is the solver of the transposed function.
_SOLVERS = frozenset({"custom_linear_solve solve", "custom_linear_solve transpose_solve"})


def in_eager_shard_map() -> bool:
    """Whether JAX runs a `shard_map` around the current trace op by op, where it copies to the host only inside a `jit`."""
    return any(type(trace).__name__ == "ShardMapTrace" for trace in traces())


def loops_around() -> int:
    """How many loops are around the current trace. A loop around the differentiation does not count."""
    return sum(map(_is_loop, _traces_inside_differentiation()))


def is_fixed_in_loops(leaf: Any) -> bool:
    """Whether `leaf` was computed before the loops that are being traced, so that every iteration reads the same array.

    An array that a loop computes only from such arrays is fixed, too. Loops around the differentiation are ignored.
    """
    traces = list(_traces_inside_differentiation())
    while traces and not _is_loop(traces[-1]):  # up to the body of the outermost loop
        traces.pop()
    return bool(traces) and _is_fixed(leaf, traces)


def _is_fixed(leaf: Any, traces_in_loops: Sequence[Any]) -> bool:
    # `leaf` holds its equations, and they hold the tracers whose ids are in `seen`.
    waiting, seen = [leaf], set()
    while waiting:
        tracer = _staged(waiting.pop())
        if tracer is None or id(tracer) in seen or tracer._trace not in traces_in_loops:
            continue
        seen.add(id(tracer))
        outer = tracer._trace.get_const(tracer)
        if outer is not None:
            # The array comes from outside this body, maybe from the body of an outer loop.
            waiting.append(outer)
        elif tracer.parent is None and _is_broadcast(tracer):
            continue
        elif tracer.parent is None or len(seen) > _MOST_EQUATIONS:
            # An input of a loop body or call has no equation. The search stops there and assumes that the input changes between
            # iterations. It assumes the same after `_MOST_EQUATIONS` equations.
            return False
        else:
            waiting += tracer.parent.in_tracers
    return True


_MOST_EQUATIONS = 100


def is_staging() -> bool:
    """Whether JAX is tracing a jaxpr now, also inside or around `grad` and `vmap`; False if JAX runs op by op."""
    return any(isinstance(trace, _pe.DynamicJaxprTrace) for trace in traces())


def program_of(leaf: Any) -> Any:
    """The trace of the program that contains the tracer `leaf`; for an array, of the outermost program being traced."""
    tracer = _staged(leaf)
    if tracer is not None:
        return tracer._trace
    return [trace for trace in traces() if isinstance(trace, _pe.DynamicJaxprTrace)][-1]


# `nnx.scan` passes broadcast values in the carry, in a separate list; such an argument is called `args[0][3][0].data`.
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
    return any(type(tracer).__name__ in ("LinearizeTracer", "JVPTracer") for tracer in _wrapped(leaf))


def _staged(leaf: Any) -> Any:
    """The jaxpr tracer in `leaf`: `leaf` itself or the tracer that `leaf` wraps, at any depth; None if there is none."""
    return next((tracer for tracer in _wrapped(leaf) if isinstance(tracer, _pe.DynamicJaxprTracer)), None)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array or a tracer (Python scalars, strings, None and objects are not).

    Raises ArgumentError for a PyTorch tensor, which JAX refuses with an error that does not name it.
    """
    if isinstance(leaf, jax.Array | _core.Tracer):
        return True
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return False
    if type(leaf).__module__.partition(".")[0] == "torch":
        raise ArgumentError(
            f"a {type(leaf).__name__} of PyTorch, of shape {tuple(leaf.shape)}, is among the arguments of a JAX function: "
            "expected NumPy or JAX arrays; convert it, for example by jnp.asarray(x.detach().numpy())"
        )
    return True


def is_operand(leaf: Any) -> bool:
    """Whether `leaf` becomes a tracer when a function of arrays is traced: it is an array, but no NumPy value of rank 0.

    NumPy values of rank 0 stay what they are, like Python scalars: a model may branch on them, and nothing differentiates them.
    """
    return is_array(leaf) and not is_numpy_scalar(leaf)


def is_numpy_scalar(leaf: Any) -> bool:
    """Whether `leaf` is a NumPy scalar or a NumPy array of rank 0."""
    return isinstance(leaf, np.generic | np.ndarray) and not leaf.ndim


def is_traced(leaf: Any) -> bool:
    """Whether `leaf` is a tracer, whose value is unknown while Python runs."""
    return isinstance(leaf, _core.Tracer)


def is_of_current_trace(leaf: Any) -> bool:
    """Whether `leaf` is a tracer of the current trace, not of a trace around it."""
    return getattr(leaf, "_trace", None) is _core.trace_ctx.trace


def is_staged(leaf: Any) -> bool:
    """Whether `leaf` is being traced into a jaxpr, also under `grad` and `vmap`; False if JAX runs op by op."""
    return _staged(leaf) is not None


def type_of(leaf: Any) -> Any:
    """The type (abstract value) of an array or a tracer; a type is returned unchanged."""
    return leaf if isinstance(leaf, _core.AbstractValue) else jax.typeof(leaf)


def on_device(leaf: Any) -> Any:
    """The type that the array `leaf` has in device memory."""
    return _core.shaped_abstractify(leaf).update(memory_space=jax.memory.Space.Device)


def is_on_host(leaf: Any) -> bool:
    """Whether `leaf`, an array, tracer or `jax.ShapeDtypeStruct`, is in host memory."""
    # Reading the sharding of a tracer is slow: it formats a long error first.
    if not is_traced(leaf) and getattr(getattr(leaf, "sharding", None), "memory_kind", None) == "pinned_host":
        return True
    return getattr(_core.shaped_abstractify(leaf), "memory_space", None) is jax.memory.Space.Host


def struct(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """A struct in the memory space of the array `like`."""
    if is_on_host(like):
        return _core.ShapedArray(shape, dtype, memory_space=jax.memory.Space.Host)
    return jax.ShapeDtypeStruct(shape, dtype)


def made_by(leaf: Any) -> tuple[int, Any, Any] | None:
    """The equation that computes the tracer `leaf`, as `(index in the trace, equation, output)`; None if there is none."""
    frame: Any = getattr(getattr(leaf, "_trace", None), "frame", None)
    parent = getattr(leaf, "parent", None)
    if parent is None or not hasattr(frame, "tracing_eqns"):
        return None
    eqns = (eqn() if callable(eqn) else eqn for eqn in frame.tracing_eqns)
    place = next((place for place, eqn in enumerate(eqns) if eqn is parent), None)
    return None if place is None else (place, parent, getattr(leaf, "val", None))


def with_axes_bound_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which may be called later; the axes (`vmap`, mesh) that are bound now are bound in its calls."""
    axes = _core.get_axis_env().axis_sizes

    def with_axes(*args: Any) -> Any:
        here = _core.get_axis_env()
        with _core.extend_axis_env_nd([(name, size) for name, size in axes.items() if not here.axis_exists(name)]):
            return function(*args)

    return with_axes


def axes_of_vmaps(vmaps: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """A context that binds the axis (`name` and `size`) of each `vmap`, for collectives in a jaxpr traced inside them."""
    return _core.extend_axis_env_nd([(vmap.name, vmap.size) for vmap in vmaps])


def in_part_of_arrays() -> bool:
    """Whether a `vmap` or a `shard_map` is around, so that the arrays here are parts of others."""
    return bool(_core.get_axis_env().axis_sizes) or any(type(trace).__name__ in _PARTS for trace in traces())


_PARTS = frozenset({"BatchTrace", "ShardMapTrace"})


def trace_context(default: Any, *, reaches_blocks: bool = True) -> Any:
    """A context with a value. JAX's trace caches have this value in their keys, so a new value retraces every `jit` inside.

    If `reaches_blocks` is False, `block_settings` ignores the value. Blocks with equal jaxprs then count as identical under
    every value.
    """
    context = jax.make_user_context(default)
    if not reaches_blocks:
        _outside_blocks.append((context, default))
    return context


_outside_blocks: list[tuple[Any, Any]] = []


def trace_settings() -> Any:
    """All JAX settings on which a trace depends, as one comparable value."""
    return _config.trace_context()


@contextlib.contextmanager
def established_forms() -> Iterator[None]:
    """Inside this context checkpoints, names and `custom_jvp` calls have JAX's established form, whatever its flags say.

    With `jax_remat3`, JAX saves only arrays that were named before differentiation: it recomputes arrays that derivative rules
    compute, and outputs that derivative rules read (exp, tanh, softmax). Before JAX 0.12 it also ignores policies that are
    functions, except that JAX 0.11.2 calls them for names (and for nothing else). With `jax_custom_jvp3`, JAX finds out what
    `vmap` maps from the function alone, and rejects a derivative that depends on more mapped values than the result.
    """
    with contextlib.ExitStack() as flags:
        for flag in ("remat3", "custom_jvp3"):
            if hasattr(_config, flag):  # JAX 0.10 has no custom_jvp3
                flags.enter_context(getattr(_config, flag)(False))
        yield


def block_settings() -> Any:
    """The `trace_settings` on which a block's own trace depends.

    Blocks have `established_forms`. Values of contexts with `reaches_blocks=False`, such as the active policies, do not count.
    """
    with established_forms(), contextlib.ExitStack() as defaults:
        for context, default in _outside_blocks:
            defaults.enter_context(context(default))
        return trace_settings()


def in_linen_module() -> bool:
    """Whether a method of a Linen module is running."""
    return _linen_module._context.module_stack[-1] is not None


def linen_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as Flax runs a method of a Linen module: with the module's scope, and as a compact method if it is one."""
    method: Callable[..., Any] = _linen_module.wrap_method_once(function)
    return method


@contextlib.contextmanager
def not_captured(module: Any, method: str) -> Iterator[None]:
    """Inside this context `capture_intermediates` skips `method` of this Linen module, but not its submodules."""
    stack = _linen_module._context.capture_stack
    wanted = stack[-1] if stack else None
    if not wanted:
        yield
        return
    stack.append(lambda called, name: not (called is module and name == method) and wanted(called, name))
    try:
        yield
    finally:
        stack.pop()


def nnx_jit(function: Callable[..., Any], *, donate_argnums: Any, compiler_options: Any) -> Any:
    """`nnx.jit` with compiler options, which Flax's own does not take."""
    jitted = nnx.jit(function, donate_argnums=donate_argnums)
    if compiler_options:
        of_arrays = jitted.jitted_fn.__wrapped__
        jitted.jitted_fn = jax.jit(of_arrays, donate_argnums=donate_argnums, compiler_options=compiler_options)
    return jitted
