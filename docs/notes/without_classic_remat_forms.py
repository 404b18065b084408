"""Forms of a block's derivative that replace its checkpoint region, for `without_classic_remat.py`.

`FORMS` maps the name of each form to a context in which blocks of `remat_jax` have this form. Private JAX is used where a form
is JAX's own region or split of a program, which have no public names.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src import ad_checkpoint
from jax._src.interpreters import partial_eval
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.experimental import hijax
from jax.extend.core import Primitive

from remat_jax import compat
from remat_jax.compat import rules
from remat_jax.core import block as heart
from remat_jax.core.walk import interpret

# JAX 0.12 has one class for primitives of this kind; earlier versions have another.
HiPrimitive: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive", object)
Form = Callable[[], contextlib.AbstractContextManager[None]]


def instantiated(values: Any) -> list[Any]:
    """The tangents or cotangents `values` without symbolic zeros."""
    zeros = (rules.Zero, SymbolicZero)
    return [jnp.zeros(value.aval.shape, value.aval.dtype) if isinstance(value, zeros) else value for value in values]


# --- a linearisation in two halves -------------------------------------------------------------------------------------------


def split(jaxpr: Any, primals: Any, *, outputs: int, policy: Any) -> tuple[list[Any], list[Any], Any]:
    """Evaluate the first half of a linearisation: its outputs, the fixed arrays, and the second half.

    The fixed arrays are the arrays that `policy` keeps and the primals that the second half reads. The second half is a closed
    jaxpr from the fixed arrays and the directions to the tangents.
    """
    jaxpr, consts = compat.hoist_consts(jaxpr)
    operands, body = [*consts, *primals], jaxpr.jaxpr
    unknown = [place >= len(operands) for place in range(len(body.invars))]
    of_tangents = [place >= outputs for place in range(len(body.outvars))]
    policy = policy or jax.checkpoint_policies.nothing_saveable
    known, staged, _, is_staged, count = partial_eval.partial_eval_jaxpr_custom(
        body, unknown, True, of_tangents, of_tangents, policy
    )
    wanted = [flag for flag, made in zip(of_tangents, is_staged, strict=True) if made]
    linear, reads = partial_eval.dce_jaxpr(staged, wanted, instantiate=[False] * count + unknown)
    known, _ = partial_eval.dce_jaxpr(known, [True] * outputs + reads[:count], instantiate=True)
    known = ad_checkpoint._insert_reduce_precision(known, sum(reads[:count]))
    results = compat.jaxpr_function(compat.closed(known))(*operands)
    read = [operand for operand, flag in zip(operands, reads[count:], strict=False) if flag]
    return results[:outputs], [*results[outputs:], *read], compat.closed(linear)


def transposed(jaxpr: Any, fixed: Any, cotangents: Any, *, prevent_cse: bool) -> list[Any]:
    """The transpose of the second half: the cotangents of its directions. A barrier is before the recomputation."""
    used = [not isinstance(cotangent, rules.Zero | SymbolicZero) for cotangent in cotangents]
    directions = jaxpr.in_avals[len(fixed) :]
    if not any(used):
        return [rules.Zero(aval.to_ct_aval()) for aval in directions]
    operands = list(fixed), [cotangent for cotangent, flag in zip(cotangents, used, strict=True) if flag]
    fixed, given = compat.optimization_barrier(operands) if prevent_cse else operands
    linear = compat.jaxpr_function(compat.dce(jaxpr, used))
    return list(jax.linear_transpose(lambda *along: linear(*fixed, *along), *directions)(given))


# --- forms of the linear part alone: the derivative rule of the block stays a `custom_jvp` -----------------------------------


def _evaluate(*args: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return compat.jaxpr_function(jaxpr)(*args)


# (a0) ẏ = f_lin(r, x, ẋ) as a primitive of `jax.extend.core`, with rules in the tables of `jax.interpreters`.
linear_part_p: Primitive = compat.new_primitive("linear_part", _evaluate)


def _transpose(cotangents: Any, *args: Any, jaxpr: Any, fixed: int, prevent_cse: bool) -> list[Any]:
    return [None] * fixed + transposed(jaxpr, args[:fixed], cotangents, prevent_cse=prevent_cse)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return jax.jvp(lambda *args: _evaluate(*args, **params), tuple(primals), tuple(map(rules.instantiate_zeros, tangents)))


def _batch(axis: Any, args: Any, axes: Any, *, jaxpr: Any, **params: Any) -> Any:
    mapped, moved, out_axes = compat.batched(jaxpr, axis, args, axes)
    return linear_part_p.bind(*moved, jaxpr=mapped, **params), out_axes


linear_part_p.def_abstract_eval(lambda *_, jaxpr, **__: list(jaxpr.out_avals))
rules.primitive_transposes[linear_part_p] = _transpose
rules.primitive_jvps[linear_part_p] = _jvp
rules.fancy_primitive_batchers[linear_part_p] = _batch


def bind_primitive(jaxpr: Any, primals: Any, directions: Any, *, outputs: int, policy: Any, prevent_cse: bool) -> list[Any]:
    """(a0) The linear part as `linear_part_p`."""
    results, fixed, linear = split(jaxpr, primals, outputs=outputs, policy=policy)
    return [*results, *linear_part_p.bind(*fixed, *directions, jaxpr=linear, fixed=len(fixed), prevent_cse=prevent_cse)]


class _LinearPart(HiPrimitive):
    """(a) ẏ = f_lin(r, x, ẋ) as a primitive of hijax, whose transpose recomputes behind a barrier."""

    def __init__(self, jaxpr: Any, fixed: int, prevent_cse: bool) -> None:
        self.in_avals, self.out_aval = tuple(jaxpr.in_avals), tuple(jaxpr.out_avals)
        self.params = {"jaxpr": jaxpr, "fixed": fixed, "prevent_cse": prevent_cse}
        super().__init__()

    def expand(self, *args: Any) -> Any:
        return tuple(compat.jaxpr_function(self.jaxpr)(*args))

    def transpose(self, cotangents: Any, *args: Any) -> None:
        made = transposed(self.jaxpr, args[: self.fixed], cotangents, prevent_cse=self.prevent_cse)
        for sum_, cotangent in zip(args[self.fixed :], made, strict=True):
            sum_.accum(cotangent)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return jax.jvp(self.expand, tuple(primals), tuple(instantiated(tangents)))

    def lin(self, _: Any, *primals: Any) -> Any:
        return jax.linearize(self.expand, *primals)

    def linearized(self, linear: Any, *tangents: Any) -> Any:
        return linear(*instantiated(tangents))

    def vjp_fwd(self, _: Any, *primals: Any) -> Any:
        return jax.vjp(self.expand, *primals)

    def vjp_bwd_retval(self, pullback: Any, cotangents: Any) -> Any:
        return pullback(tuple(instantiated(cotangents)))

    def batch(self, axis: Any, args: Any, dims: Any) -> Any:
        mapped, moved, out_dims = compat.batched(self.jaxpr, axis, args, dims)
        return _LinearPart(mapped, self.fixed, self.prevent_cse)(*moved), tuple(out_dims)


def bind_hijax(jaxpr: Any, primals: Any, directions: Any, *, outputs: int, policy: Any, prevent_cse: bool) -> list[Any]:
    """(a) The linear part as `_LinearPart`."""
    results, fixed, linear = split(jaxpr, primals, outputs=outputs, policy=policy)
    return [*results, *_LinearPart(linear, len(fixed), prevent_cse)(*fixed, *directions)]


def bind_linear_call(jaxpr: Any, primals: Any, directions: Any, *, outputs: int, policy: Any, prevent_cse: bool) -> list[Any]:
    """(b) The linear part as `linear_call`."""
    results, fixed, linear = split(jaxpr, primals, outputs=outputs, policy=policy)

    def forward(fixed: Any, directions: Any) -> Any:
        return compat.jaxpr_function(linear)(*fixed, *directions)

    def backward(fixed: Any, cotangents: Any) -> Any:
        return instantiated(transposed(linear, fixed, cotangents, prevent_cse=prevent_cse))

    return [*results, *linear_call(forward, backward, fixed, list(directions))]


@contextlib.contextmanager
def flags(*names: str) -> Iterator[None]:
    """Inside this context these flags of JAX are on."""
    for name in names:
        jax.config.update(name, True)
    try:
        yield
    finally:
        for name in names:
            jax.config.update(name, False)


def with_names_of_remat3(jaxpr: Any) -> Callable[..., Any]:
    """The closed `jaxpr` as a function whose names are those of `jax_remat3`."""

    def visit(eqn: Any, inputs: list[Any]) -> list[Any] | None:
        name = compat.given_name(eqn)
        return None if name is None else [jax.ad_checkpoint.checkpoint_name(inputs[0], name)]

    return lambda *args: interpret(jaxpr, args, visit)


def remat3(jaxpr: Any, policy: Any, args: Any, prevent_cse: bool) -> list[Any]:
    """`jaxpr` in a region of `jax_remat3` with the names of `policy`."""
    saved, offloaded = (policy.saved, policy.offloaded) if policy else ((), ())
    names = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
    names = names if offloaded else jax.checkpoint_policies.save_only_these_names(*saved)
    with flags("jax_remat3"):
        return list(jax.checkpoint(with_names_of_remat3(jaxpr), policy=names, prevent_cse=prevent_cse)(*args))


def bind_remat3(jaxpr: Any, primals: Any, directions: Any, *, outputs: int, policy: Any, prevent_cse: bool) -> list[Any]:
    """(c) `jax_remat3` around the linearisation, where arrays of derivative rules have names."""
    return remat3(jaxpr, policy, [*primals, *directions], prevent_cse)


# --- forms of the whole block ------------------------------------------------------------------------------------------------


def halves_along(block: Any, values: Any, live: Any, staying: Any = tuple) -> tuple[list[Any], list[Any], Any]:
    """`split` of the block's linearisation along its `live` inputs; the inputs `staying()` are not offloaded."""
    directions = [compat.type_of(values[place]).to_tangent_aval() for place in live]
    linearised, policy = block._linearised_under_policy(values, directions, live, staying())
    return split(linearised, values, outputs=len(block.jaxpr.out_avals), policy=policy)


