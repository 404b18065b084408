"""What running a jaxpr costs: floating-point operations and bytes of memory traffic, kernel by kernel.

The rule by which equations become kernels is written down in `docs/how/planner.md`, "The cost model".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax

from remat_jax import compat
from remat_jax.cost.flat import Array, FlatEqn, flatten, live
from remat_jax.cost.kernels import Work, dtype_of, own_kernel


class HasSeconds(Protocol):
    """What turns work into time, such as `remat_jax.hardware.rates.Rates`."""

    def seconds(self, flops: Mapping[str, float], size: float) -> float:
        """The time of `flops` by dtype and `size` bytes of memory traffic."""
        ...


@dataclass(frozen=True)
class Cost:
    """What a program costs.

    Attributes:
      kernels: the work of each kernel, and how often it runs.
      unknown: primitives whose operations are not known, or loops whose rounds are not: their operands are counted, once.
      of: the loop or branch that it is the cost of, if it is one's.
    """

    kernels: tuple[tuple[Work, int], ...] = ()
    unknown: frozenset[str] = frozenset()
    of: FlatEqn | None = field(default=None, repr=False, compare=False)

    @property
    def flops(self) -> float:
        """Floating-point operations, elementwise ones too."""
        return float(sum(times * sum(work.flops.values()) for work, times in self.kernels))

    @property
    def bytes(self) -> float:
        """Bytes read from and written to device memory."""
        return float(sum(times * work.bytes for work, times in self.kernels))

    def seconds(self, rates: HasSeconds) -> float:
        """The time of all kernels one after the other, each as long as the slower of its operations and its bytes."""
        return sum(times * rates.seconds(work.flops, work.bytes) for work, times in self.kernels)

    def times(self, rounds: int) -> Cost:
        """The same, so many times over."""
        return Cost(tuple((work, times * rounds) for work, times in self.kernels), self.unknown)


def cost(fn: Callable[..., Any], *args: Any) -> Cost:
    """What one call of `fn` costs.

    >>> import jax.numpy as jnp
    >>> a, b = jnp.ones((2, 3)), jnp.ones((3, 5))
    >>> both = cost(lambda a, b: jnp.sin(a @ b) + 1, a, b)  # a product, and a chain that reads it and writes its result
    >>> both.flops, both.bytes
    (80.0, 204.0)
    """
    return jaxpr_cost(jax.make_jaxpr(fn)(*args))


def jaxpr_cost(jaxpr: Any) -> Cost:
    """What evaluating the closed `jaxpr` costs, after dead-code elimination."""
    flat = flatten(compat.dce(jaxpr))
    return flat_cost(flat.eqns, flat.outputs)


# The same array seen in another way: the compiler chooses layouts, so that transposing costs nothing by itself.
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "bitcast_convert_type"})
# Moves data and computes nothing.
_MOVES = frozenset(
    {
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "dynamic_slice",
        "gather",
        "iota",
        "pad",
        "rev",
        "slice",
    }
)
# Reads as much of its first operand as it writes.
_PARTS = frozenset({"dynamic_slice", "gather", "slice"})
_SOURCES = frozenset({"random_bits", "random_wrap", "random_unwrap", "random_seed", "random_fold_in", "random_split"})
_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj cos
    cosh digamma div empty eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le
    le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or polygamma population_count pow real
    regularized_incomplete_beta rem round rsqrt select_and_gather_add select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh threefry2x32 top_k xor zeta""".split()
)
_REDUCTIONS = frozenset(
    """argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
    reduce_sum reduce_xor reduce_window reduce_window_max reduce_window_sum""".split()
)
_FUSED = _MOVES | _SOURCES | _ELEMENTWISE | _REDUCTIONS


def is_view(one: FlatEqn) -> bool:
    """Whether an equation only looks at its operand in another way, axes of length 1 put in among them."""
    same_size = one.primitive == "broadcast_in_dim" and one.inputs[0].size == one.outputs[0].size and not one.inputs[0].literal
    return one.primitive in _VIEWS or same_size


