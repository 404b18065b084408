"""The work of operations that do not fuse: matmuls, convolutions, attention, factorisations, Pallas kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from remat_jax.core.matmuls import MATMULS, eqn_flops
from remat_jax.cost.flat import Array, FlatEqn
from remat_jax.cost.pallas import pallas_flops


@dataclass(frozen=True)
class Work:
    """The work of one GPU kernel.

    Attributes:
      flops: a dict from dtype to the number of operations that run at the rate of this dtype.
      bytes: the bytes of device memory that are read and written.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    bytes: float = 0.0


def own_kernel(eqn: FlatEqn) -> Work:
    """The work of an equation that does not fuse, on one device. For an unknown primitive only bytes are counted."""
    special = _SPECIAL.get(eqn.primitive)
    if special is not None:
        work = special(eqn)
    elif eqn.primitive.startswith("dot_product_attention"):
        work = _attention(eqn)
    elif eqn.primitive.startswith("scatter"):
        work = _scatter(eqn)
    else:
        work = Work({}, _touched(eqn))
    # The bytes are already those of one device.
    return replace(work, flops={dtype: eqn.share * count for dtype, count in work.flops.items()})


def dtype_of(array: Array) -> str:
    """The name of an array's dtype; empty if it has none."""
    return str(getattr(array.aval, "dtype", ""))


def _touched(eqn: FlatEqn) -> float:
    """The bytes of all arrays that are read or written, each counted once."""
    arrays = {*(array for array in eqn.inputs if not array.literal), *eqn.outputs}
    return float(sum(array.bytes for array in arrays))


def _units(eqn: FlatEqn) -> str:
    """The dtype at whose rate a matmul runs: that of the narrower operand; tensorfloat32 for float32 at default precision."""
    dtypes = [dtype_of(array) for array in eqn.inputs[:2]]
    dtype = min(dtypes, key=lambda name: eqn.inputs[dtypes.index(name)].aval.dtype.itemsize)
    precision = eqn.eqn.params.get("precision")
    asked = {str(getattr(each, "name", each)) for each in (precision if isinstance(precision, tuple) else (precision,))}
    return "tensorfloat32" if dtype == "float32" and asked <= {"None", "DEFAULT"} else dtype


def _product(eqn: FlatEqn) -> Work:
    return Work({_units(eqn): eqn_flops(eqn.eqn)}, _touched(eqn))


def _attention(eqn: FlatEqn) -> Work:
    """Attention: two matmuls (five in the backward pass), in one kernel, so that the scores are never in device memory.

    For a batch of b, s queries, t keys and h heads of width d, each matmul has 2 · b · s · t · h · d operations.
    """
    query, key = eqn.inputs[0].aval.shape, eqn.inputs[1].aval.shape
    products = 5 if "bwd" in eqn.primitive else 2
    layout = eqn.eqn.params.get("layout", 0)
    sequence = 2 if str(getattr(layout, "name", layout)) in ("BNTH", "1") else 1
    scores = math.prod(query[:-1]) * key[sequence]
    return Work({dtype_of(eqn.inputs[0]): 2.0 * products * scores * query[-1]}, _touched(eqn))


def _scatter(eqn: FlatEqn) -> Work:
    """A scatter works in place: it reads indices and updates, and reads and writes the updated elements."""
    _, indices, updates = eqn.inputs[:3]
    return Work({"float32": float(updates.size)}, indices.bytes + 3.0 * updates.bytes)


def _update(eqn: FlatEqn) -> Work:
    return Work({}, 2.0 * eqn.inputs[1].bytes)


def _factorisation(factor: float) -> Callable[[FlatEqn], Work]:
    """The work of factorising matrices (…, m, n), with `factor` · m · n · min(m, n) operations for each."""

    def work(eqn: FlatEqn) -> Work:
        *batch, rows, columns = eqn.inputs[0].aval.shape
        flops = factor * rows * columns * min(rows, columns)
        return Work({dtype_of(eqn.inputs[0]): math.prod(batch) * flops}, _touched(eqn))

    return work


def _triangular(eqn: FlatEqn) -> Work:
    *_, size, _ = eqn.inputs[0].aval.shape
    return Work({dtype_of(eqn.inputs[1]): float(size * eqn.inputs[1].size)}, _touched(eqn))


def _fft(eqn: FlatEqn) -> Work:
    size = math.prod(eqn.eqn.params["fft_lengths"])
    return Work({"float32": 5.0 * eqn.outputs[0].size * math.log2(max(size, 2))}, _touched(eqn))


def _sort(eqn: FlatEqn) -> Work:
    size = eqn.inputs[0].aval.shape[eqn.eqn.params.get("dimension", -1)]
    return Work({"float32": eqn.inputs[0].size * math.log2(max(size, 2))}, _touched(eqn))


def _pallas(eqn: FlatEqn) -> Work:
    """The kernel's `cost_estimate`; without it, the operations of its matmuls, and the bytes of each array once."""
    estimate = eqn.eqn.params.get("cost_estimate")
    dtype = dtype_of(eqn.inputs[0]) if eqn.inputs else "float32"
    return Work({dtype: pallas_flops(eqn.eqn)}, _touched(eqn) if estimate is None else float(estimate.bytes_accessed))


_SPECIAL: dict[str, Callable[[FlatEqn], Work]] = {
    **dict.fromkeys((*MATMULS, "conv_general_dilated"), _product),
    "pallas_call": _pallas,
    "dynamic_update_slice": _update,
    # The leading terms of Golub and Van Loan, Matrix Computations, 4th edition.
    "cholesky": _factorisation(1 / 3),
    "lu": _factorisation(2 / 3),
    **dict.fromkeys(("qr", "geqrf", "householder_product"), _factorisation(2.0)),
    "eigh": _factorisation(9.0),
    "eig": _factorisation(25.0),
    "svd": _factorisation(22.0),
    "triangular_solve": _triangular,
    "fft": _fft,
    "sort": _sort,
}
