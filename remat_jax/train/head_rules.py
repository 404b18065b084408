"""Calls with a custom derivative in a chunk of a head: the function and its derivative rule for some of the tokens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from remat_jax import compat
from remat_jax.core.axes import AxisPlace, Passage
from remat_jax.core.walk import bodies, filled
from remat_jax.train.head_program import Operation, Value, program_of
from remat_jax.train.head_region import NotPerToken, RegionStep, TokenRegion


def step_of_call(region: TokenRegion, node: Operation) -> RegionStep | None:
    """The step of a call with a custom derivative; None unless its function and its rule treat all tokens alike."""
    flags = [isinstance(operand, Value) and operand in region.cuts for operand in node.operands]
    if not compat.kind(node.eqn).startswith("custom_") or len(region.lengths) > 1:
        return None
    program = program_of(bodies(node.eqn)[0], varying=flags)
    given = {value: region.cuts[each] for value, each, flag in zip(program.inputs, node.operands, flags, strict=True) if flag}
    inner = TokenRegion(program, given, region.lengths[0], in_rule=region.in_rule, calls=step_of_call)
    try:
        inner.find()
        cuts = [inner.place_of(value) for value in program.inputs]
        results = [inner.cuts.get(value) for value in program.outputs]
        if any(value not in inner.cuts and value not in inner.sums for value in program.outputs):
            return None
        keys = list(zip(program.inputs, cuts, strict=True))
        inner.check_reads(keys)
        rule = functools.cache(functools.partial(DerivativeRule, node.eqn, tuple(cuts), tuple(results), region.lengths[0]))
        if not region.in_rule:
            rule()
    except NotPerToken:
        return None

    def call(positions: int, valid: Any) -> Callable[..., Any]:
        function = functools.partial(inner.evaluate, keys, positions, valid)
        return _with_rule(node.eqn, function, lambda: rule().bound(positions, valid))

    return RegionStep(node, Passage(tuple(cuts), tuple(results), is_summed=any(cut is None for cut in results)), call=call)


class DerivativeRule:
    """The derivative rule of a call, for chunks. It is traced as JAX applies it, and cut like the call itself.

    For a `custom_jvp` it maps operands and tangents to tangents, for a `custom_vjp` operands and cotangents to cotangents; both
    only of floating-point arrays.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        cuts: Sequence[AxisPlace | None],
        results: Sequence[AxisPlace | None],
        positions: int,
        region: Callable[[Any, Any, int], TokenRegion] | None = None,
    ) -> None:
        jaxpr, smooth = traced_rule(eqn)
        of_args, of_results = (list(itertools.compress(*pair)) for pair in zip((cuts, results), smooth, strict=True))
        given, wanted = (of_args, of_results) if _is_jvp(eqn) else (of_results, of_args)
        places = [*cuts, *given]
        program = program_of(jaxpr, varying=[cut is not None for cut in places])
        at = {value: cut for value, cut in zip(program.inputs, places, strict=True) if cut is not None}
        self.keys = list(zip(program.inputs, places, strict=True))
        self.region = (region or functools.partial(TokenRegion, in_rule=True, calls=step_of_call))(program, at, positions)
        self.region.find()
        self.outputs = [self._output(value, cut) for value, cut in zip(program.outputs, wanted, strict=True)]
        self.region.check_reads(self.keys)

    def _output(self, value: Any, cut: AxisPlace | None) -> Any:
        """The key of an output of the rule, which must be cut at `cut` or summed; a literal as it is."""
        region = self.region
        if isinstance(value, Value) and (value in region.cuts or value in region.sums):
            if region.cuts.get(value) != cut:
                raise NotPerToken(f"the derivative rule moves {region.things} or sums over them")
            return value, cut
        known = region.known(value)
        if known is None or np.any(known != 0):
            raise NotPerToken(f"a result of the derivative rule is not computed for each of the {region.things}")
        if isinstance(value, Value):
            region.want(value, cut)
            return value, cut
        return value

    def bound(self, positions: int, valid: Any) -> Callable[..., list[Any]]:
        """The rule for a chunk, as a function of the operands and the (co)tangents."""

        def rule(args: Sequence[Any], directions: Sequence[Any]) -> list[Any]:
            env = dict(zip(self.keys, [*args, *directions], strict=True))
            self.region.run(env, positions, valid)
            return [env[key] if isinstance(key, tuple) else jnp.asarray(key.val, key.aval.dtype) for key in self.outputs]

        return rule


def traced_rule(eqn: JaxprEqn) -> tuple[Any, list[list[bool]]]:
    """The derivative rule of the call `eqn` as a closed jaxpr, and which operands and results of the call have derivatives."""
    is_jvp = _is_jvp(eqn)
    types = [[jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms] for atoms in (eqn.invars, eqn.outvars)]
    smooth = [[_is_smooth(aval) for aval in each] for each in types]
    varied = [place for place, flag in enumerate(smooth[0]) if flag]

    def rule(args: list[Any], directions: list[Any]) -> Any:
        def of_smooth(*values: Any) -> list[Any]:
            return list(itertools.compress(compat.bind(eqn, filled(args, varied, values)), smooth[1]))

        values = [args[place] for place in varied]
        if is_jvp:
            return jax.jvp(of_smooth, values, directions)[1]
        return list(jax.vjp(of_smooth, *values)[1](directions))

    with compat.established_forms():
        directions = list(itertools.compress(types[1 - is_jvp], smooth[1 - is_jvp]))
        return compat.dce(jax.make_jaxpr(rule)(types[0], directions)), smooth


def _with_rule(eqn: JaxprEqn, function: Callable[..., Any], rule: Callable[[], Callable[..., list[Any]]]) -> Callable[..., Any]:
    """`function`, which evaluates the call `eqn` for a chunk, with the derivative rule of the call."""
    if _is_jvp(eqn):
        with_jvp = jax.custom_jvp(lambda *args: function(*args))

        @with_jvp.defjvp
        def jvp(primals: Any, tangents: Any) -> Any:
            smooth = [_is_smooth(jax.typeof(primal)) for primal in primals]
            outputs, made = function(*primals), iter(rule()(primals, list(itertools.compress(tangents, smooth))))
            zero = jax.dtypes.float0
            return outputs, [next(made) if _is_smooth(jax.typeof(out)) else np.zeros(out.shape, zero) for out in outputs]

        return with_jvp
    with_vjp = jax.custom_vjp(lambda *args: function(*args))

    def backward(args: Any, cotangents: Any) -> tuple[Any, ...]:
        made = iter(rule()(args, [each for each in cotangents if each.dtype != jax.dtypes.float0]))
        return tuple(next(made) if _is_smooth(jax.typeof(arg)) else None for arg in args)

    with_vjp.defvjp(lambda *args: (function(*args), args), backward)
    return with_vjp


def _is_jvp(eqn: JaxprEqn) -> bool:
    return compat.kind(eqn).startswith("custom_jvp")


def _is_smooth(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))
