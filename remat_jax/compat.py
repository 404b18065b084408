"""The one place that knows private JAX and Flax, differences between JAX versions, and the CUDA plugin.

Everything else in the package uses public JAX. Supported: JAX 0.10.2 and later.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax
import jax
from flax.linen import module as _linen_module
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import shard_map as _shard_map
from jax._src import source_info_util as _source_info
from jax._src.interpreters import partial_eval as _pe
from jax.extend import core as jex

from remat_jax.errors import UnsupportedError

JAX_VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3])

# Two JAX releases bake the wrong slot into the copy back of a scanned block's offloaded residuals on GPUs, so that gradients
# are silently wrong (openxla/xla#46231). Read from the compiled text; unrolled offload and CPU are not touched.
SCANNED_OFFLOAD_MISCOMPILED: frozenset[tuple[int, ...]] = frozenset({(0, 10, 2), (0, 11, 0)})


def refuse_miscompiled_offload() -> None:
    """Refuse offload inside a loop where this JAX would run it on a GPU and silently get wrong gradients.

    Raises:
      UnsupportedError: the default device is a GPU, this JAX is one of the two, and the pass is not switched off.
    """
    cured = "dynamic-slice-annotator" in os.environ.get("XLA_FLAGS", "")
    if JAX_VERSION in SCANNED_OFFLOAD_MISCOMPILED and not cured and jax.default_backend() == "gpu":
        raise UnsupportedError(
            f"offload inside a scan with JAX {jax.__version__} on a GPU: the compiler reads another layer's residuals back, "
            "and gradients are silently wrong (openxla/xla#46231). Use JAX 0.11.1 or later, unroll the layers, or start with "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator"
        )


_OURS = os.path.dirname(__file__)
_LIBRARIES = (
    os.path.dirname(flax.__file__) + os.sep,
    *(os.path.join(_OURS, part) + os.sep for part in ("apply", "graph", "memory", "train")),
    *(os.path.join(_OURS, part) for part in ("compat.py", "workload.py")),
)

_LOOPS = frozenset({"scan", "while_body", "while_loop", "fori_loop", "map", "associative_scan"})


# --- jaxprs -----------------------------------------------------------------------------------------------------------


def closed(jaxpr: Any, consts: Sequence[Any] = ()) -> Any:
    """`jaxpr` as a closed jaxpr; JAX 0.12 has one class for both, earlier versions two."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return jaxpr
    return jex.ClosedJaxpr(jaxpr, list(consts))


def like(jaxpr: Any, template: Any) -> Any:
    """The closed `jaxpr` in the form (open or closed) that an equation's parameter had."""
    return jaxpr if isinstance(template, jex.ClosedJaxpr) else jaxpr.jaxpr


def is_jaxpr(value: Any) -> bool:
    """Whether an equation's parameter is a jaxpr, open or closed."""
    return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)


def eqn_outputs(eqn: Any, outputs: Any) -> list[Any]:
    """The results of binding `eqn`, always as a list."""
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def bind(eqn: Any, inputs: Sequence[Any], **changed: Any) -> list[Any]:
    """Evaluate `eqn` on `inputs` as JAX itself would, some of its parameters changed; keeps source lines and name stacks."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    with eqn_context(eqn):
        return eqn_outputs(eqn, eqn.primitive.bind(*inputs, **params))


@contextlib.contextmanager
def eqn_context(eqn: Any) -> Iterator[None]:
    """Trace under the source line, name stack and context (mesh, compute type, …) that `eqn` was traced under."""
    stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


@contextlib.contextmanager
def inner_context(eqn: Any) -> Iterator[None]:
    """Trace as inside the body of `eqn`: a `shard_map` binds its mesh axes there."""
    if eqn.primitive.name != "shard_map":
        yield
        return
    mesh = eqn.params["mesh"]
    manual = eqn.params["newly_manual_axes"] if "newly_manual_axes" in eqn.params else eqn.params["manual_axes"]
    inner_mesh = _shard_map._as_manual_mesh(mesh, manual)
    checked = _config._check_vma(eqn.params["check_vma"])
    with _shard_map._extend_axis_env(mesh, manual), _mesh.use_abstract_mesh(inner_mesh), checked:
        yield


def scopes(eqn: Any) -> tuple[str, ...]:
    """The module path of `eqn`: the named scopes of its name stack, without the transformations."""
    stack = eqn.source_info.name_stack.stack
    return tuple(part for scope in stack if type(scope).__name__ == "Scope" for part in scope.name.split("/") if part)


def source_line(eqn: Any) -> str:
    """The user's `file:line (function)` that made `eqn`: the innermost line that is neither JAX's, Flax's nor ours."""
    for frame in _source_info.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(_LIBRARIES):
            name = os.path.relpath(frame.file_name)
            shown = frame.file_name if name.startswith("..") else name
            return f"{shown}:{frame.start_line} ({frame.function_name})"
    return ""


