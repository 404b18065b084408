"""A first guess of what a block's backward pass needs on the device besides its residuals."""

from __future__ import annotations

from remat_jax.cost.cost import materialised
from remat_jax.cost.flat import Array
from remat_jax.planning.program import BlockProgram


def working_bytes(program: BlockProgram) -> int:
    """The most that is alive at once in the backward pass, run in the order in which JAX writes it down.

    Counted are the arrays that are in memory between two kernels, cotangents and gradients too; what the backward pass is
    given, residuals and parameters, is not.
    """
    flat = program.backward_program
    cotangents = set(flat.inputs[len(program.flat.outputs) :])
    stored, roots = materialised(flat.eqns, flat.outputs)
    stored |= cotangents
    last: dict[Array, int] = {}
    for place, one in enumerate(flat.eqns):
        last.update((roots.get(array, array), place) for array in one.inputs)
    kept = {roots.get(array, array) for array in flat.outputs}
    alive = sum(array.bytes for array in cotangents)
    most = alive
    for place, one in enumerate(flat.eqns):
        alive += sum(array.bytes for array in one.outputs if array in stored)
        most = max(most, alive)
        read = {roots.get(array, array) for array in one.inputs} & stored
        alive -= sum(array.bytes for array in read - kept if last[array] == place)
    return most
