"""Follows one axis of an array through equations, and changes equations so that they compute a part of this axis.

An equation treats the positions of an axis alike if each position of its results reads only this position of its operands, or
the sum over all positions. Then the equation can run on a part of the axis; only the sizes among its parameters change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn


@dataclass(frozen=True)
class AxisPlace:
    """Where an array has the positions of an axis: dimension `dim` of the array has `outer` × positions × `inner` elements.

    Reshapes merge the axis with its neighbours, so `outer` and `inner` may be above 1. `stage` is 1 after a slice of the axis.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    stage: int = 0

    def size(self, positions: int) -> int:
        """The size of the dimension for this number of positions."""
        return self.outer * positions * self.inner

    def at(self, dim: int) -> AxisPlace:
        """The same axis in another dimension."""
        return replace(self, dim=dim)


@dataclass(frozen=True)
class Passage:
    """An axis on its way through an equation: its place in each operand and in each result; None where an array lacks the axis.

    If `is_summed`, the results are sums over the axis.
    """

    operands: tuple[AxisPlace | None, ...]
    results: tuple[AxisPlace | None, ...]
    is_summed: bool = False


def passage(eqn: JaxprEqn, place: int, cut: AxisPlace, positions: int, *, of_result: bool = False) -> Passage | None:
    """How the axis `cut` of operand `place` (of result `place` if `of_result`) passes through `eqn`; None if it does not."""
    if eqn.primitive.name == "reshape":
        shapes = [eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape]
        other = _reshaped(cut, positions, *(shapes[::-1] if of_result else shapes))
        return None if other is None else Passage(*((other,), (cut,)) if of_result else ((cut,), (other,)))
    for axis in _axes(eqn):
        if (axis.results if of_result else axis.operands)[place] == cut.dim:
            found = ([None if dim is None else cut.at(dim) for dim in dims] for dims in (axis.operands, axis.results))
            operands, results = map(tuple, found)
            return Passage(operands, results, axis.is_summed)
    return None


def resized(eqn: JaxprEqn, through: Passage, positions: int) -> dict[str, Any]:
    """The parameters of `eqn` that change if the axis has this number of positions."""
    rule = _SIZES.get(eqn.primitive.name)
    if rule is None:
        return {}
    key, of_operand = rule
    cut = (through.operands if of_operand else through.results)[0]
    sizes = list(eqn.params[key])
    # The slices of a gather have size 1 in dimensions that it indexes.
    if cut is None or (eqn.primitive.name == "gather" and sizes[cut.dim] != eqn.invars[0].aval.shape[cut.dim]):
        return {}
    if eqn.primitive.name == "gather" and cut.dim in eqn.params["dimension_numbers"].operand_batching_dims:
        return {}
    sizes[cut.dim] = cut.size(positions)
    return {key: tuple(sizes)}


# Primitive → the parameter with sizes, and whether these are sizes of the operand's dimensions (else of the result's).
_SIZES: dict[str, tuple[str, bool]] = {
    "broadcast_in_dim": ("shape", False),
    "dynamic_slice": ("slice_sizes", True),
    "gather": ("slice_sizes", True),
    "iota": ("shape", False),
    "reshape": ("new_sizes", False),
    "slice": ("limit_indices", True),
}


