"""Tying the gradients of a block to their place in its backward pass.

XLA:GPU puts a block's weight-gradient matmuls off to the end of the block, where one barrier holds them all, so that every
operand of every one of them is alive at once: in a transformer block several arrays as large as the attention weights, more
than offloading its inputs frees. The order in which JAX writes the backward pass down is a good one: each gradient is computed
where its operands are. Here each is tied to the cotangents that travel on, one gradient late: tied at once, it would keep XLA
from fusing the element-wise backward of an activation with the recomputation of its output, which costs an array more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat_jax import compat
from remat_jax.graph.walk import interpret, retrace


def in_program_order(backward: Any, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """The gradients that the closed jaxpr `backward` computes from residuals and cotangents, each tied to its place."""
    flat = retrace(backward, lambda *args: interpret(backward, args, _region_opened))
    return _ordered(flat, [*residuals, *cotangents], len(residuals))


def _region_opened(eqn: Any, inputs: list[Any]) -> list[Any] | None:
    """A checkpoint region opened, but not those inside it: the barrier around the whole pass keeps the recomputation apart."""
    if not compat.is_checkpoint(eqn):
        return None
    body, _ = compat.checkpoint_parts(eqn)
    with compat.eqn_context(eqn):
        return list(compat.jaxpr_function(body)(*inputs))


def _ordered(flat: Any, values: Sequence[Any], num_residuals: int) -> list[Any]:
    jaxpr = flat.jaxpr
    gradients = {atom for atom in jaxpr.outvars if not hasattr(atom, "val")}
    last_use = {atom: index for index, eqn in enumerate(jaxpr.eqns) for atom in eqn.invars if not hasattr(atom, "val")}
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*flat.consts, *values), strict=True))
    # What depends on a cotangent, in the order in which it is made; the rest is recomputation, which XLA may place.
    travelling = list(jaxpr.invars[num_residuals:])
    moving = set(travelling)
    made: list[Any] = []
    waiting: list[Any] = []
    for index, eqn in enumerate(jaxpr.eqns):
        inputs = [atom.val if hasattr(atom, "val") else env[atom] for atom in eqn.invars]
        env.update(zip(eqn.outvars, compat.bind(eqn, inputs), strict=True))
        if not any(atom in moving for atom in eqn.invars if not hasattr(atom, "val")):
            continue
        moving.update(eqn.outvars)
        travelling += eqn.outvars
        finished = [var for var in eqn.outvars if var in gradients and last_use.get(var, -1) <= index]
        made += finished
        # A gradient of rank 0 or 1 (a bias, a scale) is a cheap sum: it goes with the next matrix.
        if any(len(var.aval.shape) > 1 for var in finished):
            travelling = [var for var in travelling if var not in gradients and last_use.get(var, -1) > index]
            if waiting and travelling:
                tied = [*waiting, *travelling]
                env.update(zip(tied, compat.optimization_barrier([env[var] for var in tied]), strict=True))
            waiting, made = made, []
    return [atom.val if hasattr(atom, "val") else env[atom] for atom in jaxpr.outvars]
