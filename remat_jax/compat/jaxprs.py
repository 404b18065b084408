"""Reads the parts of jaxprs, binds their equations as JAX would, and batches jaxprs."""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import hijax as _hijax
from jax._src import linear_util as _linear_util
from jax._src import mesh as _mesh
from jax._src import shard_map as _shard_map
from jax._src import source_info_util as _source_info
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.interpreters import ad, batching, mlir

from remat_jax.compat.donation import keeping_memories
from remat_jax.compat.equations import changed_parameters, kind
from remat_jax.compat.patches import Patch

_OURS = os.path.dirname(os.path.dirname(__file__))
_INSTALLED = os.path.dirname(os.path.dirname(flax.__file__))
# Stack frames in these files are not the user's. The empty last part of each `os.path.join` appends a separator to a folder.
_LIBRARIES = (
    *(os.path.join(_INSTALLED, library, "") for library in ("flax", "haiku", "equinox", "optax")),
    *(os.path.join(_OURS, part, "") for part in ("apply", "compat", "core", "cost", "memory", "train")),
    os.path.join(_OURS, "workload.py"),
)


jaxpr_function: Callable[[Any], Callable[..., list[Any]]] = jex.jaxpr_as_fun
"""Returns a closed jaxpr as a function of its flat inputs."""


def closed(jaxpr: Any) -> Any:
    """`jaxpr` as a closed jaxpr. JAX 0.12 has one class for open and closed jaxprs; earlier versions have two."""
    return jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, [])


def like(jaxpr: ClosedJaxpr, template: Any) -> Any:
    """The closed `jaxpr`, as an open jaxpr if `template` is open."""
    return jaxpr if isinstance(template, jex.ClosedJaxpr) else jaxpr.jaxpr


