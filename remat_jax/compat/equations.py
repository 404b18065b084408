"""Recognises what an equation does by its parameters, because its primitive changes between releases and flags of JAX.

JAX writes some equations as a call of an object (`jax.experimental.hijax`): the only parameter of the equation is the object,
which has parameters of its own. With the flags `jax_remat3`, `jax_custom_jvp3` and `jax_custom_vjp3`, checkpoint regions, names
and functions with a custom derivative are such objects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import core as jex
from jax.extend.core import JaxprEqn


def is_jaxpr(value: Any) -> bool:
    """Whether an equation's parameter is a jaxpr, open or closed."""
    return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)


def _called_object(eqn: JaxprEqn) -> Any | None:
    """The object that `eqn` calls; None for other equations, also for the linear part of a called object's derivative."""
    return eqn.params["_prim"] if set(eqn.params) == {"_prim"} else None


def parameters(eqn: JaxprEqn) -> Mapping[str, Any]:
    """The parameters of `eqn`, or of the object that it calls; a traced function among them is replaced by its jaxpr."""
    called = _called_object(eqn)
    if called is None:
        return eqn.params
    return {key: value.jaxpr if _is_traced_function(value) else value for key, value in called.params.items()}


def _is_traced_function(value: Any) -> bool:
    return not is_jaxpr(value) and is_jaxpr(getattr(value, "jaxpr", None))


def fixed_arguments(eqn: JaxprEqn) -> Any:
    """The types of the arguments of the object that `eqn` calls, with the values of its non-differentiable arguments."""
    return getattr(_called_object(eqn), "in_avals", None)


def changed_parameters(eqn: JaxprEqn, changed: Mapping[str, Any]) -> dict[str, Any]:
    """`eqn.params` with some of `parameters(eqn)` changed. A new jaxpr must have the types of the jaxpr that it replaces."""
    called = _called_object(eqn)
    if called is None or not changed:
        return {**eqn.params, **changed}
    other = copy.copy(called)
    other.params = dict(called.params)
    for key, value in changed.items():
        before = called.params[key]
        if _is_traced_function(before):
            # The other slots of a traced function cache what JAX derived from its old jaxpr.
            traced: Any = object.__new__(type(before))
            for slot in type(before).__slots__:
                setattr(traced, slot, getattr(before, slot))
            traced._params, traced._lojax, traced._closure_converted = {**before._params, "jaxpr": value}, None, None
            value = traced
        other.params[key] = value
    other.__dict__.update(other.params)
    return {"_prim": other}


def kind(eqn: JaxprEqn) -> str:
    """What `eqn` does: `checkpoint`, `custom_jvp_call`, `custom_vjp_call`, `jit`, `call` or `name`, whatever its primitive is.

    Otherwise the name of its primitive, or of the class of the object that it calls. `custom_jvp_call` and `custom_vjp_call`
    take the operands of the function; the objects that JAX makes of them for other operands have other kinds.
    """
    called, params = _called_object(eqn), parameters(eqn)
    if _takes_operands(eqn, params):
        for role, has_role in _ROLES.items():
            if has_role(params):
                return role
    if given_name(eqn) is not None:
        return "name"
    return str(eqn.primitive.name) if called is None else type(called).__name__


# Role → whether an equation with these parameters, among them a jaxpr, has the role; the first match wins. The roles have the
# names of JAX's established primitives, which residual names and policies use.
_ROLES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "checkpoint": lambda params: "policy" in params,
    "custom_jvp_call": lambda params: any(map(is_rule, params)),
    "custom_vjp_call": lambda params: "bwd" in params,
    "jit": lambda params: "in_shardings" in params,
    "call": lambda params: "call_jaxpr" in params,
}


def is_rule(key: str) -> bool:
    """Whether the parameter `key` of an equation is the derivative rule of a `jax.custom_jvp` function."""
    return key.startswith("jvp_")


def _takes_operands(eqn: JaxprEqn, params: Mapping[str, Any]) -> bool:
    """Whether a jaxpr among the parameters has one input for each operand of `eqn`."""
    jaxprs = (getattr(value, "jaxpr", value) for value in params.values() if is_jaxpr(value))
    return any(len(jaxpr.invars) == len(eqn.invars) for jaxpr in jaxprs)


def body_of_call(eqn: JaxprEqn) -> Any:
    """The first jaxpr among the parameters of `eqn`, which a call evaluates, as an open jaxpr."""
    value = next(filter(is_jaxpr, parameters(eqn).values()))
    return value.jaxpr if isinstance(value, jex.ClosedJaxpr) else value


def is_checkpoint(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a `jax.checkpoint` region, established or of `jax_remat3`."""
    return kind(eqn) == "checkpoint"


def has_own_derivative(eqn: JaxprEqn) -> bool:
    """Whether JAX differentiates the call `eqn` by a rule of its own, and not by the derivative of the jaxpr inside it."""
    return kind(eqn).startswith(("custom_jvp_call", "custom_vjp_call")) or (
        _called_object(eqn) is not None and not is_checkpoint(eqn) and any(map(is_jaxpr, parameters(eqn).values()))
    )


def given_name(eqn: JaxprEqn) -> str | None:
    """The name that `jax.ad_checkpoint.checkpoint_name` gave to the output of `eqn`, or None."""
    params = parameters(eqn)
    if set(params) != {"name"} or len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return None
    return str(params["name"])


def is_of_remat3(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a checkpoint region or a name of `jax_remat3`."""
    return _called_object(eqn) is not None and (is_checkpoint(eqn) or given_name(eqn) is not None)
