"""Compiles the step with each change that `doctor` advises in addition to policies. The advice then states compiled bytes.

With its output head in chunks (`train.chunked_head`), the loss stays the same function. Attention is changed in the traced
loss, in which the blocks are still marked (`core.marks`), so a policy reaches the changed blocks. JAX's attention kernel for
GPUs replaces both matmuls of an attention and the softmax between them. The mask is left out: the changed loss computes other
values, but its arrays have the same shapes as after the user's change, so it needs the same memory.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.effect import with_blocks
from remat_jax.apply.per_layer import layered
from remat_jax.core.marks import mark_of
from remat_jax.core.softmax_products import traced_products
from remat_jax.core.walk import bodies, equations, evaluate_equations, map_inner, retrace, value_of, values_of_inputs
from remat_jax.errors import CompileError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory import MemoryReport
from remat_jax.memory.advice import (
    DONATION,
    DTYPE,
    HEAD,
    LEAST,
    MICRO,
    MICRO_BATCHES,
    SCORES,
    STATE,
    Advice,
    in_bfloat16,
    undonated_arguments,
)
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.residuals import kept_residuals
from remat_jax.mesh import under
from remat_jax.policy import as_block_policy, is_off
from remat_jax.report.activity import activity
from remat_jax.report.tables import format_bytes
from remat_jax.step import TrainingStep
from remat_jax.train import offload_optimizer
from remat_jax.train.chunked_head import chunk_head
from remat_jax.train.streaming import inlined
from remat_jax.workload import Workload

# JAX's attention kernel processes this number of queries, and of keys, at a time.
_TILE = 128


def compiled_advice(
    workload: Workload, policy: Any, report: MemoryReport, target: Target, timeout: float
) -> tuple[Advice, ...]:
    """`report.advice` with compiled bytes, the largest reduction first.

    If a changed step cannot be compiled, its bytes stay estimates; if the loss cannot be changed, `why` ends with the reason.
    Reductions below 2 % of the unchanged step's device memory are left out.
    """
    compiled = [_compiled(workload, policy, advice, report, target, timeout) for advice in report.advice]
    worth = [advice for advice in compiled if advice.bytes >= LEAST * report.device_bytes]
    return tuple(sorted(worth, key=lambda advice: -advice.bytes))


def _compiled(workload: Workload, policy: Any, advice: Advice, report: MemoryReport, target: Target, timeout: float) -> Advice:
    step = _changed_step(workload, policy, advice)
    if step is None or (advice.what == SCORES and not backend_of(target).has_gpu_flags):  # the kernel is one for GPUs
        return advice
    try:
        program = export_step(advice.what, step, target)
    except Exception as error:  # some heads and attentions cannot be changed
        if advice.what in (HEAD, SCORES):
            reason = str(error).partition("\n")[0]
            return replace(advice, why=f"{advice.why}. The change was not compiled: {reason}")
        raise
    try:
        with activity(f"compiling the step with {advice.what}"):
            sizes = compile_programs([program], target, timeout=timeout, is_enough=lambda key: True)[advice.what]
    except CompileError:
        return advice
    why = advice.why
    if advice.what == DTYPE and report.residual_device_bytes is not None:
        left = kept_residuals(_with_narrow_parameters(workload), policy).device_bytes
        if left < report.residual_device_bytes:
            narrow, wide = (format_bytes(size // report.devices) for size in (left, report.residual_device_bytes))
            why = f"{why}. Activations follow them: the model keeps {narrow} of residuals, not {wide}"
    return replace(advice, bytes=report.device_bytes - sizes.device, why=why, compiled=True)


def _with_narrow_parameters(workload: Workload) -> Workload:
    changed = copy.copy(workload)
    changed.params = in_bfloat16(workload.params)
    return changed


def _changed_step(workload: Workload, policy: Any, advice: Advice) -> TrainingStep | None:
    """The step with the advised change; None if only the user can make the change."""
    if advice.what == MICRO:
        return workload.in_micro_batches(MICRO_BATCHES, "mean").step(policy)
    if advice.what == DONATION and not workload.has_loss:
        step = workload.step(policy)
        return replace(step, donate_argnums=tuple(sorted({*step.donate_argnums, *undonated_arguments(workload)})))
    changed = copy.copy(workload)
    if advice.what in (HEAD, SCORES):
        if workload.own_loss is None:
            return None
        if advice.what == HEAD:
            return workload.with_loss(chunk_head(workload.own_loss)).step(policy)
        changed.loss, policy = attention_in_a_kernel(workload, policy), "off"
    elif advice.what == STATE:
        changed.optimizer = offload_optimizer(workload.optimizer)
    elif advice.what == DTYPE:
        changed = _with_narrow_parameters(workload)
    elif advice.what == DONATION:
        changed.donate = True
    else:
        return None
    return changed.step(policy)


# --- attention in a kernel ---------------------------------------------------------------------------------------------


def attention_in_a_kernel(workload: Workload, policy: Any) -> Callable[..., Any]:
    """The loss of `workload` under `policy`, with one kernel for GPUs in the place of each attention, also in inner jaxprs.

    Raises (when the loss is traced):
      UnsupportedError: the loss has no attention, or no kernel takes its shapes.
    """
    policies = policy if isinstance(policy, dict) else dict.fromkeys(workload.blocks, as_block_policy(policy))
    marking = None
    if not all(map(is_off, policies.values())):
        marking = replace(workload.own.policies(policies), waits=True).anew()

    def loss(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        if marking is None:
            jaxpr, shape = jax.make_jaxpr(workload.loss, return_shape=True)(*args)
            outputs = _with_kernels(_checked(jaxpr), leaves)
        else:
            with scope.applying(marking) as record:
                traced = jax.make_jaxpr(lambda *args: with_blocks(marking, workload.loss, args, {}), return_shape=True)
                jaxpr, shape = traced(*args)
                blocks = frozenset(block for block, _ in marking.entries)
                outputs = layered.evaluate(_changed(_checked(jaxpr)), leaves, blocks, record.audit)[0]
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return under(workload.mesh, loss)


def _checked(jaxpr: ClosedJaxpr) -> Any:
    """`_flat(jaxpr)`. Raises UnsupportedError if it has no attention."""
    flat = _flat(jaxpr)
    if not _has_attention(flat):
        raise UnsupportedError("the loss has no attention whose scores are read only to mix values")
    return flat


def _changed(jaxpr: ClosedJaxpr) -> Any:
    flat = _flat(jaxpr)
    return compat.dce(retrace(flat, lambda *args: _with_kernels(flat, args)))


def _flat(jaxpr: ClosedJaxpr) -> Any:
    """The closed `jaxpr`, in which each `jit` that contains a matmul is inlined."""
    return inlined(jaxpr, lambda eqn: compat.kind(eqn) == "jit" and any(map(_is_product, equations(bodies(eqn)[0]))))


def _is_product(eqn: JaxprEqn) -> bool:
    return bool(eqn.primitive.name == "dot_general")


def _has_batch(eqn: JaxprEqn) -> bool:
    return bool(eqn.params["dimension_numbers"][1][0])


def _padded(array: Any, axis: int, more: int) -> Any:
    return jnp.pad(array, [(0, more if dim == axis else 0) for dim in range(array.ndim)]) if more else array


# The matmul of queries and keys, the matmul of weights and values, and the values' operand index (0 or 1) in the latter.
_Attention = tuple[Any, Any, int]


def _has_attention(jaxpr: ClosedJaxpr) -> bool:
    if any(True for _ in _attentions(jaxpr)):
        return True
    marks = ((eqn, mark_of(eqn)) for eqn in jaxpr.jaxpr.eqns)
    inside = (body for eqn, mark in marks for body in ([_flat(mark.jaxpr)] if mark is not None else bodies(eqn)))
    return any(map(_has_attention, inside))


def _with_kernels(jaxpr: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    attentions = {attention[1]: attention for attention in _attentions(jaxpr)}
    env = values_of_inputs(jaxpr, args)

    def visit(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        if eqn in attentions:
            return [_kernel(*attentions[eqn], env)]
        if (mark := mark_of(eqn)) is not None:
            # The jaxpr in the mark leaves out the `vmap`s around the block; `layered` adds them when it applies the policy.
            return compat.bind(eqn, inputs, mark=replace(mark, jaxpr=_changed(mark.jaxpr)))
        if any(map(_has_attention, bodies(eqn))):
            return compat.bind(eqn, inputs, **map_inner(eqn, _changed))
        return None

    evaluate_equations(jaxpr.jaxpr.eqns, env, visit)
    return [value_of(atom, env) for atom in jaxpr.jaxpr.outvars]


def _attentions(jaxpr: ClosedJaxpr) -> Iterator[_Attention]:
    """Yield the attentions whose two matmuls are equations of the closed `jaxpr` itself."""
    here = {id(eqn) for eqn in jaxpr.jaxpr.eqns}
    for product in traced_products(jaxpr):
        mixed, place = product.mixed[0] if product.is_attention and len(product.mixed) == 1 else (None, 0)
        if id(product.eqn) in here and id(mixed) in here and _has_batch(mixed):
            yield product.eqn, mixed, place


def _kernel(scores: Any, mixed: Any, place: int, env: dict[Any, Any]) -> Any:
    """The result of the equation `mixed`, which multiplies attention weights by values, computed by the attention kernel.

    Any number of batch dimensions, and of query heads per key head, is allowed.
    """
    contracted, batch = scores.params["dimension_numbers"]
    rows, dims = (sides[place] for sides in mixed.params["dimension_numbers"])
    with compat.eqn_context(mixed):
        value = _as_heads(value_of(mixed.invars[place], env), dims, rows, length=0)[0]
        sides = [
            _as_heads(value_of(atom, env), of_batch, None, features, length=value.shape[1])
            for atom, of_batch, features in zip(scores.invars, batch, contracted, strict=True)
        ]
        # `einsum` may swap the operands: the keys are the operand with the shape of the values.
        query, key = sides if sides[1].shape[1:] == value.shape and len(sides[1]) == 1 else sides[::-1]
        if key.shape[1:] != value.shape or query.shape[3:] != key.shape[3:]:
            raise UnsupportedError(f"queries {query.shape}, keys {key.shape}, values {value.shape}: no kernel takes them")
        of_key = functools.partial(compat.attention_kernel(), k=_in_tiles(key[0]), v=_in_tiles(value), segment_ids=None)
        padded, out = _in_tiles(query), mixed.outvars[0].aval
        result = (of_key(padded[0])[None] if len(query) == 1 else jax.vmap(of_key)(padded))[:, :, : query.shape[2]]
        order = (1, 3, 2, 0, 4) if place else (1, 3, 4, 2, 0)
        return jnp.transpose(result, order).reshape(out.shape).astype(out.dtype)


def _in_tiles(array: Any) -> Any:
    """`array` with its third dimension from the end, if larger than `_TILE`, padded to a multiple of `_TILE`."""
    rows = array.shape[-3]
    return _padded(array, array.ndim - 3, -rows % _TILE if rows > _TILE else 0)


def _as_heads(
    array: Any, batch: Sequence[int], rows: Sequence[int] | None = None, features: Sequence[int] | None = None, *, length: int
) -> Any:
    """`array` reshaped to (others, batch, rows, heads, features); `batch`, `rows` and `features` list dimensions of `array`.

    The last dimension in the argument `batch` becomes the heads; its other dimensions become the batch. Rows are positions in
    the sequence. If `rows` is None, they are the unlisted dimension of size `length`, or else the largest unlisted dimension.
    `others` are the remaining unlisted dimensions (for queries: the query heads that share one key head). If `features` is
    None, these dimensions are the features instead, and `others` has size 1.
    """
    rest = [dim for dim in range(array.ndim) if dim not in (*batch, *(rows or ()), *(features or ()))]
    if rows is None:
        rows = [max(rest, key=lambda dim: (array.shape[dim] == length, array.shape[dim]))]
        rest = [dim for dim in rest if dim not in rows]
    others, features = (rest, features) if features is not None else ([], rest)
    parts = [list(part) for part in (others, batch[:-1], rows, batch[-1:], features)]
    sizes = [math.prod(array.shape[dim] for dim in part) for part in parts]
    return jnp.transpose(array, [dim for part in parts for dim in part]).reshape(sizes)