def dce(jaxpr: Any, used_outputs: Sequence[bool] | None = None, *, keep_inputs: bool = True) -> Any:
    """`jaxpr` (closed) without the equations that no used output needs, inside scans, jits and checkpoints as well."""
    used = [True] * len(jaxpr.out_avals) if used_outputs is None else list(used_outputs)
    pruned, _ = _pe.dce_jaxpr(jaxpr.jaxpr, used, instantiate=keep_inputs)
    return jex.ClosedJaxpr(pruned, jaxpr.consts)


def scan_layout(eqn: Any) -> tuple[int, int]:
    """How many constants and carried values lead the operands of a `scan` equation."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].elts
    return len(consts), len(carry)


# --- checkpoint regions and names -------------------------------------------------------------------------------------


def is_checkpoint(eqn: Any) -> bool:
    """Whether `eqn` is a `jax.checkpoint` region, of the old rematerialisation or of `jax_remat3`."""
    return eqn.primitive.name in ("checkpoint", "remat", "remat2") or _hi_primitive(eqn) == "RematTraced"


def checkpoint_parts(eqn: Any) -> tuple[Any, dict[str, Any]]:
    """The body of a checkpoint region as a closed jaxpr, and its other parameters."""
    params = eqn.params
    if _hi_primitive(eqn) == "RematTraced":
        # The new rematerialisation does not say so, but it names what its backward pass runs again.
        spent = "rematted_computation" in str(eqn.source_info.name_stack)
        params = {**params["_prim"].params, "differentiated": spent}
    return closed(params["jaxpr"]), {key: value for key, value in params.items() if key != "jaxpr"}


def given_name(eqn: Any) -> str | None:
    """The name that `jax.ad_checkpoint.checkpoint_name` gave to the output of `eqn`, or None."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    if _hi_primitive(eqn) in ("CheckpointName", "CheckpointNameFwd"):
        return eqn.params["_prim"].params["name"]
    return None


def _hi_primitive(eqn: Any) -> str | None:
    return type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else None


def remat3() -> bool:
    """Whether `jax_remat3`, JAX's new rematerialisation, is switched on."""
    return bool(_config.remat3.value)


@contextlib.contextmanager
def classic_rematerialisation() -> Iterator[None]:
    """Have `jax.checkpoint` and `checkpoint_name` mean JAX's established rematerialisation, whatever `jax_remat3` says.

    Only there can every residual of a block be kept by its name. The new one keeps what was named before differentiation, so
    that a derivative rule's own arrays, and those that a rule reads back (exp, tanh, softmax), are made again; and before
    JAX 0.12 it ignores named policies altogether.
    """
    with _config.remat3(False):
        yield