def bind(eqn: JaxprEqn, inputs: Sequence[Any], **changed: Any) -> list[Any]:
    """Evaluate `eqn` on `inputs` with some of its `parameters` changed, as JAX would. Keeps source lines and name stacks."""
    params = eqn.primitive.get_bind_params(changed_parameters(eqn, changed))
    with eqn_context(eqn):
        outputs = eqn.primitive.bind(*inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


@contextlib.contextmanager
def eqn_context(eqn: JaxprEqn) -> Iterator[None]:
    """Trace with the source line, name stack and context (mesh, compute type, …) of `eqn`."""
    stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def manual_devices(eqn: JaxprEqn) -> int:
    """The number of devices over which the `shard_map` equation `eqn` partitions its operands."""
    return math.prod(eqn.params["mesh"].shape[axis] for axis in _manual_axes(eqn))


def _manual_axes(eqn: JaxprEqn) -> Any:
    return eqn.params["newly_manual_axes"] if "newly_manual_axes" in eqn.params else eqn.params["manual_axes"]


@contextlib.contextmanager
def inner_context(eqn: JaxprEqn) -> Iterator[None]:
    """If `eqn` is a `shard_map`, trace with its mesh axes bound, as in its body; else this context does nothing."""
    if eqn.primitive.name != "shard_map":
        yield
        return
    mesh, manual = eqn.params["mesh"], _manual_axes(eqn)
    inner_mesh = _shard_map._as_manual_mesh(mesh, manual)
    checked = _config._check_vma(eqn.params["check_vma"])
    with _shard_map._extend_axis_env(mesh, manual), _mesh.use_abstract_mesh(inner_mesh), checked:
        yield


def scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The module path of `eqn`: the named scopes of its name stack, except those of `layers_scope`."""
    return tuple(part for part in _all_scopes(eqn) if not _LAYERS.fullmatch(part))


def layers_scope(layers: range | None) -> contextlib.AbstractContextManager[Any]:
    """Equations traced in this context belong to `layers`; `layers_of` reads this range. With None the context does nothing."""
    return contextlib.nullcontext() if layers is None else jax.named_scope(f"layers[{layers.start}:{layers.stop}]")


def layers_of(eqn: JaxprEqn) -> range | None:
    """The layers of the innermost `layers_scope` in which `eqn` was traced; None outside such scopes."""
    matches = [match for part in _all_scopes(eqn) if (match := _LAYERS.fullmatch(part))]
    return range(int(matches[-1][1]), int(matches[-1][2])) if matches else None


_LAYERS = re.compile(r"layers\[(\d+):(\d+)\]")


def _all_scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    stack = eqn.source_info.name_stack.stack
    return tuple(part for scope in stack if type(scope).__name__ == "Scope" for part in scope.name.split("/") if part)


def moved_scopes(stack: Any, before: str, path: str) -> Any:
    """The name stack `stack`, with the block's module path `before` replaced by `path`, the path of an identical block.

    Linen opens the block's own scope once, or twice if the block is lifted, so at most two scopes change.
    """
    old, new = (each.rpartition("/")[2].partition(".")[0] for each in (before, path))
    scopes, opened = list(stack.stack), 0
    for place, scope in enumerate(scopes if old != new else ()):
        if type(scope).__name__ != "Scope":
            continue
        if opened == 2 or not re.match(re.escape(old) + r"(?![^./])", scope.name):
            break
        scopes[place] = type(scope)(new + scope.name[len(old) :])
        opened += 1
    return type(stack)(tuple(scopes))


def with_equations(jaxpr: ClosedJaxpr, eqns: Sequence[Any], renamed: Mapping[Any, Any]) -> Any:
    """`jaxpr`, open or closed, with equations `eqns` and outputs mapped by `renamed`; `jaxpr` itself if `eqns` are its own."""
    body = closed(jaxpr).jaxpr
    if len(eqns) == len(body.eqns) and all(map(operator.is_, body.eqns, eqns)):
        return jaxpr
    outputs = [atom if hasattr(atom, "val") else renamed.get(atom, atom) for atom in body.outvars]
    changed = body.replace(eqns=list(eqns), outvars=outputs)
    return jex.ClosedJaxpr(changed, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else changed


def with_params(eqn: JaxprEqn, changed: dict[str, Any], name_stack: Any = None, invars: Sequence[Any] | None = None) -> Any:
    """`eqn` with the `changed` parameters, name stack or inputs; the same object if nothing changes."""
    source, inputs = eqn.source_info, list(eqn.invars) if invars is None else list(invars)
    same_inputs = all(map(operator.is_, eqn.invars, inputs))
    if not changed and same_inputs and (name_stack is None or name_stack == source.name_stack):
        return eqn
    source = source if name_stack is None else source.replace(name_stack=name_stack)
    return eqn.replace(params=changed_parameters(eqn, changed), source_info=source, invars=inputs)


def source_line(eqn: JaxprEqn) -> str:
    """The user's line behind `eqn`, as `file:line (function)`: the innermost one.

    Lines in JAX, in libraries of layers and losses, and in this package are not the user's.
    """
    for frame in _source_info.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(_LIBRARIES):
            try:
                name = os.path.relpath(frame.file_name)
            except OSError:  # the working directory is gone
                name = ".."
            shown = frame.file_name if name.startswith("..") else name
            return f"{shown}:{frame.start_line} ({frame.function_name})"
    return ""


def function_name(jaxpr: ClosedJaxpr) -> str:
    """The name of the function from which the closed `jaxpr` was traced, such as `body` or `lambda`."""
    return str(jaxpr.jaxpr.debug_info.func_src_info).partition(" ")[0].replace("<lambda>", "lambda")


def dce(jaxpr: ClosedJaxpr, used_outputs: Sequence[bool] | None = None, *, keep_inputs: bool = True) -> Any:
    """The closed `jaxpr` with only the equations that its used outputs need, also inside scans, jits and checkpoints."""
    used = [True] * len(jaxpr.out_avals) if used_outputs is None else list(used_outputs)
    pruned, _ = _pe.dce_jaxpr(jaxpr.jaxpr, used, instantiate=keep_inputs)
    return jex.ClosedJaxpr(pruned, jaxpr.consts)


def scan_layout(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a `scan` equation are constants, and how many are carried; constants come first."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a `jit` without shardings, layouts or donated operands, so that its body can be inlined."""
    if kind(eqn) != "jit":
        return False
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    laid_out = any(layout is not None for layout in (*eqn.params["in_layouts"], *eqn.params["out_layouts"]))
    unspecified = all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
    return unspecified and not laid_out and not any(eqn.params["donated_invars"])


def uses_references(jaxpr: ClosedJaxpr) -> bool:
    """Whether the closed `jaxpr` itself, without its inner jaxprs, has a mutable array (`jax.new_ref`)."""
    inner = jaxpr.jaxpr
    made = (var for eqn in inner.eqns for var in eqn.outvars)
    return any(type(var.aval).__name__ == "AbstractRef" for var in (*inner.constvars, *inner.invars, *made))


def has_ordered_effects(jaxpr: ClosedJaxpr) -> bool:
    """Whether the closed `jaxpr` has callbacks or prints with `ordered=True`."""
    return bool(_effects.ordered_effects.filter_in(jaxpr.jaxpr.effects))


def hoist_consts(jaxpr: ClosedJaxpr) -> tuple[Any, list[Any]]:
    """`jaxpr` with its constants as leading inputs, and the constants."""
    consts = list(jaxpr.consts)
    return (closed(_pe.convert_constvars_jaxpr(jaxpr.jaxpr)) if consts else jaxpr), consts


def new_primitive(name: str, evaluate: Callable[..., Any], *, multiple_results: bool = True) -> Any:
    """A primitive that JAX evaluates and compiles as `evaluate`. The caller adds its type, derivative and batching rules."""
    primitive = jex.Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(evaluate)
    # JAX calls `to_lojax` after differentiation, if the program contains a region of `jax_remat3`.
    primitive.to_lojax = evaluate
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate, multiple_results=multiple_results))
    return primitive