def pulled_back(linear: Any, live: Any, prevent_cse: bool, avals: Any, fixed: Any, cotangents: Any) -> tuple[Any, ...]:
    """The cotangents of the block's inputs with the types `avals`, of which those at `live` are differentiated."""
    zeros = (rules.Zero, SymbolicZero)
    smooth = [
        rules.Zero(ct.aval) if isinstance(ct, zeros) else ct for ct in cotangents if heart.is_smooth(getattr(ct, "aval", ct))
    ]
    made = dict(zip(live, transposed(linear, fixed, smooth, prevent_cse=prevent_cse), strict=True))
    return tuple(made.get(place, rules.Zero(aval.to_ct_aval())) for place, aval in enumerate(avals))


def of_custom_vjp(block: Any, *, prevent_cse: bool, staying: Any) -> Any:
    """(b2) The block as `custom_vjp`."""
    run = jax.custom_vjp(lambda *primals: compat.jaxpr_function(block.jaxpr)(*primals))

    def forward(*primals: Any) -> Any:
        values = [primal.value for primal in primals]
        live = tuple(place for place, primal in enumerate(primals) if primal.perturbed and heart.is_smooth(primal.value))
        outputs, fixed, linear = halves_along(block, values, live, staying)
        return outputs, jax.tree_util.Partial(
            functools.partial(pulled_back, linear, live, prevent_cse, tuple(block.jaxpr.in_avals)), fixed
        )

    def backward(pullback: Any, cotangents: Any) -> Any:
        return tuple(None if isinstance(ct, rules.Zero) else ct for ct in pullback(cotangents))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


