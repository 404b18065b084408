"""The checkpoint region of a block: a primitive of this package, not of JAX.

It does what a region of `jax.checkpoint` does, without JAX's established rematerialisation or its successor. Its rules call
JAX's partial evaluation, transposition and batching of jaxprs, as the rules of `scan` and `cond` do:

    (y, ẏ) = region(x, ẋ)
    y, r = f(x);  ẏ = region(r, x, ẋ)    partially evaluated: the backward pass reads only the kept arrays r and the inputs x
    x̄ = region(r, x, ȳ)                  transposed: behind a barrier, the region recomputes what is not kept
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import source_info_util as _source_info
from jax._src.ad_checkpoint import remat_p as _remat_p
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe
from jax._src.util import weakref_lru_cache as _weakref_lru_cache
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from remat_jax.compat import rules
from remat_jax.compat.equations import parameters
from remat_jax.compat.jaxprs import (
    bind,
    closed,
    eqn_context,
    hoist_consts,
    jaxpr_function,
    new_primitive,
    optimization_barrier,
)
from remat_jax.compat.rematerialisation import effects_explained
from remat_jax.compat.tracing import trace_settings

_KEY_REUSE = "jax.experimental.key_reuse._core"


def bind_region(jaxpr: ClosedJaxpr, args: Sequence[Any], *, policy: Any, prevent_cse: bool) -> list[Any]:
    """Evaluate the closed `jaxpr` on `args` as one region."""
    _adopt_checks()
    body, consts = hoist_consts(jaxpr)
    params = {"jaxpr": body.jaxpr, "policy": policy, "prevent_cse": prevent_cse, "differentiated": False}
    with effects_explained(body.jaxpr):
        return region_p.bind(*consts, *args, **params)


def _adopt_checks() -> None:
    """Let `checkify` and the check of reused random keys treat a region as one of `jax.checkpoint`, if they are imported."""
    if jax.config.jax_debug_key_reuse:
        importlib.import_module(_KEY_REUSE)
    for module, name in (("jax._src.checkify", "error_checks"), (_KEY_REUSE, "key_reuse_signatures")):
        table = getattr(sys.modules.get(module), name, {})
        if _remat_p in table:
            table.setdefault(region_p, table[_remat_p])


def bind_established(eqn: JaxprEqn, body: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate the `jax_remat3` region `eqn`, with the closed jaxpr `body`, as a region of this package."""
    params = parameters(eqn)
    prevent = params.get("prevent_cse", True)
    prevents = prevent if isinstance(prevent, bool) else any(prevent)
    with eqn_context(eqn):
        return bind_region(body, inputs, policy=params["policy"], prevent_cse=prevents)


def _evaluate(*args: Any, jaxpr: Jaxpr, prevent_cse: bool, differentiated: bool, **_: Any) -> list[Any]:
    operands = optimization_barrier(list(args)) if differentiated and prevent_cse else args
    with jax.named_scope("checkpoint"):
        return list(jaxpr_function(closed(jaxpr))(*operands))


region_p = new_primitive("checkpoint_region", _evaluate)


@region_p.def_impl
def _run(*args: Any, jaxpr: Jaxpr, **_: Any) -> list[Any]:
    return list(jaxpr_function(closed(jaxpr))(*args))


def _abstract(*_: Any, jaxpr: Jaxpr, **__: Any) -> tuple[list[Any], Any]:
    return [var.aval for var in jaxpr.outvars], _core.positional_effects(jaxpr)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Jaxpr, **params: Any) -> tuple[list[Any], list[Any]]:
    moving = [not isinstance(tangent, rules.Zero) for tangent in tangents]
    pushed, smooth = _ad.jvp_jaxpr(closed(jaxpr), moving, False)
    body, consts = hoist_consts(pushed)
    given = [tangent for tangent, flag in zip(tangents, moving, strict=True) if flag]
    results = region_p.bind(*consts, *primals, *given, jaxpr=body.jaxpr, **params)
    outputs, changes = results[: len(smooth)], iter(results[len(smooth) :])
    return outputs, [
        next(changes) if flag else rules.Zero(jax.typeof(out).to_tangent_aval())
        for out, flag in zip(outputs, smooth, strict=True)
    ]