def optimization_barrier(operands: Any, *, on_tpu: Sequence[int] | None = None) -> Any:
    """`jax.lax.optimization_barrier`, without a barrier in its derivative.

    JAX's derivative of a barrier is a barrier. If an operand in host memory has no cotangent, this derivative creates zeros
    for it in device memory, which is an error. In a `shard_map` that checks how values vary over mesh axes, JAX before 0.12
    gives all outputs of a barrier the axes of the operand that varies over the most axes, which changes the outputs' types.

    `on_tpu`: the places of the leaves that pass through the barrier on a TPU; None for all. XLA:TPU drops barriers, but only
    after it has chosen layouts and fusions, so that an array in a barrier is written to memory, perhaps twice.
    """
    leaves, treedef = jax.tree.flatten(operands)
    places = None if on_tpu is None else tuple(on_tpu)
    return jax.tree.unflatten(treedef, _barrier_p.bind(*leaves, on_tpu=places) if leaves else [])


def varying_axes(value: Any) -> str:
    """The mesh axes over which `value` varies in a `shard_map` with `check_vma`, as a comparable text."""
    aval = jax.typeof(value)
    return str(getattr(aval, "mat", None) or getattr(aval, "vma", None))


def _barriers(*leaves: Any, on_tpu: Any = None) -> list[Any]:
    """The `leaves`, with one barrier for each group of operands that vary over the same mesh axes."""
    held = list(leaves)
    all_axes = list(map(varying_axes, leaves))
    for axes in dict.fromkeys(all_axes):
        places = [index for index, other in enumerate(all_axes) if other == axes]
        for place, value in zip(places, jax.lax.optimization_barrier([leaves[index] for index in places]), strict=True):
            held[place] = value
    return held


def _barriers_on_tpu(*leaves: Any, on_tpu: tuple[int, ...] | None) -> list[Any]:
    if on_tpu is None:
        return _barriers(*leaves)
    held = dict(zip(on_tpu, _barriers(*(leaves[place] for place in on_tpu)), strict=True))
    return [held.get(place, leaf) for place, leaf in enumerate(leaves)]


# The primitive has the name of JAX's barrier, so that readers of a program treat it as a barrier.
_barrier_p = new_primitive("optimization_barrier", _barriers)
# A block that offloads has barriers, and may return what it offloads: `jit` of a `jax.vjp` returns the residuals.
mlir.register_lowering(_barrier_p, keeping_memories(mlir.lower_fun(_barriers, multiple_results=True)))
mlir.register_lowering(_barrier_p, keeping_memories(mlir.lower_fun(_barriers_on_tpu, multiple_results=True)), platform="tpu")
_barrier_p.def_abstract_eval(lambda *avals, **_: list(avals))
ad.primitive_jvps[_barrier_p] = lambda primals, tangents, **places: (_barrier_p.bind(*primals, **places), tangents)
batching.primitive_batchers[_barrier_p] = lambda args, axes, **places: (_barrier_p.bind(*args, **places), axes)


# --- vmap ---------------------------------------------------------------------------------------------------------------


def batched(
    jaxpr: ClosedJaxpr, axis: Any, args: Sequence[Any], axes: Sequence[int | None], instantiate: bool | list[bool] = False
) -> tuple[Any, list[Any], list[int | None]]:
    """In a batching rule: the batched `jaxpr`, `args` with the mapped axis in front, and the mapped axis of each output.

    `axis`, `args` and `axes` are JAX's arguments to the rule. The mapped axis of an output is None if the output is equal for
    the whole batch and `instantiate` (one bool, or a list with a bool for each output) does not force a mapped axis.
    """
    in_front = [arg if dim is None else jnp.moveaxis(arg, dim, 0) for arg, dim in zip(args, axes, strict=True)]
    mapped, which = _batching.batch_jaxpr(jaxpr, axis, [dim is not None for dim in axes], instantiate)
    return mapped, in_front, [0 if flag else None for flag in which]


