"""A block's program on one device of a mesh: the device's share of each array and of the work.

The shares of residuals come from the compiler: the training step under `everything` is compiled once with its residuals as
results, and their sharded shapes are read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.core.origins import origin
from remat_jax.cost.cost import Cost, flat_cost
from remat_jax.cost.flat import Array, Flat, FlatEqn
from remat_jax.hardware import Target
from remat_jax.memory.compile.compiler import result_shapes
from remat_jax.memory.compile.devices import check_devices
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT
from remat_jax.mesh import pinned, under
from remat_jax.planning.program import BlockProgram
from remat_jax.step import TrainingStep
from remat_jax.train.parameters import parted_like
from remat_jax.workload import Workload


@dataclass(frozen=True)
class Shares:
    """`by_name`: residual name → its share on one device, from 1 / devices to 1. `mean`: the mean share, weighted by bytes."""

    by_name: Mapping[str, float]
    mean: float

    def of(self, name: str) -> float:
        """The share of the residual `name`; the mean share if `name` is unknown."""
        return self.by_name.get(name, self.mean)

    def of_parts(self, parts: int) -> Shares:
        """The shares if each array is one of `parts` equal parts, as in a `shard_map`: `parts` times as large, at most 1.

        >>> Shares({"x": 0.25, "y": 1.0}, 0.4).of_parts(2)
        Shares(by_name={'x': 0.5, 'y': 1.0}, mean=0.8)
        """
        scaled = {name: min(1.0, share * parts) for name, share in self.by_name.items()}
        return Shares(scaled, min(1.0, self.mean * parts)) if parts > 1 else self


def residual_shares(workload: Workload, target: Target, *, timeout: float = DEFAULT_TIMEOUT) -> Shares:
    """The share of each residual on one device of the workload's mesh; compiles one step for `target`.

    Equal parts on all devices are assumed if the compiler refuses this step because it does not fit, as on a TPU, if the shapes
    cannot be read, and for a finished step, whose loss takes arrays of unknown shardings.
    """
    check_devices(workload, target)
    if not workload.has_loss:
        return Shares({}, 1 / target.devices)
    step, function = _step_with_residuals(workload)
    jaxpr = jax.make_jaxpr(function)(*step.arguments).jaxpr
    shapes = result_shapes(export_step("everything, its residuals as results", step, target), target, timeout=timeout)
    if shapes is None:
        return Shares({}, 1 / target.devices)
    shares: dict[str, float] = {}
    local = whole = 0.0
    for atom, shape in zip(jaxpr.outvars, shapes, strict=False):
        size = math.prod(atom.aval.shape)
        if not size or hasattr(atom, "val") or (source := origin(jaxpr, atom)).kind in ("argument", "constant"):
            continue
        share = math.prod(shape) / size
        shares = dict.fromkeys((source.name, *source.aliases), share) | shares
        nbytes = compat.array_bytes(atom.aval.shape, atom.aval.dtype)
        local, whole = local + share * nbytes, whole + nbytes
    return Shares(shares, local / whole if whole else 1.0)


def _step_with_residuals(workload: Workload) -> tuple[TrainingStep, Callable[..., Any]]:
    """A step on the mesh that returns (residuals, gradients), and a function from the same arguments to residuals."""
    loss, trained, frozen = workload.split_loss("everything")
    of_trained, of_frozen = parted_like(workload.params, workload.trainable, workload.shardings[0])

    def pullback(trained: Any, frozen: Any, *batch: Any) -> tuple[Any, Any]:
        value, pullback, *_ = jax.vjp(lambda p: loss(p, frozen, *batch), trained, has_aux=workload.has_aux)
        return value, pullback

    def kept(*arguments: Any) -> list[Any]:
        return list(jax.tree.leaves(pullback(*arguments)[1]))

    def function(*arguments: Any) -> tuple[list[Any], Any]:
        value, back = pullback(*arguments)
        (gradients,) = back(jnp.ones_like(value))
        return jax.tree.leaves(back), pinned(gradients, of_trained)

    places, arguments = (of_trained, of_frozen, *workload.shardings[1:]), (trained, frozen, *workload.batch)
    step = TrainingStep(under(workload.mesh, function), arguments, (), (), workload.mesh, places)
    return step, under(workload.mesh, kept)


def divided(program: BlockProgram, shares: Shares) -> BlockProgram:
    """A copy of `program` with the bytes and the work of one device.

    Residuals have the shares that the compiler gives them. Any other array has the share of an array computed from it or of an
    operand (`_divide`). Parameters have share 1, because they are gathered where they are read. A constant has the share of an
    array computed from it: the compiler leaves constants unsharded, but writes them only where they are read. The work of an
    equation is multiplied by the smallest share of its arrays. The bytes of a kernel count only the device's share of each
    array.
    """
    program = _copied(program)
    flat, backward, parameters = program.flat, program.backward_program, program.parameters
    if not flat.eqns:
        # The block has no backward pass: assume the mean share of all residuals.
        return replace(program, forward=program.forward.scaled({}, shares.mean))
    before = flat_cost(flat.eqns, flat.outputs)
    _divide(flat, _known_shares(program, shares), parameters, shares.mean)
    after = flat_cost(flat.eqns, flat.outputs)
    # The program that computes the residuals approximates the forward pass, so its ratios scale the forward cost.
    forward = after.scaled(_ratios(program.forward, before), _ratio(program.forward.bytes, before.bytes))
    residuals = dict(zip(backward.inputs, flat.outputs, strict=False))
    # Each device computes whole gradients of the parameters, before a collective sums them.
    shapes = {array.aval.shape for array in parameters}
    gradients = {array for array in backward.outputs if array.aval.shape in shapes} - residuals.keys()
    backward_shares = {array: residual.share for array, residual in residuals.items()} | dict.fromkeys(gradients, 1.0)
    _divide(backward, backward_shares, {array for array, residual in residuals.items() if residual in parameters}, shares.mean)
    return replace(program, forward=forward, backward=_backward(program, _ratios(after, before)))


def _known_shares(program: BlockProgram, shares: Shares) -> dict[Array, float]:
    """The compiler's shares of named arrays that are not constants; parameters without a share in `shares` have share 1."""
    constants = set[Array]()
    for eqn in program.flat.eqns:
        if all(array.literal or array in constants for array in eqn.inputs):
            constants.update(eqn.outputs)
    share_of = {}
    for array in program.arrays:
        name = next((name for name in array.names if name in shares.by_name), None)
        if name is not None and array not in constants:
            share_of[array] = shares.by_name[name]
    return share_of | dict.fromkeys(program.parameters - share_of.keys(), 1.0)


