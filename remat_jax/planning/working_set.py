"""A first guess of the device memory that a block's backward pass needs besides its residuals."""

from __future__ import annotations

from remat_jax.cost.cost import materialised
from remat_jax.cost.flat import Array
from remat_jax.planning.program import BlockProgram


def working_bytes(program: BlockProgram) -> int:
    """The peak of live bytes in the backward pass, run in the order of its jaxpr.

    Arrays in memory between two kernels count, including cotangents and gradients. The inputs of the backward pass, residuals
    and parameters, do not count.
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
