"""The times of the kernels of a compiled module, from each kernel's bytes and operations at the rates of a target.

XLA:TPU writes its own estimate of a kernel's cycles into the module. Such a kernel takes its cycles at the target's clock rate.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from remat_jax.hardware.products import Product
from remat_jax.hardware.rates import Rates
from remat_jax.memory.hlo.text import FREE, Computation, HloArray, Instruction

_KNOWN = frozenset(
    """abs add all-gather all-reduce all-to-all and atan2 bitcast-convert broadcast cbrt ceil cholesky clamp clz
    collective-broadcast collective-permute compare complex concatenate convert convolution copy copy-start cosine divide dot
    dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather imag iota is-finite log
    log-plus-one logistic map maximum minimum multiply negate not or pad partition-id popcnt power ragged-all-to-all real
    reduce reduce-precision reduce-scatter reduce-window remainder replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scaled-dot scatter select select-and-scatter
    shift-left shift-right-arithmetic shift-right-logical sign sine slice sort sqrt stochastic-convert subtract tan tanh
    transpose triangular-solve xor""".split()
)
"""Opcodes timed by their bytes or, for matmuls, by their operations. Others (except `custom-call`) count as unknown."""
_ATTENTION_SHARE = 0.65
"""The share of a large matmul's rate that attention kernels, and Pallas kernels, are assumed to reach.