def require_named_policies() -> None:
    """Refuse where this JAX would silently recompute everything instead of honouring a policy of names.

    Raises:
      UnsupportedError: with `jax_remat3` on before JAX 0.12.
    """
    if remat3() and JAX_VERSION < (0, 12, 0):
        raise UnsupportedError(
            f"jax_remat3=True with JAX {jax.__version__}: this JAX turns policies of names silently into full recomputation; "
            'switch it off with jax.config.update("jax_remat3", False), or use JAX 0.12 or later'
        )


# --- the state of tracing ---------------------------------------------------------------------------------------------


def in_loop(*, around_gradient: bool = True) -> bool:
    """Whether what is being traced is the body of a `scan` or `while` loop, at any depth of `jit`, `vmap`, `grad`.

    Without `around_gradient`, a loop around the differentiation does not count: both passes are in one body there.
    """
    trace, ends = _core.trace_ctx.trace, () if around_gradient else ("JVPTrace", "LinearizeTrace")
    while trace is not None and type(trace).__name__ not in ends:
        debug = getattr(getattr(trace, "frame", None), "debug_info", None)
        if getattr(debug, "traced_for", None) in _LOOPS:
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array or a tracer (Python scalars, strings, None and objects are not)."""
    return isinstance(leaf, jax.Array | _core.Tracer) or (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))


def is_traced(leaf: Any) -> bool:
    """Whether `leaf` is a tracer: its value is not known while Python runs."""
    return isinstance(leaf, _core.Tracer)


def on_device(leaf: Any) -> Any:
    """The type of the array `leaf`, in device memory wherever it is."""
    return _core.shaped_abstractify(leaf).update(memory_space=jax.memory.Space.Device)


def is_on_host(leaf: Any) -> bool:
    """Whether `leaf`, an array or what describes one, is in host memory."""
    if getattr(getattr(leaf, "sharding", None), "memory_kind", None) == "pinned_host":
        return True
    return getattr(_core.shaped_abstractify(leaf), "memory_space", None) is jax.memory.Space.Host


def made_by(leaf: Any) -> tuple[int, Any, Any] | None:
    """The equation that made the tracer `leaf`: its place in the trace, itself, and its output; None for no tracer."""
    frame: Any = getattr(getattr(leaf, "_trace", None), "frame", None)
    parent = getattr(leaf, "parent", None)
    if parent is None or not hasattr(frame, "tracing_eqns"):
        return None
    eqns = (eqn() if callable(eqn) else eqn for eqn in frame.tracing_eqns)
    place = next((place for place, eqn in enumerate(eqns) if eqn is parent), None)
    return None if place is None else (place, parent, getattr(leaf, "val", None))


def trace_context(default: Any) -> Callable[[Any], contextlib.AbstractContextManager[Any]]:
    """A context whose value is part of JAX's trace caches: another value, another trace of every `jit` inside."""
    return jax.make_user_context(default)


def trace_context_value(context: Any) -> Any:
    """The value that a `trace_context` has now."""
    return context.value


def jaxpr_function(jaxpr: Any) -> Callable[..., list[Any]]:
    """The closed `jaxpr` as a function of its flat inputs."""
    return jex.jaxpr_as_fun(jaxpr)


# --- JAX's own policy objects -----------------------------------------------------------------------------------------


def offloaded_by(policy: Callable[..., Any], jaxpr: Any) -> list[str]:
    """The primitives (or names) of `jaxpr`, at any depth, whose outputs JAX's own `policy` would offload."""
    found = []
    for eqn in jaxpr.jaxpr.eqns:
        verdict = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
        if type(verdict).__name__ == "Offloadable":
            found.append(given_name(eqn) or eqn.primitive.name)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if is_jaxpr(inner):
                    found += offloaded_by(policy, closed(inner))
    return found


def uses_references(jaxpr: Any) -> bool:
    """Whether the closed `jaxpr` makes or is given a mutable array (`jax.new_ref`) on its own level."""
    inner = jaxpr.jaxpr
    made = (var for eqn in inner.eqns for var in eqn.outvars)
    return any(type(var.aval).__name__ == "AbstractRef" for var in (*inner.constvars, *inner.invars, *made))