def _reshaped(cut: AxisPlace, positions: int, before: Sequence[int], after: Sequence[int]) -> AxisPlace | None:
    """The place of an axis in an array reshaped from `before` to `after`; None if the reshape divides the axis."""
    left, right = math.prod(before[: cut.dim]) * cut.outer, math.prod(before[cut.dim + 1 :]) * cut.inner
    for dim, size in enumerate(after):
        outer, inner = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if 0 in (outer, inner) or left % outer or right % inner:
            continue
        found = replace(cut, dim=dim, outer=left // outer, inner=right // inner)
        if found.size(positions) == size:
            return found
    return None


# --- the axes of each primitive ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    is_summed: bool = False


ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp
    clz complex conj convert_element_type copy copy_p cos cosh device_put digamma div eq eq_to erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul name ne
    neg nextafter not one_minus_square or polygamma population_count pow real reduce_precision regularized_incomplete_beta
    rem reshard round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square stop_gradient sub tan tanh xor zeta""".split()
)
"""The primitives that JAX broadcasts: operands have the shape of the result, except for dimensions of size 1, or rank 0."""


def _axes(eqn: JaxprEqn) -> Iterator[_Axis]:
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        shapes = [atom.aval.shape for atom in eqn.invars]
        for dim, size in enumerate(eqn.outvars[0].aval.shape) if len(eqn.outvars) == 1 else ():
            yield _Axis(tuple(dim if shape and shape[dim] == size else None for shape in shapes), (dim,))
    elif name in _RULES:
        yield from _RULES[name](eqn)


def _each_alone(eqn: JaxprEqn) -> Iterator[_Axis]:
    """The axes of an equation that returns each operand unchanged."""
    count = len(eqn.invars)
    for place, atom in enumerate(eqn.invars):
        for dim in range(atom.aval.ndim):
            only = tuple(dim if other == place else None for other in range(count))
            yield _Axis(only, only)


def _kept(eqn: JaxprEqn, excluded: Sequence[int]) -> Iterator[_Axis]:
    """The axes of an equation whose operands and results have the same dimensions, except those that it combines."""
    for dim in range(eqn.invars[0].aval.ndim):
        if dim not in excluded:
            ranks = [atom.aval.ndim for atom in eqn.invars]
            yield _Axis(tuple(dim if rank else None for rank in ranks), (dim,) * len(eqn.outvars))


def _same_sizes(eqn: JaxprEqn) -> Iterator[_Axis]:
    """The axes of a slice, a padding or an update that takes the whole dimension."""
    whole = eqn.invars[0].aval.shape
    for axis in _same_sizes_kept(eqn):
        (dim,) = axis.results
        padded = "padding_config" in eqn.params and dim is not None and any(eqn.params["padding_config"][dim])
        reversed_or_strided = dim is not None and (eqn.params.get("strides") or (1,) * len(whole))[dim] != 1
        if not padded and not reversed_or_strided:
            yield axis


def _reduce(eqn: JaxprEqn, *, sums: bool = False) -> Iterator[_Axis]:
    axes, place = eqn.params["axes"], 0
    for dim in range(eqn.invars[0].aval.ndim):
        if dim not in axes:
            yield _Axis((dim,), (place,))
            place += 1
        elif sums:
            yield _Axis((dim,), (None,), is_summed=True)


def _broadcast(eqn: JaxprEqn) -> Iterator[_Axis]:
    places, rest = eqn.params["broadcast_dimensions"], (None,) * (len(eqn.invars) - 1)
    for dim, size in enumerate(eqn.params["shape"]):
        source = places.index(dim) if dim in places else None
        if source is not None and eqn.invars[0].aval.shape[source] != size:
            source = None
        yield _Axis((source, *rest), (dim,))


def _iota(eqn: JaxprEqn) -> Iterator[_Axis]:
    for dim in range(len(eqn.params["shape"])):
        if dim != eqn.params["dimension"]:
            yield _Axis((None,) * len(eqn.invars), (dim,))


def _squeeze(eqn: JaxprEqn) -> Iterator[_Axis]:
    rest = [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in eqn.params["dimensions"]]
    for place, dim in enumerate(rest):
        yield _Axis((dim,), (place,))


def _transpose(eqn: JaxprEqn) -> Iterator[_Axis]:
    for place, dim in enumerate(eqn.params["permutation"]):
        yield _Axis((dim,), (place,))


def _concatenate(eqn: JaxprEqn) -> Iterator[_Axis]:
    return _kept(eqn, [eqn.params["dimension"]])


def _stack(eqn: JaxprEqn) -> Iterator[_Axis]:
    """The axes of operands that are put next to each other along a new axis."""
    new, count = eqn.params["axis"], len(eqn.invars)
    for dim in range(eqn.invars[0].aval.ndim):
        yield _Axis((dim,) * count, (dim + (dim >= new),))


def _unstack(eqn: JaxprEqn) -> Iterator[_Axis]:
    for dim in range(eqn.invars[0].aval.ndim):
        if dim != (gone := eqn.params["axis"]):
            yield _Axis((dim,), (dim - (dim > gone),) * len(eqn.outvars))


def _tile(eqn: JaxprEqn) -> Iterator[_Axis]:
    return _kept(eqn, [dim for dim, repetitions in enumerate(eqn.params["reps"]) if repetitions != 1])


def _along_axis(eqn: JaxprEqn) -> Iterator[_Axis]:
    rank = eqn.invars[0].aval.ndim
    return _kept(eqn, [eqn.params.get("dimension", eqn.params.get("axis", rank - 1)) % rank])


def _reverse(eqn: JaxprEqn) -> Iterator[_Axis]:
    return _kept(eqn, eqn.params["dimensions"])


def _dot_general(eqn: JaxprEqn) -> Iterator[_Axis]:
    contracted, batch = eqn.params["dimension_numbers"]
    place = 0
    for left, right in zip(*batch, strict=True):
        yield _Axis((left, right), (place,))
        place += 1
    for side in (0, 1):
        for dim in range(eqn.invars[side].aval.ndim):
            if dim not in (*contracted[side], *batch[side]):
                yield _Axis((dim, None) if side == 0 else (None, dim), (place,))
                place += 1
    for left, right in zip(*contracted, strict=True):
        yield _Axis((left, right), (None,), is_summed=True)


def _gather(eqn: JaxprEqn) -> Iterator[_Axis]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices, result = (atom.aval for atom in (*eqn.invars[:2], eqn.outvars[0]))
    of_indices = [dim for dim in range(result.ndim) if dim not in numbers.offset_dims]
    batched = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for dim in range(indices.ndim - 1):
        yield _Axis((batched.get(dim), dim), (of_indices[dim],))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    for dim, place in zip([dim for dim in range(operand.ndim) if dim not in gone], numbers.offset_dims, strict=True):
        if sizes[dim] == operand.shape[dim]:
            yield _Axis((dim, None), (place,))


def _convolution(eqn: JaxprEqn) -> Iterator[_Axis]:
    numbers = eqn.params["dimension_numbers"]
    if eqn.params["batch_group_count"] == 1:
        yield _Axis((numbers.lhs_spec[0], None), (numbers.out_spec[0],))


def _windows(eqn: JaxprEqn) -> Iterator[_Axis]:
    """The axes over which the windows of a pooling have size 1."""
    params = eqn.params
    for axis in _same_sizes_kept(eqn):
        (dim, *_), rank = axis.operands, eqn.invars[0].aval.ndim
        alone = all(params.get(key, (1,) * rank)[dim] == 1 for key in ("window_dimensions", "window_strides"))
        if alone and not any(params["padding"][dim]):
            yield axis


def _same_sizes_kept(eqn: JaxprEqn) -> Iterator[_Axis]:
    """The axes that have the same size in the first operand and in the result."""
    sizes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return _kept(eqn, [dim for dim, (before, after) in enumerate(zip(*sizes, strict=True)) if before != after])


def _update(eqn: JaxprEqn) -> Iterator[_Axis]:
    """The axes of which an update takes the whole dimension."""
    whole, part = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    for dim, (before, after) in enumerate(zip(whole, part, strict=True)):
        if before == after:
            yield _Axis((dim, dim, *(None,) * (len(eqn.invars) - 2)), (dim,))


_RULES: dict[str, Callable[[Any], Iterator[_Axis]]] = {
    **dict.fromkeys(("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod"), _reduce),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "sort", "split", "top_k"), _along_axis),
    **dict.fromkeys(("dynamic_slice", "pad", "slice"), _same_sizes),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _windows),
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolution,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "dynamic_update_slice": _update,
    "gather": _gather,
    "iota": _iota,
    "optimization_barrier": _each_alone,
    "reduce_sum": lambda eqn: _reduce(eqn, sums=True),
    "reduce_xor": _reduce,
    "rev": _reverse,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": _unstack,
}