class _HiBlock(HiPrimitive):
    """(a2) The block as a primitive of hijax, as JAX's own `RematTraced` is."""

    def __init__(self, block: Any, prevent_cse: bool, staying: Any) -> None:
        self.in_avals, self.out_aval = tuple(block.jaxpr.in_avals), tuple(block.jaxpr.out_avals)
        self.params = {"jaxpr": block.jaxpr, "decides": block.policy, "prevent_cse": prevent_cse}
        self.block, self.staying, self.effects = block, staying, frozenset(block.jaxpr.effects)
        super().__init__()

    def expand(self, *args: Any) -> Any:
        return tuple(compat.jaxpr_function(self.jaxpr)(*args))

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return jax.jvp(self.expand, tuple(primals), tuple(instantiated(tangents)))

    def vjp_fwd(self, differentiated: Any, *primals: Any) -> Any:
        live = tuple(place for place, flag in enumerate(differentiated) if flag and heart.is_smooth(primals[place]))
        outputs, fixed, linear = halves_along(self.block, list(primals), live, self.staying)
        pullback = functools.partial(pulled_back, linear, live, self.prevent_cse, self.in_avals)
        return tuple(outputs), jax.tree_util.Partial(pullback, fixed)

    def vjp_bwd_retval(self, pullback: Any, cotangents: Any) -> Any:
        return pullback(cotangents)

    def lin(self, differentiated: Any, *primals: Any) -> Any:
        live = tuple(place for place, flag in enumerate(differentiated) if flag and heart.is_smooth(primals[place]))
        outputs, fixed, linear = halves_along(self.block, list(primals), live, self.staying)

        def push(fixed: Any, *tangents: Any) -> Any:
            made = iter(compat.jaxpr_function(linear)(*fixed, *instantiated(tangents[place] for place in live)))
            return tuple(next(made) if heart.is_smooth(out) else heart.zero_tangent(out) for out in self.out_aval)

        return tuple(outputs), jax.tree_util.Partial(push, fixed)

    def linearized(self, push: Any, *tangents: Any) -> Any:
        return push(*tangents)

    def batch(self, axis: Any, args: Any, dims: Any) -> Any:
        mapped, moved, out_dims = compat.batched(self.jaxpr, axis, args, dims)
        inputs = [name is not None for name in self.block.named.inputs]
        block = heart.block_under_policy(mapped, self.decides, self.block.named.path, inputs)
        return _HiBlock(block, self.prevent_cse, self.staying)(*moved), tuple(out_dims)