def hoist_consts(jaxpr: Any) -> tuple[Any, list[Any]]:
    """`jaxpr` with its constants as leading inputs, and the constants."""
    consts = list(jaxpr.consts)
    return (closed(_pe.convert_constvars_jaxpr(jaxpr.jaxpr)) if consts else jaxpr), consts


def optimization_barrier(operands: Any) -> Any:
    """`jax.lax.optimization_barrier`, one for each kind of varying over mesh axes.

    Inside a `shard_map` that checks how its values vary, JAX before 0.12 makes everything behind one barrier vary as the
    operand that varies most, which is then another type.
    """
    leaves, treedef = jax.tree.flatten(operands)
    kinds = [str(getattr(jax.typeof(leaf), "mat", None) or getattr(jax.typeof(leaf), "vma", None)) for leaf in leaves]
    for kind in dict.fromkeys(kinds):
        places = [index for index, other in enumerate(kinds) if other == kind]
        for place, value in zip(places, jax.lax.optimization_barrier([leaves[index] for index in places]), strict=True):
            leaves[place] = value
    return jax.tree.unflatten(treedef, leaves)


OFFLOAD = _pe.Offloadable(src="device", dst="pinned_host")
"""What a policy of JAX's answers to have an array moved to the host."""

BLOCK_NAME = "remat_jax_block"
"""The name of a checkpointed block's function, by which it is known in a jaxpr."""


def is_block(eqn: Any) -> bool:
    """Whether `eqn` is a checkpointed block of `remat_jax`, tied to its place in the schedule or not."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    debug = getattr(eqn.params["call_jaxpr"].jaxpr, "debug_info", None)
    return str(getattr(debug, "func_src_info", "")).startswith(BLOCK_NAME)


def executed_bodies(eqn: Any) -> list[Any]:
    """The bodies that running a `jax_remat3` region executes; empty for any other equation."""
    if _hi_primitive(eqn) != "RematTraced":
        return []
    return [closed(eqn.params["_prim"].params["jaxpr"]).jaxpr]


def itemsize(dtype: Any) -> int:
    """The bytes of one element of `dtype`; an RNG key counts its key data."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(data.size * data.dtype.itemsize)
    return int(dtype.itemsize)


# --- Flax -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def not_captured(module: Any, method: str) -> Iterator[None]:
    """While this holds, `capture_intermediates` passes by this module's own `method`; what is inside it is still captured."""
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


# --- XLA's GPU compiler without a GPU ---------------------------------------------------------------------------------

GPU_COMPILER_ENVIRONMENT: dict[str, str] = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
"""Without it the CUDA plugin refuses to load where cuDNN is not installed."""

GPU_COMPILER_FLAGS = "--xla_gpu_autotune_level=0"
"""There is nothing to time kernels on."""

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def gpu_compiler_installed() -> bool:
    """Whether JAX's CUDA plugin, which holds XLA's GPU compiler, is installed; it is not loaded."""
    return any(importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(name) for name in _PLUGINS)


def require_gpu_compiler() -> None:
    """Raise where XLA's GPU compiler is not there.

    Raises:
      UnsupportedError: with the command that installs it, or that there is none for this platform.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            f"sys.platform={sys.platform!r}: XLA's GPU compiler is published for Linux only; use target='cpu' here"
        )
    if not gpu_compiler_installed():
        raise UnsupportedError(
            "XLA's GPU compiler is not installed: pip install 'remat-jax[gpu-compile]' (jax-cuda13-plugin; no NVIDIA library "
            "and no GPU is needed), or use target='cpu'"
        )


def keep_to_cpu_without_gpu() -> None:
    """Before JAX starts: where there is no NVIDIA device, keep it from trying the CUDA plugin, which prints a traceback."""
    if "JAX_PLATFORMS" not in os.environ and not os.path.exists("/dev/nvidiactl"):
        jax.config.update("jax_platforms", "cpu")
