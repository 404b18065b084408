"""Running a traced program equation by equation: loops and calls taken apart, so that nothing new has to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.core.walk import bodies


def traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, traced as under `jit`, then run equation by equation."""

    def run(*args: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), evaluate(jaxpr, jax.tree.leaves(args)))

    return run


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """The closed `jaxpr` on `args`."""
    env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        run = _RUNS.get(eqn.primitive.name)
        outputs = run(eqn, operands) if run else compat.bind(eqn, operands)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return list(map(read, jaxpr.jaxpr.outvars))


def _in_one_program(eqn: Any, operands: list[Any]) -> list[Any]:
    """A `shard_map` outside `jit` cannot copy to the host."""
    return jax.jit(lambda *operands: compat.bind(eqn, operands))(*operands)


def _called(eqn: Any, operands: list[Any]) -> list[Any]:
    return evaluate(bodies(eqn)[0], operands)


def _cond(eqn: Any, operands: list[Any]) -> list[Any]:
    branches = eqn.params["branches"]
    place = min(max(int(operands[0]), 0), len(branches) - 1)
    return evaluate(compat.closed(branches[place]), operands[1:])


def _while(eqn: Any, operands: list[Any]) -> list[Any]:
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    carry = operands[second:]
    while bool(evaluate(compat.closed(eqn.params["cond_jaxpr"]), [*operands[:first], *carry])[0]):
        carry = evaluate(compat.closed(eqn.params["body_jaxpr"]), [*operands[first:second], *carry])
    return carry


def _scan(eqn: Any, operands: list[Any]) -> list[Any]:
    consts, carried = compat.scan_layout(eqn)
    carry, stacks = operands[consts : consts + carried], operands[consts + carried :]
    rounds = range(eqn.params["length"])
    results: dict[int, list[Any]] = {}
    for number in reversed(rounds) if eqn.params["reverse"] else rounds:
        outputs = evaluate(
            compat.closed(eqn.params["jaxpr"]), [*operands[:consts], *carry, *(array[number] for array in stacks)]
        )
        carry, results[number] = outputs[:carried], outputs[carried:]
    columns = zip(*(results[number] for number in rounds), strict=True)
    return [*carry, *map(jnp.stack, columns)]


def _empty(eqn: Any, operands: list[Any]) -> list[Any]:
    """What a branch has in place of another one's residuals.

    Run by itself, JAX's `empty2` says of an array on the device that it is on the host. JAX then keeps how that is broadcast,
    and in this process takes it for every array on the device.
    """
    return [jax.device_put(jnp.zeros((), eqn.params["dtype"]), eqn.params["memory_space"])]


_RUNS: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"), _called),
    "shard_map": _in_one_program,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "empty2": _empty,
}
