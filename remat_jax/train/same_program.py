"""Shows that a loss traced for fewer rows computes its sums as for all rows, operation by operation.

Only the rows may be fewer: the shape of every other array, each parameter and each constant are the same, also inside loops,
branches and calls.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from remat_jax import compat
from remat_jax.core.axes import AxisPlace, Passage, resized
from remat_jax.core.walk import bodies, equations
from remat_jax.train.example_sums import ExampleRegion
from remat_jax.train.head_program import VIEWS, Operation, Program, Value, program_of, viewed
from remat_jax.train.head_region import NotPerToken, TokenRegion, text
from remat_jax.train.head_rules import traced_rule


def twins_of(region: TokenRegion, other: Program, outputs: Sequence[Any], rows: int) -> dict[Any, Any]:
    """For each value of the region's program that of `other`, the same function traced for this number of rows.

    Raises:
      NotPerToken: `outputs` are not computed alike.
    """
    assert isinstance(region, ExampleRegion)
    program, pairs = region.program, _pairs(region.program, other)
    twins = dict(zip(program.inputs, other.inputs, strict=True))
    twins |= dict(zip(program.constants, other.constants, strict=True))
    for one, two in pairs:
        twins |= dict(zip(one.results, two.results, strict=True))
    shown, others = viewed(program), viewed(other)

    def are_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
        return all(_same(shown(one), others(two), twins) for one, two in zip(left, right, strict=True))

    nodes, needed = needed_operations(program, outputs, region.drawn.__contains__)
    computed, through = set(nodes), dict[Operation, list[Passage]]()
    for step in region.steps.values():
        through.setdefault(step.node, []).append(step.through)
    for one, two in pairs:
        if one in computed:
            fits = any(_fits(one, two, each, rows) for each in through.get(one, [_whole(one)]))
            _check_bodies(region, one, two, rows)
            if not fits or not are_same(one.operands, two.operands):
                raise NotPerToken(f"{one} depends on the number of examples")
    for value, constant in program.constants.items():
        if value in needed and not _starts_with(constant, other.constants[twins[value]]):
            raise NotPerToken(f"a constant {text(value)} depends on the number of examples")
    if outputs is program.outputs and not are_same(outputs, other.outputs):
        raise NotPerToken("a result depends on the number of examples")
    return twins


def _pairs(program: Program, other: Program) -> list[tuple[Operation, Operation]]:
    """The operations of two programs other than views: for a single example JAX leaves out broadcasts."""
    plain, others = ([node for node in each.nodes if node.name not in VIEWS] for each in (program, other))
    same = [node.name for node in plain] == [node.name for node in others]
    if not same or len(program.constants) != len(other.constants):
        raise NotPerToken("the loss runs other operations for fewer examples")
    return list(zip(plain, others, strict=True))


def needed_operations(
    program: Program, outputs: Sequence[Any], ends: Callable[[Value], bool]
) -> tuple[list[Operation], set[Value]]:
    """The operations that `outputs` need, in order, and all values that they read; the search does not go beyond `ends`."""
    makers = program.makers()
    nodes, needed, waiting = set[Operation](), set[Value](), list(outputs)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Value) and value not in needed:
            needed.add(value)
            if value in makers and not ends(value):
                node = makers[value][0]
                nodes.add(node)
                waiting += node.operands
    return [node for node in program.nodes if node in nodes], needed


def _check_bodies(region: ExampleRegion, one: Operation, two: Operation, rows: int) -> None:
    """Raise NotPerToken unless the functions inside an operation, and its derivative rule, do the same for fewer rows."""
    inner, others = region.inner.get(one), [*map(program_of, bodies(two.eqn))]
    if inner is None:
        if any(compat.kind(eqn) == "custom_vjp_call" for eqn in (one.eqn, *_inside(one.eqn))) and not region.in_rule:
            raise NotPerToken(f"{one} has a derivative rule for what does not depend on the examples")
        inner = [ExampleRegion(program_of(body), {}, region.lengths[0], in_rule=region.in_rule) for body in bodies(one.eqn)]
    elif len(inner) > len(others):
        varying = [value in inner[-1].cuts for value in inner[-1].program.inputs]
        others.append(program_of(traced_rule(two.eqn)[0], varying=varying))
    for each, other in zip(inner, others, strict=True):
        twins_of(each, other, each.program.outputs, rows)


def _inside(eqn: JaxprEqn) -> list[Any]:
    return [inner for body in bodies(eqn) for inner in equations(body)]


def _whole(node: Operation) -> Passage:
    return Passage((None,) * len(node.operands), (None,) * len(node.results))


def _fits(one: Operation, two: Operation, through: Passage, rows: int) -> bool:
    """Whether `two` is the operation `one` for this number of rows, which pass through it like this."""
    atoms, others = (*one.operands, *one.results), (*two.operands, *two.results)
    cuts = (*through.operands, *through.results)
    shapes = [_shape(atom.aval.shape, cut, rows) for atom, cut in zip(atoms, cuts, strict=True)]
    given, found = compat.parameters(one.eqn), compat.parameters(two.eqn)
    params = {**given, **resized(one.eqn, through, rows)}
    if rows == 1 and one.name in _WITHOUT_ROW and shapes[1] != two.operands[1].aval.shape:
        params["dimension_numbers"] = _WITHOUT_ROW[one.name](params["dimension_numbers"], shapes, cuts)
    if [(*shape, atom.aval.dtype) for shape, atom in zip(shapes, atoms, strict=True)] != [
        (*atom.aval.shape, atom.aval.dtype) for atom in others
    ]:
        return False
    sizes = one.results[0].aval.shape, two.results[0].aval.shape
    for key, value in params.items():
        # Texts are compared, because NaN is not equal to itself.
        if _is_plain(value) and repr(value) != repr(found.get(key)) and (given[key], found.get(key)) != sizes:
            return False
    return True


def _gather_without_row(numbers: Any, shapes: list[tuple[int, ...]], cuts: Sequence[AxisPlace | None]) -> Any:
    """The numbers of a gather for a single row, which `jnp.take_along_axis` has in the slice; `shapes` are changed."""
    of_operand, of_indices, of_result = cuts[0], cuts[1], cuts[-1]
    if of_operand is None or of_indices is None or of_result is None or of_operand.dim not in numbers.operand_batching_dims:
        return numbers
    shapes[1] = _dropped(shapes[1], of_indices.dim)
    return numbers._replace(
        offset_dims=tuple(sorted((*numbers.offset_dims, of_result.dim))),
        operand_batching_dims=tuple(dim for dim in numbers.operand_batching_dims if dim != of_operand.dim),
        start_indices_batching_dims=_moved(numbers.start_indices_batching_dims, of_indices.dim),
    )


def _dot_without_row(numbers: Any, shapes: list[tuple[int, ...]], cuts: Sequence[AxisPlace | None]) -> Any:
    """The numbers of a product for a single row, whose axis `jnp.matmul` leaves out; `shapes` are changed."""
    left, right, result = cuts
    if left is None or right is None or result is None:
        return numbers
    shapes[:] = [_dropped(shape, cut.dim) for shape, cut in zip(shapes, (left, right, result), strict=True)]
    return tuple((_moved(lefts, left.dim), _moved(rights, right.dim)) for lefts, rights in numbers)


def _dropped(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _moved(dims: Sequence[int], gone: int) -> tuple[int, ...]:
    """The same dimensions of an array that has lost one."""
    return tuple(dim - (dim > gone) for dim in dims if dim != gone)


_WITHOUT_ROW: dict[str, Callable[..., Any]] = {"dot_general": _dot_without_row, "gather": _gather_without_row}


def _shape(shape: tuple[int, ...], cut: AxisPlace | None, rows: int) -> tuple[int, ...]:
    return shape if cut is None else (*shape[: cut.dim], cut.size(rows), *shape[cut.dim + 1 :])


def _is_plain(value: Any) -> bool:
    """Whether a parameter is made of numbers and texts."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | enum.Enum | np.dtype)


def _same(one: Any, other: Any, twins: dict[Value, Value]) -> bool:
    if isinstance(one, Value):
        return twins[one] is other
    return not isinstance(other, Value) and bool(np.array_equal(one.val, other.val, equal_nan=True))


def _starts_with(whole: Any, part: Any) -> bool:
    """Whether `part` has the first rows of the constant `whole`."""
    if whole is part or any(map(compat.is_traced, (whole, part))):
        return np.shape(whole) == np.shape(part)
    first = np.asarray(whole)[tuple(map(slice, np.shape(part)))]
    return np.array_equal(first, np.asarray(part))