def _partial_eval(trace: Any, *tracers: Any, jaxpr: Jaxpr, policy: Any, **params: Any) -> list[Any]:
    """Evaluate what the known inputs determine. The rest becomes a region, which reads the arrays that `policy` keeps."""
    if refused := _effects.remat_allowed_effects.filter_not_in(jaxpr.effects):
        raise NotImplementedError(f"Effects not supported in partial-eval of `checkpoint`/`remat`: {refused}")
    unknown = [not tracer.is_known() for tracer in tracers]
    saveable = policy or jax.checkpoint_policies.nothing_saveable
    known, staged, is_later, is_staged, count = _pe.partial_eval_jaxpr_custom(jaxpr, unknown, True, False, False, saveable)
    later, reads = _pe.dce_jaxpr(staged, [flag for flag, made in zip(is_later, is_staged, strict=True) if made])
    size = is_later.count(False)
    known, reads_known = _pe.dce_jaxpr(known, [True] * size + reads[:count])
    values = [tracer.pval.get_known() for tracer in tracers if tracer.is_known()]
    made = _evaluate_rounded(known, sum(reads[:count]), list(itertools.compress(values, reads_known)))
    operands = [*map(trace.new_instantiated_const, made[size:])]
    operands += map(trace.instantiate_const, itertools.compress(tracers, reads[count:]))
    results = [_pe.JaxprTracer(trace, _pe.PartialVal.unknown(var.aval), None) for var in later.outvars]
    params = {**params, "jaxpr": later, "policy": policy, "differentiated": True}
    effects, source = _core.positional_effects(later), _source_info.current()
    recipe = _pe.new_eqn_recipe(trace, operands, results, region_p, params, effects, source)
    for result in results:
        result.recipe = recipe
    outputs, later_outputs = iter(made[:size]), iter(results)
    return [next(later_outputs) if flag else next(outputs) for flag in is_later]


def _evaluate_rounded(jaxpr: Jaxpr, count: int, args: Sequence[Any]) -> list[Any]:
    """Evaluate the open `jaxpr`. Its last `count` results are saved, and its other equations read them as they are saved."""
    read = {atom for eqn in jaxpr.eqns for atom in eqn.invars if not hasattr(atom, "val")}
    saved = {atom for atom in jaxpr.outvars[len(jaxpr.outvars) - count :] if not hasattr(atom, "val")} & read

    def rounded(var: Any, value: Any) -> Any:
        return _rounded(value) if var in saved else value

    values = {var: rounded(var, arg) for var, arg in zip(jaxpr.invars, args, strict=True)}
    last = _core.last_used(jaxpr)
    for eqn in jaxpr.eqns:
        outputs = bind(eqn, [atom.val if hasattr(atom, "val") else values[atom] for atom in eqn.invars])
        with eqn_context(eqn):
            values.update((var, rounded(var, value)) for var, value in zip(eqn.outvars, outputs, strict=True))
        _core.clean_up_dead_vars(eqn, values, last)
    return [atom.val if hasattr(atom, "val") else values[atom] for atom in jaxpr.outvars]


