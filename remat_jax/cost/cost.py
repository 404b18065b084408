"""The cost of running a jaxpr, GPU kernel by GPU kernel. `docs/how/cost_model.md` describes which equations form a kernel."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.cost.flat import Array, FlatEqn, flatten, region
from remat_jax.cost.kernels import Work, dtype_of, own_kernel
from remat_jax.hardware.rates import Rates


@dataclass(frozen=True)
class Cost:
    """The work of each kernel of a program, and how often the kernel runs. The body of a `while` loop counts once."""

    kernels: tuple[tuple[Work, int], ...] = ()

    @property
    def flops(self) -> float:
        """Floating-point operations, including elementwise operations."""
        return float(sum(times * sum(work.flops.values()) for work, times in self.kernels))

    @property
    def bytes(self) -> float:
        """Bytes read from and written to device memory."""
        return float(sum(times * work.bytes for work, times in self.kernels))

    def seconds(self, rates: Rates) -> float:
        """The estimated time of all kernels in seconds. A kernel takes its compute or its memory time, whichever is longer."""
        return sum(times * rates.seconds(work.flops, work.bytes) for work, times in self.kernels)

    def times(self, rounds: int) -> Cost:
        """The cost of running the program `rounds` times."""
        return Cost(tuple((work, times * rounds) for work, times in self.kernels))

    def scaled(self, factors: Mapping[str, float], traffic: float) -> Cost:
        """The cost with all bytes multiplied by `traffic`, and the operations of each dtype by `factors[dtype]`.

        The operations of dtypes that are not in `factors` are multiplied by `traffic`.
        """

        def scaled(work: Work) -> Work:
            flops = {dtype: factors.get(dtype, traffic) * count for dtype, count in work.flops.items()}
            return Work(flops, traffic * work.bytes)

        return Cost(tuple((scaled(work), times) for work, times in self.kernels))


def jaxpr_cost(jaxpr: ClosedJaxpr) -> Cost:
    """The cost of evaluating the closed `jaxpr`, after dead-code elimination.

    >>> import jax, jax.numpy as jnp
    >>> a, b = jnp.ones((2, 3)), jnp.ones((3, 5))
    >>> both = jaxpr_cost(jax.make_jaxpr(lambda a, b: jnp.sin(a @ b) + 1)(a, b))  # a matmul, then sin and + in one kernel
    >>> both.flops, both.bytes
    (80.0, 204.0)
    """
    flat = flatten(compat.dce(jaxpr))
    return flat_cost(flat.eqns, flat.outputs)


# Primitives whose result is a view of their operand. The compiler chooses layouts, so a transpose alone costs nothing.
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "bitcast_convert_type"})
# Primitives that move data and compute nothing.
_MOVES = frozenset("broadcast_in_dim concatenate convert_element_type copy dynamic_slice gather iota pad rev slice".split())
# Primitives that read as much of their first operand as they write.
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


def is_view(eqn: FlatEqn) -> bool:
    """Whether the result of an equation is a view of its operand, as with a reshape or new axes of length 1."""
    same_size = eqn.primitive == "broadcast_in_dim" and eqn.inputs[0].size == eqn.outputs[0].size and not eqn.inputs[0].literal
    return eqn.primitive in _VIEWS or same_size


def is_pass(eqn: FlatEqn) -> bool:
    """Whether an equation can be fused into a single pass over its operands and outputs."""
    return eqn.primitive in _FUSED or is_view(eqn)


def flat_cost(eqns: Sequence[FlatEqn], outputs: Iterable[Array]) -> Cost:
    """The cost of running `eqns`, including the writes of `outputs` to memory."""
    kernels: list[tuple[Work, int]] = []
    for kernel in _kernels(eqns, outputs):
        kernels += kernel[1].kernels if isinstance(kernel, tuple) else [(_together(kernel), 1)]
    return Cost(tuple(kernels))


def shares(eqns: Sequence[FlatEqn], outputs: Iterable[Array], rates: Rates) -> dict[FlatEqn, float]:
    """Each equation's part of the time in seconds. The parts add up to `flat_cost(eqns, outputs).seconds(rates)`.

    A memory-bound kernel's time is divided in proportion to its equations' bytes, a compute-bound kernel's in proportion to
    their operations. If several equations of a kernel read an array, the array's bytes count for the first of them.
    An array that stays inside a kernel has no bytes.
    """
    result = dict.fromkeys(eqns, 0.0)
    for kernel in _kernels(eqns, outputs):
        if isinstance(kernel, tuple):
            result[kernel[0]] = kernel[1].seconds(rates)
            continue
        whole = _together(kernel)
        seconds = rates.seconds(whole.flops, whole.bytes)
        by_bytes = rates.seconds({}, whole.bytes) >= seconds
        for eqn, work in kernel.items():
            part, total = (work.bytes, whole.bytes) if by_bytes else (sum(work.flops.values()), sum(whole.flops.values()))
            result[eqn] = seconds * part / total if total else 0.0
    return result


Parts = dict[FlatEqn, Work]
"""A kernel, as a map from each of its equations to the equation's part of the work."""


def _together(parts: Parts) -> Work:
    flops: Counter[str] = Counter()
    for work in parts.values():
        flops.update(work.flops)
    return Work(dict(flops), sum(work.bytes for work in parts.values()))