def is_pass(one: FlatEqn) -> bool:
    """Whether an equation is no more than a pass over what it reads and writes, or part of one."""
    return one.primitive in _FUSED or is_view(one)


def flat_cost(eqns: Sequence[FlatEqn], outputs: Iterable[Array]) -> Cost:
    """What running `eqns` costs where `outputs` must be in memory afterwards."""
    kernels: list[tuple[Work, int]] = []
    unknown: set[str] = set()
    for found in _kernels(eqns, outputs):
        if isinstance(found, Cost):
            kernels += found.kernels
            unknown |= found.unknown
        else:
            kernels.append((_together(found), 1))
            unknown |= kernels[-1][0].unknown
    return Cost(tuple(kernels), frozenset(unknown))


def shares(eqns: Sequence[FlatEqn], outputs: Iterable[Array], rates: HasSeconds) -> dict[FlatEqn, float]:
    """The seconds of each of `eqns`: of its kernel's time its share of the bytes, or of the operations where these take longer.

    Together they are what all of them take, `flat_cost(eqns, outputs).seconds(rates)`. What an equation reads that another of
    its kernel has read, or hands to another of its kernel alone, costs it nothing.
    """
    result = dict.fromkeys(eqns, 0.0)
    for found in _kernels(eqns, outputs):
        if isinstance(found, Cost):
            assert found.of is not None
            result[found.of] = found.seconds(rates)
            continue
        whole = _together(found)
        seconds = rates.seconds(whole.flops, whole.bytes)
        by_bytes = rates.seconds({}, whole.bytes) >= seconds
        for one, work in found.items():
            part, total = (work.bytes, whole.bytes) if by_bytes else (sum(work.flops.values()), sum(whole.flops.values()))
            result[one] = seconds * part / total if total else 0.0
    return result


Parts = dict[FlatEqn, Work]
"""A kernel by its equations, each with its part of the work."""


def _together(parts: Parts) -> Work:
    flops: Counter[str] = Counter()
    for work in parts.values():
        flops.update(work.flops)
    return Work(
        dict(flops), sum(work.bytes for work in parts.values()), frozenset().union(*(w.unknown for w in parts.values()))
    )


def _kernels(eqns: Sequence[FlatEqn], outputs: Iterable[Array]) -> Iterator[Parts | Cost]:
    outputs = [one for one in outputs if not one.literal]
    eqns = list(live(eqns, outputs))
    fusions, roots = _fusions(eqns)
    for one in eqns:
        if not is_pass(one):
            yield _structured(one) or {one: own_kernel(one)}
    read = _readers(eqns, roots)
    kept = {roots.get(one, one) for one in outputs}
    for members in fusions:
        yield _fused(members, roots, read, kept)


def materialised(eqns: Sequence[FlatEqn], outputs: Iterable[Array]) -> tuple[set[Array], dict[Array, Array]]:
    """The arrays of a flat program that are in memory between its kernels, and for each view the array that it looks at."""
    fusions, roots = _fusions(eqns)
    kept = {roots.get(one, one) for one in outputs}
    fusion_of = {id(one): number for number, members in enumerate(fusions) for one in members}
    read = _readers(eqns, roots)
    found: set[Array] = set()
    for one in eqns:
        own = fusion_of.get(id(one))
        if not is_view(one):
            outside = (array for array in one.outputs if any(fusion_of.get(id(by)) != own for by in read[array]))
            found.update((array for array in one.outputs if array in kept or own is None), outside)
    return found, roots


def _structured(one: FlatEqn) -> Cost | None:
    """The cost of a loop or a branch, on one device; None for anything else."""
    found, share = _whole_structured(one), one.share
    if found is None or share == 1.0:
        return found
    return replace(found, kernels=tuple((work.scaled(share, share), times) for work, times in found.kernels))


