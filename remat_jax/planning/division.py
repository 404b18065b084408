"""A block's program on one device of a mesh: the device's share of each array and of the work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from remat_jax import compat
from remat_jax.cost.cost import Cost, flat_cost
from remat_jax.cost.flat import Array, FlatEqn
from remat_jax.cost.kernels import Work
from remat_jax.memory.shares import Shares
from remat_jax.planning.program import BlockProgram


def divided(program: BlockProgram, shares: Shares) -> BlockProgram:
    """A copy of `program` with the bytes and the work of one device.

    Residuals take the compiler's shares. An array between residuals is divided like its results or its operands. Parameters
    are whole, because they are gathered where they are read. A constant is divided like its results, although the compiler
    leaves it whole: the compiler writes constants where they are read. An equation is divided like its most divided array. A
    kernel takes the time of its own arrays.
    """
    program = _copied(program)
    if not program.flat.eqns:
        # No backward pass reaches the program: assume the mean share of the other arrays.
        return replace(program, forward=_scaled(program.forward, {}, shares.mean))
    before = flat_cost(program.flat.eqns, program.flat.outputs)
    constants = _constants(program.flat.eqns)
    known = {array: share for array in program.arrays if array not in constants and (share := _said(array, shares)) is not None}
    parameters = set(program.flat.inputs) - set(program.inputs.values())
    known |= dict.fromkeys((array for array in parameters if array not in known), 1.0)
    _divide(program.flat.inputs, program.flat.eqns, known, parameters, shares.mean)
    after = flat_cost(program.flat.eqns, program.flat.outputs)
    # The forward pass is approximately the program of its residuals, so the program's ratios apply to it.
    forward = _scaled(after, _ratios(program.forward, before), _ratio(program.forward.bytes, before.bytes))
    backward = program.backward_program
    given = dict(zip(backward.inputs, program.flat.outputs, strict=False))
    shapes = {array.aval.shape for array in parameters}
    # A parameter's gradient is whole on each device before the devices sum theirs.
    whole = {array for array in backward.outputs if array.aval.shape in shapes}
    seen = {array: of.share for array, of in given.items()} | dict.fromkeys(whole - given.keys(), 1.0)
    _divide(backward.inputs, backward.eqns, seen, {array for array, of in given.items() if of in parameters}, shares.mean)
    return replace(program, forward=forward, backward=_backward(program, _ratios(after, before)))


def _backward(program: BlockProgram, work: Mapping[str, float]) -> Cost:
    """The backward pass on one device: bytes of its kernels' arrays; operations scaled by `work`, the forward ratios by dtype.

    The division of a gradient between two residuals is unknown, and each product of the forward pass has two in the backward
    pass, so the forward ratios are used.
    """
    backward = program.backward_program
    found = flat_cost(backward.eqns, backward.outputs)
    left = _operations(found)
    rest = {dtype: _ratio(work.get(dtype, 1.0) * count, left[dtype]) for dtype, count in _operations(program.backward).items()}
    return _scaled(found, rest, 1.0)


def _copied(program: BlockProgram) -> BlockProgram:
    """A copy of the program with its own arrays, so that their shares can be set."""
    copies: dict[Array, Array] = {}
    flat, backward = (one.copied(copies) for one in (program.flat, program.backward_program))
    return replace(
        program,
        flat=flat,
        backward_program=backward,
        inputs={name: copies[array] for name, array in program.inputs.items()},
        own=frozenset(copies[array] for array in program.own if array in copies),
        _prices={},
        _names={},
        _seconds={},
    )


def _constants(eqns: Iterable[FlatEqn]) -> set[Array]:
    """Arrays computed from literals alone."""
    constants: set[Array] = set()
    for eqn in eqns:
        if all(array.literal or array in constants for array in eqn.inputs):
            constants.update(eqn.outputs)
    return constants


def gathered_bytes(program: BlockProgram) -> int:
    """The bytes of the whole parameters that one block reads."""
    parameters = set(program.flat.inputs) - set(program.inputs.values())
    return sum(math.prod(one.aval.shape) * compat.itemsize(one.aval.dtype) for one in parameters if hasattr(one.aval, "dtype"))


def _said(array: Array, shares: Shares) -> float | None:
    return next((shares.by_name[name] for name in array.names if name in shares.by_name), None)


# These primitives split an array or join parts: the compiler divides the parts like the whole.
_PARTS = frozenset({"concatenate", "dynamic_slice", "pad", "slice", "split"})


def _divide(
    inputs: Iterable[Array], eqns: Iterable[FlatEqn], known: Mapping[Array, float], whole: set[Array], otherwise: float
) -> None:
    """Give every array its share.

    In this order: the known share; the share of a result that has the same size, is a part of it or contains it; the share of
    its largest operand; the share of any array of its shape, for constants that only the backward pass reads; `otherwise`.
    A whole small operand implies nothing about a larger result.
    """
    found, eqns = dict(known), list(eqns)
    _from_results(eqns, found)
    for one in eqns:
        sources = [array for array in one.inputs if array in found and array not in whole and not array.literal]
        for array in one.outputs:
            alike = [source for source in sources if source.size == array.size] or sources
            if array in found or not alike:
                continue
            largest = max(alike, key=lambda source: source.size)
            if found[largest] < 1 or largest.size >= array.size:
                found[array] = found[largest]
    _from_results(eqns, found)
    alike_in_shape = {getattr(array.aval, "shape", None): share for array, share in found.items()}
    for array in (*inputs, *(array for one in eqns for array in one.outputs)):
        array.share = found.get(array, alike_in_shape.get(getattr(array.aval, "shape", None), otherwise))


def _from_results(eqns: Sequence[FlatEqn], found: dict[Array, float]) -> None:
    """Divide arrays like their results, if these have a share."""
    for one in reversed(eqns):
        for array in one.inputs:
            in_parts = one.primitive in _PARTS
            like = next((out for out in one.outputs if out in found and (in_parts or out.size == array.size)), None)
            if array not in found and like is not None:
                found[array] = found[like]


def _ratios(after: Cost, before: Cost) -> dict[str, float]:
    """The share of the operations that is left, by dtype."""
    left, whole = _operations(after), _operations(before)
    return {dtype: _ratio(left[dtype], count) for dtype, count in whole.items()}


def _operations(cost: Cost) -> Counter[str]:
    found: Counter[str] = Counter()
    for kernel, times in cost.kernels:
        found.update({dtype: times * count for dtype, count in kernel.flops.items()})
    return found


def _ratio(after: float, before: float) -> float:
    return after / before if before else 1.0


def _scaled(cost: Cost, work: Mapping[str, float], traffic: float) -> Cost:
    def scaled(kernel: Work) -> Work:
        flops = {dtype: work.get(dtype, traffic) * count for dtype, count in kernel.flops.items()}
        return replace(kernel, flops=flops, bytes=traffic * kernel.bytes)

    return replace(cost, kernels=tuple((scaled(kernel), times) for kernel, times in cost.kernels))