def _rounded(value: Any) -> Any:
    """`value` in the precision of its dtype, which XLA may exceed where it fuses (jax-ml/jax#22244)."""
    if not jnp.issubdtype(value.dtype, jnp.floating) or jnp.finfo(value.dtype).bits < 16:
        return value  # in float8 and float4 the rounding is no identity
    info = jnp.finfo(value.dtype)
    return jax.lax.reduce_precision(value, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _transpose(cotangents: Sequence[Any], *args: Any, jaxpr: Jaxpr, **params: Any) -> list[Any]:
    linear = tuple(rules.is_undefined_primal(arg) for arg in args)
    zeros = tuple(isinstance(cotangent, rules.Zero) for cotangent in cotangents)
    pullback, is_zero = _transposed(jaxpr, linear, zeros, trace_settings())
    body, consts = hoist_consts(pullback)
    operands = [arg for arg, flag in zip(args, linear, strict=True) if not flag]
    operands += [cotangent for cotangent, zero in zip(cotangents, zeros, strict=True) if not zero]
    made, zero = iter(region_p.bind(*consts, *operands, jaxpr=body.jaxpr, **params)), iter(is_zero)
    return [
        (_ad.Zero(arg.aval) if next(zero) else next(made)) if flag else None for arg, flag in zip(args, linear, strict=True)
    ]


@_weakref_lru_cache
def _transposed(jaxpr: Jaxpr, linear: tuple[bool, ...], zeros: tuple[bool, ...], _: Any) -> tuple[Any, list[bool]]:
    """The transpose of the open `jaxpr` along its `linear` inputs, as a closed jaxpr, and which of their cotangents are zero.

    It maps the other inputs and the cotangents that are not zero to the cotangents that are not zero. The last argument is
    JAX's settings.
    """
    avals, outputs = [var.aval for var in jaxpr.invars], [var.aval.to_ct_aval() for var in jaxpr.outvars]
    fixed = [aval for aval, flag in zip(avals, linear, strict=True) if not flag]
    arriving = [aval for aval, zero in zip(outputs, zeros, strict=True) if not zero]
    is_zero: list[bool] = []

    def pullback(fixed: Sequence[Any], arriving: Sequence[Any]) -> list[Any]:
        again, along, *_ = _pe.partial_eval_jaxpr_nounits(closed(jaxpr), linear, False)
        with _source_info.extend_name_stack("rematted_computation"):
            recomputed = jaxpr_function(again)(*fixed)
        given = iter(arriving)
        cotangents = [rules.Zero(aval) if zero else next(given) for aval, zero in zip(outputs, zeros, strict=True)]
        directions = [_ad.UndefinedPrimal(aval.to_ct_aval()) for aval, flag in zip(avals, linear, strict=True) if flag]
        made = _ad.backward_pass(along.jaxpr, False, along.consts, [*recomputed, *directions], cotangents)[len(recomputed) :]
        is_zero[:] = [isinstance(cotangent, rules.Zero) for cotangent in made]
        return [cotangent for cotangent, zero in zip(made, is_zero, strict=True) if not zero]

    return jax.make_jaxpr(pullback)(fixed, arriving), is_zero


def _batch(axis: Any, args: Sequence[Any], axes: Sequence[int | None], *, jaxpr: Jaxpr, **params: Any) -> tuple[Any, Any]:
    # Inside the region, so that no moved copy of an input becomes a residual.
    in_front = [_batching.zero_if_mapped] * len(jaxpr.outvars)
    mapped, is_mapped = _batching.batch_jaxpr_axes(closed(jaxpr), axis, axes, in_front)
    body, consts = hoist_consts(closed(mapped))
    return region_p.bind(*consts, *args, jaxpr=body.jaxpr, **params), [0 if flag else None for flag in is_mapped]


def _dce(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    *_, eqn = rest
    body, reads = _pe.dce_jaxpr(eqn.params["jaxpr"], used)
    if not any(used) and not any(reads) and not body.effects:
        return reads, None
    invars = [var for var, flag in zip(eqn.invars, reads, strict=True) if flag]
    outvars = [var for var, flag in zip(eqn.outvars, used, strict=True) if flag]
    effects = _core.eqn_effects(body, invars)
    return reads, eqn.replace(invars=invars, outvars=outvars, params={**eqn.params, "jaxpr": body}, effects=effects)


def _halves(unknown: Any, *rest: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    *_, known, staged = rest
    return known, {**staged, "differentiated": True}


region_p.def_effectful_abstract_eval(_abstract)
rules.primitive_jvps[region_p] = _jvp
rules.primitive_transposes[region_p] = _transpose
rules.fancy_primitive_batchers[region_p] = _batch
_pe.custom_partial_eval_rules[region_p] = _partial_eval
_pe.partial_eval_jaxpr_custom_rules[region_p] = functools.partial(_pe.call_partial_eval_custom_rule, "jaxpr", _halves)
_pe.dce_rules[region_p] = _dce
