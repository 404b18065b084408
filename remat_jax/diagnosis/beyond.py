"""Compiles the step with each change that `doctor` advises in addition to policies. The advice then states compiled bytes.

The model's output head (the matmul that computes the logits) and its attentions are changed in the traced loss, in
which the blocks are still marked (`core.marks`), so a policy reaches the changed blocks. The changed loss computes other
values, but its arrays have the same shapes as after the user's change, so it needs the same memory. There are two such changes:

- **head**: the head runs in chunks (`in_chunks`) with optax's cross entropy, which replaces everything that the loss computes
  from the logits. The loss is the mean over the tokens, as in most models: on a mesh, XLA's schedule, and so the memory, may
  change with the division by the number of tokens.
- **scores**: JAX's attention kernel for GPUs replaces both matmuls of an attention and the softmax between them. The mask is
  left out.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.effect import with_blocks
from remat_jax.apply.per_layer import layered
from remat_jax.core.marks import mark_of
from remat_jax.core.softmax_products import traced_products
from remat_jax.core.walk import bodies, equations, evaluate_equations, map_inner, retrace, value_of, values_of_inputs, variables
from remat_jax.errors import CompileError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory import MemoryReport
from remat_jax.memory.advice import (
    CHUNKS,
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
from remat_jax.memory.compile.compiler import compile_programs, export_step
from remat_jax.mesh import under
from remat_jax.policy import as_block_policy, is_off
from remat_jax.train import in_chunks, offload_optimizer
from remat_jax.train.streaming import inlined
from remat_jax.workload import TrainingStep, Workload

# JAX's attention kernel processes this number of queries, and of keys, at a time.
_TILE = 128

Change = Callable[[Any, Sequence[Any]], list[Any]]
"""A function that evaluates a closed jaxpr on flat arguments, with a change made in it, and returns the flat outputs."""


def compiled_advice(
    workload: Workload, policy: Any, report: MemoryReport, target: Target, timeout: float
) -> tuple[Advice, ...]:
    """`report.advice` with compiled bytes, the largest reduction first.

    If a changed step cannot be compiled, its bytes stay estimates. Reductions below 2 % of the unchanged step's device memory
    are left out.
    """
    compiled = [_compiled(workload, policy, advice, report, target, timeout) for advice in report.advice]
    worth = [advice for advice in compiled if advice.bytes >= LEAST * report.device_bytes]
    return tuple(sorted(worth, key=lambda advice: -advice.bytes))


def _compiled(workload: Workload, policy: Any, advice: Advice, report: MemoryReport, target: Target, timeout: float) -> Advice:
    step = _changed_step(workload, policy, advice)
    if step is None:
        return advice
    try:
        program = export_step(advice.what, step, target)
    except Exception:  # some heads and attentions cannot be rewritten
        if advice.what in (HEAD, SCORES):
            return advice
        raise
    try:
        sizes = compile_programs([program], target, timeout=timeout)[advice.what]
    except CompileError:
        return advice
    return replace(advice, bytes=report.device_bytes - sizes.device, compiled=True)


def _changed_step(workload: Workload, policy: Any, advice: Advice) -> TrainingStep | None:
    """The step with the advised change; None if only the user can make the change."""
    if advice.what == MICRO:
        return workload.in_micro_batches(MICRO_BATCHES, "mean").step(policy)
    if advice.what == DONATION and not workload.has_loss:
        step = workload.step(policy)
        return replace(step, donate_argnums=tuple(sorted({*step.donate_argnums, *undonated_arguments(workload)})))
    changed = copy.copy(workload)
    if advice.what in (HEAD, SCORES):
        if not workload.has_loss:
            return None
        change = head_in_chunks if advice.what == HEAD else attention_in_a_kernel
        changed.loss = with_change(workload, policy, change)
        return changed.step("off")
    if advice.what == STATE:
        changed.optimizer = offload_optimizer(workload.optimizer)
    elif advice.what == DTYPE:
        changed.params = in_bfloat16(workload.params)
    elif advice.what == DONATION:
        changed.donate = True
    return changed.step(policy)


# --- changes of the traced loss ---------------------------------------------------------------------------------------


def with_change(workload: Workload, policy: Any, change: Change) -> Callable[..., Any]:
    """The loss of `workload` under `policy`, with `change` made in the traced loss.

    Raises (when the loss is traced):
      UnsupportedError: the loss has nothing that `change` can change.
    """
    policies = policy if isinstance(policy, dict) else dict.fromkeys(workload.blocks, as_block_policy(policy))
    marking = None
    if not all(map(is_off, policies.values())):
        marking = replace(workload.own.policies(policies), waits=True).anew()

    def loss(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        if marking is None:
            jaxpr, shape = jax.make_jaxpr(workload.loss, return_shape=True)(*args)
            outputs = change(_flat(jaxpr), leaves)
        else:
            with scope.applying(marking) as record:
                traced = jax.make_jaxpr(lambda *args: with_blocks(marking, workload.loss, args, {}), return_shape=True)
                jaxpr, shape = traced(*args)
                blocks = frozenset(block for block, _ in marking.entries)
                outputs = layered.evaluate(_changed(jaxpr, change), leaves, blocks, record.audit)[0]
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return under(workload.mesh, loss)


def _changed(jaxpr: Any, change: Change) -> Any:
    flat = _flat(jaxpr)
    return compat.dce(retrace(flat, lambda *args: change(flat, args)))


def _flat(jaxpr: Any) -> Any:
    """The closed `jaxpr`, in which each `jit` that contains a matmul is inlined."""
    return inlined(jaxpr, lambda eqn: compat.kind(eqn) == "jit" and any(map(_is_product, equations(bodies(eqn)[0]))))


def _is_product(eqn: Any) -> bool:
    return bool(eqn.primitive.name == "dot_general")


def _has_batch(eqn: Any) -> bool:
    return bool(eqn.params["dimension_numbers"][1][0])


def _padded(array: Any, axis: int, more: int) -> Any:
    return jnp.pad(array, [(0, more if dim == axis else 0) for dim in range(array.ndim)]) if more else array


def _dependents(eqns: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    """The equations of `eqns` that depend on a variable of `made`, directly or through other equations."""
    reached, dependents = set(made), []
    for eqn in eqns:
        if not reached.isdisjoint(variables(eqn.invars)):
            dependents.append(eqn)
            reached.update(eqn.outvars)
    return dependents


# --- a head in chunks --------------------------------------------------------------------------------------------------


def head_in_chunks(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """A `Change` that runs every output head of the loss in chunks. The first output of `jaxpr` must be the loss."""
    eqns, outputs = jaxpr.jaxpr.eqns, jaxpr.jaxpr.outvars
    here = {id(eqn) for eqn in eqns}
    heads = [each.eqn for each in traced_products(jaxpr) if each.is_head and id(each.eqn) in here]
    after = _dependents(eqns, [eqn.outvars[0] for eqn in heads])
    made = {atom for eqn in (*heads, *after) for atom in eqn.outvars}
    if not heads or outputs[0] not in made:
        raise UnsupportedError("the loss does not read the logits of a head outside loops, or returns them")
    if any(atom.aval.size >= eqn.outvars[0].aval.size for atom in outputs for eqn in heads if atom in made):
        raise UnsupportedError("the loss returns an array as large as its logits")
    removed = {*heads, *after}
    env = values_of_inputs(jaxpr, args)
    evaluate_equations([eqn for eqn in eqns if eqn not in removed], env, lambda *_: None)
    # The values that the removed equations read, except operands of the heads.
    operands = {atom for eqn in heads for atom in variables(eqn.invars)}
    read = dict.fromkeys(atom for eqn in after for atom in variables(eqn.invars))
    beside = {atom: env[atom] for atom in read if atom in env and atom not in operands}
    loss = sum(_cross_entropy(head, eqns, env, [*beside.values()]) for head in heads)
    # Add the floating-point values that depend on inputs (parameters or batch), such as a router's loss: some have a gradient.
    inputs = jaxpr.jaxpr.invars
    varying = {*inputs, *(atom for eqn in _dependents(eqns, inputs) for atom in eqn.outvars)}
    terms = [value for atom, value in beside.items() if atom in varying and jnp.issubdtype(value.dtype, jnp.floating)]
    loss += sum(jnp.sum(value.astype(jnp.float32)) for value in terms)
    results = [jnp.zeros(atom.aval.shape, atom.aval.dtype) if atom in made else value_of(atom, env) for atom in outputs]
    return [loss.astype(outputs[0].aval.dtype), *results[1:]]


_VIEWS = ("convert_element_type", "transpose")


def _cross_entropy(head: Any, eqns: Sequence[Any], env: Mapping[Any, Any], beside: Sequence[Any]) -> Any:
    """The mean cross entropy of the logits of `head`, computed in chunks of the tokens.

    `head` is the equation of `eqns` that multiplies the tokens' hidden states by the head's weights. The targets are the first
    integer array in `beside` with one element per token; zeros if there is no such array.
    """
    contracted = head.params["dimension_numbers"][0]
    free = [
        [dim for dim in range(atom.aval.ndim) if dim not in dims] for atom, dims in zip(head.invars, contracted, strict=True)
    ]
    place = 0 if len(free[0]) >= len(free[1]) else 1  # the position of the hidden states among the operands of `head`
    if len(free[1 - place]) != 1:
        raise UnsupportedError(f"the logits {list(head.outvars[0].aval.shape)} have no single dimension of classes")
    makers = {view.outvars[0]: view for view in eqns if view.primitive.name in _VIEWS}
    variable = head.invars[1 - place]
    views: list[Any] = []
    while variable in makers:
        views.insert(0, makers[variable])
        variable = views[0].invars[0]
    tokens, kernel = value_of(head.invars[place], env), value_of(variable, env)
    kinds = {name: head.params[name] for name in ("dimension_numbers", "precision", "preferred_element_type")}

    def summed(tokens: Any, targets: Any) -> Any:
        view = kernel
        for eqn in views:  # each chunk casts and transposes the head's weights again
            (view,) = compat.bind(eqn, [view])
        logits = jax.lax.dot_general(*((tokens, view) if place == 0 else (view, tokens)), **kinds)
        logits = jnp.moveaxis(logits, -1 if place == 0 else 0, -1).astype(jnp.float32)
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    axis, shape = free[place][-1], [tokens.shape[dim] for dim in free[place]]
    numbers = (x for x in beside if jnp.issubdtype(x.dtype, jnp.integer) and x.size == math.prod(shape))
    targets = next(numbers, jnp.zeros(shape, jnp.int32)).reshape(shape)
    n = min(CHUNKS, shape[-1])
    more = -shape[-1] % n
    tokens, targets = _padded(tokens, axis, more), _padded(targets, targets.ndim - 1, more)
    with compat.eqn_context(head):
        return in_chunks(summed, n, axis=(axis, targets.ndim - 1))(tokens, targets) / math.prod(shape)


# --- attention in a kernel ---------------------------------------------------------------------------------------------


# The matmul of queries and keys, the matmul of weights and values, and the values' operand index (0 or 1) in the latter.
_Attention = tuple[Any, Any, int]


def attention_in_a_kernel(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """A `Change` that runs every attention of the loss, also in inner jaxprs, as one kernel for GPUs."""
    if not _has_attention(jaxpr):
        raise UnsupportedError("the loss has no attention whose scores are read only to mix values")
    return _with_kernels(jaxpr, args)


def _has_attention(jaxpr: Any) -> bool:
    if any(True for _ in _attentions(jaxpr)):
        return True
    marks = ((eqn, mark_of(eqn)) for eqn in jaxpr.jaxpr.eqns)
    inside = (body for eqn, mark in marks for body in ([_flat(mark.jaxpr)] if mark is not None else bodies(eqn)))
    return any(map(_has_attention, inside))


def _with_kernels(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    attentions = {attention[1]: attention for attention in _attentions(jaxpr)}
    env = values_of_inputs(jaxpr, args)

    def visit(eqn: Any, inputs: list[Any]) -> list[Any] | None:
        if eqn in attentions:
            return [_kernel(*attentions[eqn], env)]
        if (mark := mark_of(eqn)) is not None:
            # The jaxpr in the mark leaves out the `vmap`s around the block; `layered` adds them when it applies the policy.
            return compat.bind(eqn, inputs, mark=replace(mark, jaxpr=_changed(mark.jaxpr, _with_kernels)))
        if any(map(_has_attention, bodies(eqn))):
            return compat.bind(eqn, inputs, **map_inner(eqn, lambda body: _changed(body, _with_kernels)))
        return None

    evaluate_equations(jaxpr.jaxpr.eqns, env, visit)
    return [value_of(atom, env) for atom in jaxpr.jaxpr.outvars]


def _attentions(jaxpr: Any) -> Iterator[_Attention]:
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
