"""What the results of a jaxpr depend on: inputs that it does not read, and casts from float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.walk import bodies, equations, variables


def unread_inputs(jaxpr: ClosedJaxpr) -> list[bool]:
    """For each input of a closed jaxpr, whether dead-code elimination finds that no result depends on it.

    >>> import jax
    >>> unread_inputs(jax.make_jaxpr(lambda x, y, z: x + 0 * jax.jit(lambda x, y: y)(z, y))(1.0, 1.0, 1.0))
    [False, False, True]
    """
    read = set(compat.dce(jaxpr, keep_inputs=False).jaxpr.invars)
    return [var not in read for var in jaxpr.jaxpr.invars]


def draws_random_numbers(jaxpr: ClosedJaxpr) -> bool:
    """Whether a result of a closed jaxpr depends on random bits.

    >>> import jax
    >>> draws_random_numbers(jax.make_jaxpr(lambda key: jax.random.normal(key))(jax.random.key(0)))
    True
    """
    return any(eqn.primitive.name in _RANDOM for eqn in equations(compat.dce(jaxpr, keep_inputs=False)))


_RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})


def has_narrow_tables(jaxpr: ClosedJaxpr, wide: Callable[[], Any]) -> bool:
    """Whether a result of a closed jaxpr in float64 depends on an array that was rounded to a narrower dtype when it was made.

    Such an array is computed inside in a narrower dtype, or it is a constant, such as a rotary table. `wide()` is the jaxpr of
    the same function in `keep_jax_float64`, whose constants are not rounded; it is traced only if there are constants.
    """
    computed = (eqn for eqn in equations(compat.dce(jaxpr, keep_inputs=False)) if eqn.primitive.name in _ARITHMETIC)
    if any(_is_narrow(var.aval) and var.aval.shape for eqn in computed for var in eqn.outvars):
        return True
    if not (rounded := _constants(jaxpr)):
        return False
    tables = rounded, _constants(wide())
    if [x.shape for x in tables[0]] != [x.shape for x in tables[1]]:
        return False
    return any(not np.array_equal(x, other, equal_nan=True) for x, other in zip(*tables, strict=True))


_ARITHMETIC = frozenset("mul div exp exp2 log log1p sin cos pow integer_pow sqrt rsqrt tanh dot_general cumsum".split())


def _constants(jaxpr: ClosedJaxpr) -> list[np.ndarray]:
    """The floating-point constants that are no scalars, in float64."""
    needed = compat.dce(jaxpr, keep_inputs=False)
    atoms = [atom.val for eqn in equations(needed) for atom in eqn.invars if hasattr(atom, "val")]
    return [np.asarray(x, np.float64) for x in (*needed.consts, *atoms) if _is_floating(x) and np.shape(x)]


def _is_narrow(array: Any) -> bool:
    return _is_floating(array) and array.dtype != jnp.float64


def down_casts(jaxpr: ClosedJaxpr) -> list[str]:
    """A text for each cast from float64 on which a floating-point result depends: the dtypes and the name stack.

    A cast whose value then becomes an integer or a boolean, such as a position's bucket, is not listed: a wrong bucket shows in
    the compared results.

    >>> import jax
    >>> def bucket(x):
    ...     return x[jax.numpy.log2(x.astype("float32")).astype(int)]
    >>> with jax.enable_x64(True):
    ...     down_casts(jax.make_jaxpr(jax.jit(lambda x: x.astype("float32").sum()))(jnp.ones(2, "float64")))
    ...     down_casts(jax.make_jaxpr(bucket)(jnp.ones(2, "float64")))
    ['float64 to float32']
    []
    """
    casts: dict[str, None] = {}
    _needed(jaxpr, [True] * len(jaxpr.jaxpr.outvars), casts)
    return list(casts)


def _needed(jaxpr: ClosedJaxpr, results: Sequence[bool], casts: dict[str, None]) -> list[bool]:
    """For each argument, whether outputs marked in `results` depend on it through floating-point arrays.

    The casts from float64 on these paths are added to `casts`.
    """
    needed = {var for var, yes in zip(jaxpr.jaxpr.outvars, results, strict=True) if yes and _is_floating(var.aval)}
    for eqn in reversed(jaxpr.jaxpr.eqns):
        which = [var in needed for var in eqn.outvars]
        if not any(which):
            continue
        if eqn.primitive.name == "convert_element_type":
            before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            if before == jnp.float64 and after != before:
                where = _place(str(eqn.source_info.name_stack))
                casts[f"float64 to {after}" + (f" in {where}" if where else "")] = None
        needed |= {var for var in variables(_inputs(eqn, which, casts)) if _is_floating(var.aval)}
    return [var in needed for var in jaxpr.jaxpr.invars]


def _inputs(eqn: JaxprEqn, which: list[bool], casts: dict[str, None]) -> list[Any]:
    """The inputs on which the outputs of an equation marked in `which` depend; all inputs if the equation has no body."""
    inside = bodies(eqn)
    if not inside:
        return list(eqn.invars)
    if eqn.primitive.name in ("scan", "while"):  # in the next iteration, a carry may depend on every other carry
        which = [True] * len(which)
    inputs = set[int]()
    for body in inside:
        same = len(body.jaxpr.outvars) == len(which)
        used = _needed(body, which if same else [True] * len(body.jaxpr.outvars), casts)
        skipped = len(eqn.invars) - len(used)  # the branches of a cond do not take its index
        fits = same and skipped >= 0
        inputs |= {place + skipped for place, yes in enumerate(used) if yes} if fits else {*range(len(eqn.invars))}
    return [eqn.invars[place] for place in inputs]


def _place(names: str) -> str:
    """A name stack without transformations, so that an operation has the same name in both passes."""
    while (plain := re.sub(r"\b(?:jvp|transpose|vmap)\(([^()]*)\)", r"\1", names)) != names:
        names = plain
    return names


def _is_floating(aval: Any) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.floating))