def of_hijax(block: Any, *, prevent_cse: bool, staying: Any) -> Any:
    """(a2) The block as `_HiBlock`."""
    return lambda *args: list(_HiBlock(block, prevent_cse, staying)(*args))


def of_remat3(block: Any, *, prevent_cse: bool, **_: Any) -> Any:
    """(c2) `jax_remat3` around the block, where only arrays of the block itself have names."""
    saved, offloaded = block._decided
    return lambda *args: remat3(block.named.jaxpr, heart.NamesPolicy(saved, offloaded), args, prevent_cse)


def of_custom_remat(block: Any, *, prevent_cse: bool, **_: Any) -> Any:
    """(c3) `jax_remat3` around a `custom_vjp` of `jax_custom_vjp3` with rules for rematerialisation (`defremat`)."""
    live = tuple(place for place, aval in enumerate(block.jaxpr.in_avals) if heart.is_smooth(aval))

    def forward(*primals: Any) -> Any:
        outputs, fixed, linear = halves_along(block, list(primals), live)
        pullback = functools.partial(pulled_back, linear, live, prevent_cse, tuple(block.jaxpr.in_avals))
        return outputs, jax.tree_util.Partial(pullback, fixed)

    def again(pullback: Any, *primals: Any) -> Any:
        return compat.jaxpr_function(block.jaxpr)(*primals), pullback

    def backward(pullback: Any, cotangents: Any) -> Any:
        return tuple(None if isinstance(ct, rules.Zero) else ct for ct in pullback(cotangents))

    def bind(*args: Any) -> Any:
        with flags("jax_remat3", "jax_custom_vjp3"):
            run = jax.custom_vjp(lambda *primals: compat.jaxpr_function(block.jaxpr)(*primals))
            run.defremat(forward, again, backward)
            return jax.checkpoint(run, prevent_cse=prevent_cse)(*args)

    return bind