With heads of width 128 on an A100, FlashAttention-2 reaches 0.6 to 0.73 of 312 TFLOP/s in the forward pass, and 0.5 to 0.6 in
the backward pass (Dao, 2023, Figures 4 to 6). A large matmul reaches 0.87.
"""
_PASSES = ("__cub$", "__gpu$TopK", "Sharding", "AllocateBuffer", "topk")
"""Prefixes of `custom_call_target`s that compute little. Such calls are timed by the bytes that they move."""
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallDone", "PrepareAsyncCallStart", "SliceId", "ZeroCrop")
"""`custom_call_target`s of calls that only name memory or a device, or prepare a call on the SparseCore."""
_TRANSFERS = ("send", "recv")
_PALLAS = re.compile(r'op_name="[^"]*?([^"/]+)/pallas_call')
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "tensorfloat32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_PARTS = ("dynamic-slice", "slice", "gather")
"""Opcodes of instructions that read as many bytes of their first operand as they write."""


class KernelTimes:
    """The time of each kernel: its launch time, plus its compute time or its memory time, whichever is longer.

    `kernels` maps the name of a Pallas kernel to the number of floating-point operations of one call, which the compiled module
    does not contain. `dtypes` collects the dtypes of matmuls. `unknown` collects the opcodes and `custom_call_target`s whose
    arithmetic is not known, so that only their bytes count.
    """

    def __init__(self, rates: Rates, kernels: Mapping[str, float] | None = None) -> None:
        self.rates, self.kernels = rates, kernels or {}
        self.unknown: set[str] = set()
        self.dtypes: set[str] = set()
        self._seconds: dict[Instruction, float] = {}

    def seconds(self, instruction: Instruction) -> float:
        """The seconds of an instruction other than a loop, a copy to or from the host, or a collective."""
        if (
            instruction.opcode in FREE
            or instruction.opcode.endswith("-done")
            or (self.rates.clock_hz is not None and _is_free_on_tpu(instruction))
        ):
            return 0.0
        if instruction not in self._seconds and instruction.cycles is not None and self.rates.clock_hz is not None:
            self._seconds[instruction] = instruction.cycles / self.rates.clock_hz
        if instruction not in self._seconds:
            operations = sum(self._operations(instruction))
            memory = _traffic(instruction) / self.rates.hbm_bytes_per_s
            self._seconds[instruction] = self.rates.launch_seconds + max(operations, memory)
        return self._seconds[instruction]

    def _operations(self, instruction: Instruction) -> Iterator[float]:
        if instruction.called is not None:
            for inner in instruction.called:
                yield from self._operations(inner)
            return
        opcode, product = instruction.opcode, _product(instruction)
        pallas = _PALLAS.search(instruction.rest) if opcode == "custom-call" else None
        if product is not None:
            self.dtypes.add(product.dtype)
            yield self.rates.product_seconds(product)
        elif pallas is not None and pallas[1] in self.kernels:
            dtype = _units(instruction.arrays[0].dtype)
            self.dtypes.add(dtype)
            yield self.kernels[pallas[1]] / self.rates.flops_per_s(dtype) / _ATTENTION_SHARE
        elif opcode == "custom-call":
            attention = attention_products(instruction)
            self.dtypes.update(each.dtype for each in attention)
            yield from (self.rates.product_seconds(each) / _ATTENTION_SHARE for each in attention)
            if not attention and not instruction.call_target.startswith(_PASSES):
                self.unknown.add(instruction.call_target)
        elif instruction.kind.removesuffix("-update") not in _KNOWN and opcode not in FREE and not opcode.endswith("-done"):
            self.unknown.add(opcode)


def _is_free_on_tpu(instruction: Instruction) -> bool:
    """Whether an instruction of XLA:TPU only names memory, or only hands an array to a transfer between slices."""
    return instruction.opcode in _TRANSFERS or instruction.call_target in _FREE_CALLS


def _traffic(instruction: Instruction) -> int:
    """The bytes of device memory that an instruction reads and writes. Of a sliced array, only the slice counts."""
    opcode, called = instruction.opcode, instruction.called
    if called is not None and opcode == "async-start":
        # Since JAX 0.12 a fusion that updates a slice runs asynchronously.
        return sum(_traffic(inner) for inner in called if inner.opcode not in FREE)
    if called is not None:
        return _read(called) + _written(called.root)
    if opcode == "dynamic-update-slice":
        return 2 * _device_bytes(instruction.inputs[1:2])
    return _device_bytes([instruction]) + _device_bytes([instruction] if opcode in _PARTS else instruction.inputs)


def _device_bytes(instructions: Iterable[Instruction | None]) -> int:
    return sum(array.bytes for each in instructions if each is not None for array in each.arrays if not array.on_host)


def _read(fusion: Computation) -> int:
    """The bytes that a fusion reads from its parameters: those of the elements on which its result depends.

    A slice needs only a part of its operand. An update in place does not read the array that it updates.
    """
    in_place = _updates_in_place(fusion)
    needed = defaultdict[str, float](float, {fusion.root.name: 1.0})
    read = 0.0
    for instruction in reversed(list(fusion)):
        share = min(1.0, needed[instruction.name])
        if instruction.opcode == "parameter":
            read += share * _device_bytes([instruction])
        for index, operand in enumerate(instruction.inputs):
            if operand is None or (index == 0 and instruction.name in in_place):
                continue
            # A slice reads as many bytes as it returns, and a part of a broadcast's result may depend on the whole operand.
            sized = instruction.opcode == "broadcast" or (index == 0 and instruction.opcode in _PARTS)
            ratio = _device_bytes([instruction]) / max(1, _device_bytes([operand])) if sized else 1.0
            needed[operand.name] += share * ratio
    return round(read)


def _updates_in_place(fusion: Computation) -> set[str]:
    """The names of the `dynamic-update-slice`s that update a parameter of the fusion in place.

    Such an update is a result of the fusion, and its first operand is the parameter. Bitcasts before and after it are skipped.
    """
    results, updates = [fusion.root], set[str]()
    while results:
        result = results.pop()
        if result.opcode in ("tuple", "bitcast"):
            results += filter(None, result.inputs)
        elif result.opcode == "dynamic-update-slice":
            array = result.input(0)
            while array is not None and array.opcode == "bitcast":
                array = array.input(0)
            if array is not None and array.opcode == "parameter":
                updates.add(result.name)
    return updates


def _written(root: Instruction) -> int:
    if root.opcode in ("tuple", "bitcast"):
        return sum(_written(source) for source in root.inputs if source is not None)
    return _device_bytes([root.input(1) if root.name in _updates_in_place(root.home) else root])


# --- matrix products --------------------------------------------------------------------------------------------------


def _product(instruction: Instruction) -> Product | None:
    """The matrix product that a dot, a matmul call or a convolution computes; None for other instructions.

    A convolution counts as the product of two matrices: its filter, and the windows of its input with one row for each output
    position. Float32 runs as tensorfloat32 unless the program requests the highest precision.
    """
    lhs, rhs = instruction.input(0), instruction.input(1)
    if lhs is None or rhs is None or not (lhs.arrays and rhs.arrays and instruction.arrays):
        return None
    out, left, right = instruction.arrays[0], lhs.arrays[0], rhs.arrays[0]
    target = instruction.call_target
    is_dot = instruction.opcode in ("dot", "scaled-dot") or "gemm" in target or "matmul" in target
    if not (is_dot or instruction.opcode == "convolution" or "cudnn$conv" in target):
        return None
    highest = left.dtype == "f32" and re.search(r"operand_precision[^\]}]*highest", instruction.rest, re.IGNORECASE)
    units = "float32" if highest else _units(left.dtype)
    if is_dot:
        summed = math.prod(left.dims[axis] for axis in instruction.dimensions("lhs_contracting_dims"))
        batch = math.prod(left.dims[axis] for axis in instruction.dimensions("lhs_batch_dims"))
        rows = math.prod(left.dims) // max(1, batch * summed)
        columns = math.prod(out.dims) // max(1, batch * rows)
        return Product(units, batch, rows, columns, summed)
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
    if labels is None:
        return None
    kernel, result = right, out
    if "BackwardFilter" in target:
        kernel, result = out, right
    elif "BackwardInput" in target:
        kernel, result = right, left
    channels = kernel.dims[labels[1].index("o")]
    windows = math.prod(result.dims) // max(1, channels)
    return Product(units, 1, windows, channels, math.prod(kernel.dims) // max(1, channels))


def attention_products(instruction: Instruction) -> list[Product]:
    """The matmuls of an attention kernel (cuDNN or Pallas), from its operands; empty for other calls.

    Query, key and value are the first three operands with four axes (three without a batch) and an equal last axis, the head
    width. A forward kernel has two matmuls over all pairs of positions. A backward kernel has one matmul to recompute the
    scores, one for their gradient, and one for each gradient that it returns. A causal call has half as many pairs.

    >>> from remat_jax.memory.hlo.text import parse
    >>> module = parse('''ENTRY %main (q: bf16[2,64,4,16]) -> bf16[2,64,4,16] {
    ...   %q = bf16[2,64,4,16] parameter(0)
    ...   ROOT %out = bf16[2,64,4,16] custom-call(%q, %q, %q), custom_call_target="flash"
    ... }''')
    >>> [product.flops for product in attention_products(module.entry.root)]  # 2 · 4 · 64 · 64 pairs, 16 wide
    [1048576, 1048576]
    """
    arrays = [array for operand in instruction.inputs if operand for array in operand.arrays]
    wide = [array for array in arrays if len(array.dims) in (3, 4) and array.dtype in ("bf16", "f16", "f32", "f8e4m3fn")]
    if len(wide) < 3 or len({(len(array.dims), array.dims[-1]) for array in wide[:3]}) > 1:
        return []
    query, key = wide[0], wide[1]
    width = query.dims[-1]
    results = sum(len(array.dims) == len(query.dims) and array.dims[-1] == width for array in instruction.arrays)
    backward = len(wide) > 3 or "Backward" in instruction.call_target or results > 1
    products = 2 + results if backward else 2
    queries, keys = _positions(query), _positions(key)
    heads = math.prod(query.dims[:-1]) // queries
    seen = keys // 2 if "CAUSAL" in instruction.rest else keys
    return [Product(_units(query.dtype), heads, queries, width, max(1, seen))] * products


def _positions(array: HloArray) -> int:
    """The number of positions: the larger of the two axes before the width, which are positions and heads in either order."""
    return max(array.dims[-3:-1])


def _units(dtype: str) -> str:
    """The dtype in `Rates` whose rate applies to matmuls of an HLO dtype; int8 for integers and unknown dtypes."""
    return _DTYPES.get(dtype, "int8")