def _kernels(eqns: Sequence[FlatEqn], outputs: Iterable[Array]) -> Iterator[Parts | tuple[FlatEqn, Cost]]:
    """Yield each kernel as `Parts`, and each `scan`, `while` or `cond` as (equation, cost)."""
    outputs = [array for array in outputs if not array.literal]
    eqns = region(eqns, outputs)
    fusions, roots = _fusions(eqns)
    for eqn in eqns:
        if not is_pass(eqn):
            structured = _structured(eqn)
            yield {eqn: own_kernel(eqn)} if structured is None else (eqn, structured)
    read = _readers(eqns, roots)
    kept = {roots.get(array, array) for array in outputs}
    for members in fusions:
        yield _fused(members, roots, read, kept)


def materialised(eqns: Sequence[FlatEqn], outputs: Iterable[Array]) -> tuple[set[Array], dict[Array, Array]]:
    """The arrays that the kernels of a flat program write to device memory, and a map from each view to the array behind it."""
    fusions, roots = _fusions(eqns)
    kept = {roots.get(array, array) for array in outputs}
    fusion_of = {eqn: number for number, members in enumerate(fusions) for eqn in members}
    read = _readers(eqns, roots)
    in_memory: set[Array] = set()
    for eqn in eqns:
        if not is_view(eqn):
            fusion = fusion_of.get(eqn)
            for array in eqn.outputs:
                if fusion is None or array in kept or any(fusion_of.get(reader) != fusion for reader in read[array]):
                    in_memory.add(array)
    return in_memory, roots


def _structured(eqn: FlatEqn) -> Cost | None:
    """The cost of a `scan`, `while` or `cond` on one device; None for other equations."""
    params, share = eqn.eqn.params, eqn.share
    if eqn.primitive == "scan":
        whole = jaxpr_cost(compat.closed(params["jaxpr"])).times(params["length"])
    elif eqn.primitive == "cond":
        branches = [jaxpr_cost(compat.closed(body)) for body in params["branches"]]
        whole = max(branches, key=lambda branch: (branch.flops, branch.bytes))
    elif eqn.primitive == "while":
        whole = jaxpr_cost(compat.closed(params["body_jaxpr"]))
    else:
        return None
    return whole if share == 1.0 else whole.scaled({}, share)


def _fusions(eqns: Sequence[FlatEqn]) -> tuple[list[list[FlatEqn]], dict[Array, Array]]:
    """The groups of equations that each fuse into one kernel, and a map from each view to the array behind it.

    The level of an equation is the largest number of unfusable equations on a path to it. An equation fuses with the equations
    of its level that compute its operands. So no kernel depends on its own result through another kernel.
    """
    roots: dict[Array, Array] = {}
    level: dict[Array, int] = defaultdict(int)
    fused_by: dict[Array, FlatEqn] = {}
    parent: dict[FlatEqn, FlatEqn] = {}

    def top(eqn: FlatEqn) -> FlatEqn:
        while parent[eqn] is not eqn:
            parent[eqn] = parent[parent[eqn]]
            eqn = parent[eqn]
        return eqn

    for eqn in eqns:
        inputs = [roots.get(array, array) for array in eqn.inputs]
        here = max((level[array] for array in inputs), default=0)
        if is_view(eqn):
            roots[eqn.outputs[0]] = inputs[0]
            continue
        if eqn.primitive in _FUSED:
            parent[eqn] = eqn
            for array in inputs:
                if array in fused_by and level[array] == here:
                    parent[top(fused_by[array])] = eqn
            fused_by.update(dict.fromkeys(eqn.outputs, eqn))
        else:
            here += 1
        level.update(dict.fromkeys(eqn.outputs, here))
    members: dict[FlatEqn, list[FlatEqn]] = defaultdict(list)
    for eqn in parent:
        members[top(eqn)].append(eqn)
    return list(members.values()), roots


def _readers(eqns: Sequence[FlatEqn], roots: Mapping[Array, Array]) -> dict[Array, list[FlatEqn]]:
    readers: dict[Array, list[FlatEqn]] = defaultdict(list)
    for eqn in eqns:
        if not is_view(eqn):
            for array in eqn.inputs:
                readers[roots.get(array, array)].append(eqn)
    return readers


def _fused(
    members: Sequence[FlatEqn], roots: Mapping[Array, Array], read: Mapping[Array, list[FlatEqn]], kept: set[Array]
) -> Parts:
    """The work of a fused kernel. It reads each outside array once, and writes each array that is `kept` or read outside."""
    fused = set(members)
    made = {array for eqn in members for array in eqn.outputs}
    seen: dict[Array, int] = defaultdict(int)
    parts: Parts = {}
    for eqn in members:
        size = sum(array.bytes for array in eqn.outputs if array in kept or any(by not in fused for by in read.get(array, ())))
        for place, array in enumerate(eqn.inputs):
            root = roots.get(array, array)
            if root not in made and not root.literal:
                part = eqn.outputs[0].bytes if place == 0 and eqn.primitive in _PARTS else root.bytes
                part = min(part, root.bytes - seen[root])
                seen[root] += part
                size += part
        count = _operations(eqn)
        parts[eqn] = Work({_vector_dtype(eqn): count} if count else {}, size)
    return parts


def _operations(eqn: FlatEqn) -> int:
    """The number of operations: one per element written; in a reduction one per element read; 0 if data only moves."""
    if eqn.primitive in _MOVES:
        return 0
    if eqn.primitive in _REDUCTIONS:
        return round(eqn.share * eqn.inputs[0].size)
    return round(eqn.share * sum(array.size for array in eqn.outputs))


def _vector_dtype(eqn: FlatEqn) -> str:
    """The dtype at whose rate elementwise work runs: float64 for float64 and complex128 results, else float32."""
    return "float64" if any(dtype_of(array) in ("float64", "complex128") for array in eqn.outputs) else "float32"