def of_linear_part(bind: Any, block: Any, *, prevent_cse: bool, rows: Any, staying: Any) -> Any:
    """The block as `custom_jvp`, as in `remat_jax/core/block.py`, with `bind` in place of the checkpoint."""
    size, outputs = len(block.jaxpr.in_avals), len(block.jaxpr.out_avals)

    def run(*primals: Any) -> list[Any]:
        return heart._reading(compat.jaxpr_function(block.jaxpr), size, rows)(*primals)

    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        live = [place for place, tangent in enumerate(tangents) if heart.is_live(tangent)]
        directions = [tangents[place] for place in live]
        linearised, policy = block._linearised_under_policy(primals[:size], directions, live, staying())
        if rows:
            reading = heart._reading(compat.jaxpr_function(linearised), size, rows)
            linearised = jax.make_jaxpr(reading)(*primals, *directions)
        results = bind(linearised, primals, directions, outputs=outputs, policy=policy, prevent_cse=prevent_cse)
        changes = iter(results[outputs:])
        return results[:outputs], [
            next(changes) if heart.is_smooth(out) else heart.zero_tangent(out) for out in results[:outputs]
        ]

    return compat.block_function(run, rule)


def bind_classic(jaxpr: Any, args: Any, *, policy: Any, prevent_cse: bool) -> list[Any]:
    """A region of JAX's classic rematerialisation, with the body `jaxpr`."""
    body, consts = compat.hoist_consts(jaxpr)
    params = {"jaxpr": body.jaxpr, "prevent_cse": prevent_cse, "differentiated": False, "policy": policy}
    return list(ad_checkpoint.remat_p.bind(*consts, *args, **params))


def classic() -> contextlib.AbstractContextManager[Any]:
    """Inside this context the checkpoint of a block is a region of JAX."""
    return mock.patch.object(compat, "bind_region", bind_classic)


@contextlib.contextmanager
def making(make: Any) -> Iterator[None]:
    """Inside this context `make` makes the function of a block under its policy."""

    def checkpointed(block: Any, *, prevent_cse: bool, rows: Any = (), once: bool = False, staying: Any = tuple) -> Any:
        return make(block, prevent_cse=prevent_cse, rows=rows, staying=staying)

    with mock.patch.object(heart.BlockUnderPolicy, "checkpointed", checkpointed):
        yield


def part(bind: Any) -> contextlib.AbstractContextManager[None]:
    """Inside this context `bind` binds the linearisation of a block."""
    return making(functools.partial(of_linear_part, bind))


def whole(function: Any) -> contextlib.AbstractContextManager[None]:
    """Inside this context `function` makes the function of a block. Rows of stacks are read before it."""

    def make(block: Any, *, rows: Any, **how: Any) -> Any:
        return heart._reading(function(block, **how), len(block.jaxpr.in_avals), rows)

    return making(make)


FORMS: dict[str, Form] = {
    "classic": classic,
    "a0 primitive, linear part": lambda: part(bind_primitive),
    "a1 hijax, linear part": lambda: part(bind_hijax),
    "a2 hijax, block": lambda: whole(of_hijax),
    "b1 linear_call": lambda: part(bind_linear_call),
    "b2 custom_vjp": lambda: whole(of_custom_vjp),
    "c1 remat3, linearisation": lambda: part(bind_remat3),
    "c2 remat3, block": lambda: whole(of_remat3),
    "c3 custom remat": lambda: whole(of_custom_remat),
    "d own region": contextlib.nullcontext,
}