def _whole_structured(one: FlatEqn) -> Cost | None:
    if one.primitive == "scan":
        return replace(jaxpr_cost(compat.closed(one.eqn.params["jaxpr"])).times(one.eqn.params["length"]), of=one)
    if one.primitive == "cond":
        branches = [jaxpr_cost(compat.closed(body)) for body in one.eqn.params["branches"]]
        return replace(max(branches, key=lambda cost: (cost.flops, cost.bytes)), of=one)
    if one.primitive == "while":
        body = jaxpr_cost(compat.closed(one.eqn.params["body_jaxpr"]))
        return Cost(body.kernels, body.unknown | {"while"}, one)
    return None


def _fusions(eqns: Sequence[FlatEqn]) -> tuple[list[list[FlatEqn]], dict[Array, Array]]:
    """The chains of equations that become one kernel each, and for each view the array that it looks at.

    Equations are joined where one reads what the other writes and no kernel of its own lies between: each has as its level the
    most of those on a way to it, and only equals are joined, so that no chain waits for something that waits for it.
    """
    roots: dict[Array, Array] = {}
    level: dict[Array, int] = defaultdict(int)
    group: dict[Array, int] = {}
    parent: list[int] = []
    members: dict[int, list[FlatEqn]] = defaultdict(list)

    def top(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    placed: list[tuple[int, FlatEqn]] = []
    for one in eqns:
        inputs = [roots.get(array, array) for array in one.inputs]
        here = max((level[array] for array in inputs), default=0)
        if is_view(one):
            roots[one.outputs[0]] = inputs[0]
            continue
        joined = one.primitive in _FUSED
        if joined:
            index = len(parent)
            parent.append(index)
            for array in inputs:
                if array in group and level[array] == here:
                    parent[top(group[array])] = index
            placed.append((index, one))
        for array in one.outputs:
            level[array] = here if joined else here + 1
            if joined:
                group[array] = index
    for index, one in placed:
        members[top(index)].append(one)
    return list(members.values()), roots


def _readers(eqns: Sequence[FlatEqn], roots: Mapping[Array, Array]) -> dict[Array, list[FlatEqn]]:
    found: dict[Array, list[FlatEqn]] = defaultdict(list)
    for one in eqns:
        if not is_view(one):
            for array in one.inputs:
                found[roots.get(array, array)].append(one)
    return found


def _fused(
    members: Sequence[FlatEqn], roots: Mapping[Array, Array], read: Mapping[Array, list[FlatEqn]], kept: set[Array]
) -> Parts:
    """A chain reads what comes from outside and writes what is read outside, each array once."""
    own = set(members)
    made = {array for one in members for array in one.outputs}
    seen: dict[Array, int] = defaultdict(int)
    parts: Parts = {}
    for one in members:
        size = sum(array.bytes for array in one.outputs if array in kept or any(by not in own for by in read.get(array, ())))
        for place, array in enumerate(one.inputs):
            root = roots.get(array, array)
            if root not in made and not root.literal:
                part = one.outputs[0].bytes if place == 0 and one.primitive in _PARTS else root.bytes
                part = min(part, root.bytes - seen[root])
                seen[root] += part
                size += part
        count = _operations(one)
        parts[one] = Work({_vector_dtype(one): count} if count else {}, size)
    return parts


def _operations(one: FlatEqn) -> int:
    """One for each element written, for each element read by a reduction; none for what only moves data."""
    if one.primitive in _MOVES:
        return 0
    if one.primitive in _REDUCTIONS:
        return round(one.share * one.inputs[0].size)
    return round(one.share * sum(array.size for array in one.outputs))


def _vector_dtype(one: FlatEqn) -> str:
    """Elementwise work runs in float32 units whatever smaller type it is of; float64 has units of its own."""
    return "float64" if any(dtype_of(array) in ("float64", "complex128") for array in one.outputs) else "float32"