def _known_since_0_12(num_res: int) -> tuple[Any, ...]:
    """The arguments that JAX 0.12 added to `batch_custom_vjp_bwd`: a function returning `num_res`, and a name for messages."""
    parameters = inspect.signature(_batching.batch_custom_vjp_bwd).parameters
    return (lambda: num_res, "custom_vjp") if "num_res" in parameters else ()


def _map_linear(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, num_res: int, bwd: Any, out_avals: Any, in_zeros: Any, **rest: Any
) -> tuple[list[Any], list[int]]:
    """The batching rule for the linear part of a `custom_vjp`. Cotangents of operands without a mapped axis are summed."""
    along = iter(dims[num_res:])
    places = [None if zero else next(along) for zero in in_zeros]
    in_dims = [*dims[:num_res], *[0] * len(out_avals)]
    mapped = _batching.batch_custom_vjp_bwd(bwd, _core.TraceTag(), axis, in_dims, places, *_known_since_0_12(num_res))
    avals = [_core.unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis) for aval in out_avals]
    outputs = _ad.custom_lin_p.bind(*args, num_res=num_res, bwd=mapped, out_avals=avals, in_zeros=in_zeros, **rest)
    return list(outputs), [0] * len(avals)


def _map_linear_of_object(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, _prim: Any, nz_in_flat: Sequence[bool], **params: Any
) -> tuple[list[Any], list[int]]:
    """The batching rule for the linear part of an object's derivative (`jax_custom_vjp3`): that of an equal `custom_lin`."""
    num_res = params["residuals_tree"].num_leaves
    cotangents = [aval.to_ct_aval() for aval in _prim.in_avals_flat]

    def bwd(*args: Any) -> tuple[list[Any], Any]:
        given = [_ad.Zero(ct.aval) if isinstance(ct, SymbolicZero) else ct for ct in args[num_res:]]
        sums = [_ad.ValAccum(aval) for aval, flag in zip(cotangents, nz_in_flat, strict=True) if flag]
        logs = _ad.fancy_transposes[_linear_of_object_p](
            given, *args[:num_res], *sums, _prim=_prim, nz_in_flat=nz_in_flat, **params
        )
        made = map(operator.methodcaller("freeze"), sums)
        return [next(made) if flag else _ad.Zero(aval) for aval, flag in zip(cotangents, nz_in_flat, strict=True)], logs

    smooth = params.get("nz_out_flat", [True] * len(_prim.out_avals_flat))  # JAX 0.10 has no such parameter
    avals = [aval.to_tangent_aval() for aval, flag in zip(_prim.out_avals_flat, smooth, strict=True) if flag]
    wrapped = _linear_util.wrap_init(bwd, debug_info=_api_util.debug_info("custom_vjp bwd", bwd, tuple(args), {}))
    in_zeros = [not flag for flag in nz_in_flat]
    return _map_linear(axis, args, dims, num_res=num_res, bwd=wrapped, out_avals=avals, in_zeros=in_zeros, symbolic_zeros=True)


_linear_of_object_p = getattr(_hijax, "call_hi_primitive_linearized_p", None)
_rules = [(_ad.custom_lin_p, _map_linear), (_linear_of_object_p, _map_linear_of_object)]
linear_parts_are_batched = Patch(
    *((_batching.fancy_primitive_batchers, primitive, lambda _, rule=rule: rule) for primitive, rule in _rules if primitive)
)
"""Inside this context the linear part of a `custom_vjp` can be batched, and only its evaluation raises JAX's error that forward
mode is not supported. JAX batches a function before differentiating it, so its own batching rule raises this error. But `vmap`
of a block batches a traced derivative, which contains linear parts."""


# --- bytes --------------------------------------------------------------------------------------------------------------


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """The bytes of an array on a device, where XLA packs elements of less than a byte; an RNG key has those of its key data.

    >>> import jax.numpy as jnp
    >>> array_bytes((2, 3), jnp.dtype("bfloat16")), array_bytes((3,), jnp.dtype("int4"))
    (12, 2)
    """
    count = math.prod(shape)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(count * data.size * data.dtype.itemsize)
    if jnp.dtype(dtype).itemsize > 1 or dtype == jnp.bool_:
        return int(count * jnp.dtype(dtype).itemsize)
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return int(-(-count * info.bits // 8))


def tree_bytes(tree: Any) -> int:
    """The bytes of all arrays or `jax.ShapeDtypeStruct`s of `tree`.

    >>> tree_bytes({"w": jax.ShapeDtypeStruct((2, 3), "bfloat16"), "keys": jax.eval_shape(jax.random.key, 0)})
    20
    """
    return sum(array_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))