def _backward(program: BlockProgram, forward_ratios: Mapping[str, float]) -> Cost:
    """The cost of the backward pass on one device.

    The operations of each dtype are those of the whole backward pass times the dtype's ratio in `forward_ratios`. How the
    compiler partitions the cotangents between two residuals is unknown. So the forward ratios are used: each matmul of the
    forward pass has two matmuls in the backward pass.
    """
    divided_cost = flat_cost(program.backward_program.eqns, program.backward_program.outputs)
    left = _operations(divided_cost)
    whole = _operations(program.backward)
    ratios = {dtype: _ratio(forward_ratios.get(dtype, 1.0) * count, left[dtype]) for dtype, count in whole.items()}
    return divided_cost.scaled(ratios, 1.0)


def _copied(program: BlockProgram) -> BlockProgram:
    """A copy of the program with new `Array` objects, so that their shares can be set."""
    copies: dict[Array, Array] = {}
    flat, backward = (part.copied(copies) for part in (program.flat, program.backward_program))
    inputs = {name: copies[array] for name, array in program.inputs.items()}
    inner_residuals = frozenset(copies[array] for array in program.own if array in copies)
    return replace(program, flat=flat, backward_program=backward, inputs=inputs, own=inner_residuals)


def gathered_bytes(program: BlockProgram) -> int:
    """The bytes of the parameters that one block reads, after they are gathered."""
    return sum(replace(array, share=1.0).bytes for array in program.parameters)


# These primitives split an array or join parts. The compiler partitions the parts like the whole.
_PARTS = frozenset({"concatenate", "dynamic_slice", "pad", "slice", "split"})


def _divide(flat: Flat, known_shares: Mapping[Array, float], whole: Set[Array], otherwise: float) -> None:
    """Set the share of every array, by the first rule that applies.

    1. Its share in `known_shares`.
    2. The share of a result computed from it, if the result has the same size or one of `_PARTS` computes it.
    3. The share of an operand from which it is computed: one of the same size, else the largest. Operands in `whole` do not
       count. The rule does not apply if this operand is unsharded and smaller than the result.
    4. The share of any array of the same shape (used for constants that only the backward pass reads).
    5. `otherwise`.
    """
    share_of = dict(known_shares)
    _from_results(flat.eqns, share_of)
    for eqn in flat.eqns:
        sources = [array for array in eqn.inputs if array in share_of and array not in whole and not array.literal]
        for array in eqn.outputs:
            alike = [source for source in sources if source.size == array.size] or sources
            if array in share_of or not alike:
                continue
            largest = max(alike, key=lambda source: source.size)
            if share_of[largest] < 1 or largest.size >= array.size:
                share_of[array] = share_of[largest]
    _from_results(flat.eqns, share_of)
    alike_in_shape = {getattr(array.aval, "shape", None): share for array, share in share_of.items()}
    for array in (*flat.inputs, *(array for eqn in flat.eqns for array in eqn.outputs)):
        array.share = share_of.get(array, alike_in_shape.get(getattr(array.aval, "shape", None), otherwise))


def _from_results(eqns: Sequence[FlatEqn], share_of: dict[Array, float]) -> None:
    """Apply rule 2 of `_divide`: give arrays without a share the share of a result computed from them."""
    for eqn in reversed(eqns):
        in_parts = eqn.primitive in _PARTS
        for array in eqn.inputs:
            like = next((out for out in eqn.outputs if out in share_of and (in_parts or out.size == array.size)), None)
            if array not in share_of and like is not None:
                share_of[array] = share_of[like]


def _ratios(after: Cost, before: Cost) -> dict[str, float]:
    """A dict from dtype to the operations in `after` divided by the operations in `before`."""
    left = _operations(after)
    return {dtype: _ratio(left[dtype], count) for dtype, count in _operations(before).items()}


def _operations(cost: Cost) -> Counter[str]:
    operations: Counter[str] = Counter()
    for kernel, times in cost.kernels:
        operations.update({dtype: times * count for dtype, count in kernel.flops.items()})
    return operations


def _ratio(after: float, before: float) -> float:
    return after / before if before else 1.0
