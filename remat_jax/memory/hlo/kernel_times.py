"""The times of the kernels of a compiled module, from the bytes and operations of each fusion at the rates of a target."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from remat_jax.hardware.products import Product
from remat_jax.hardware.rates import Rates
from remat_jax.memory.hlo.text import FREE, Computation, HloModule, Instruction, called_target, product_of, traffic, units_of

KNOWN = frozenset(
    """abs add all-gather all-reduce all-to-all and atan2 bitcast-convert broadcast cbrt ceil cholesky clamp clz
    collective-broadcast collective-permute compare complex concatenate convert convolution copy copy-start cosine divide dot
    dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather imag iota is-finite log
    log-plus-one logistic map maximum minimum multiply negate not or pad partition-id popcnt power ragged-all-to-all real
    reduce reduce-precision reduce-scatter reduce-window remainder replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scaled-dot scatter select select-and-scatter
    shift-left shift-right-arithmetic shift-right-logical sign sine slice sort sqrt stochastic-convert subtract tan tanh
    transpose triangular-solve xor""".split()
)
"""Instructions whose time depends on their bytes or a product's operations."""
ATTENTION_SHARE = 0.65
"""The share of a large product's rate that attention kernels reach, with products and exponentials together.

Dao, FlashAttention-2 (2023), Figures 4 to 6, A100, heads of 128: 0.6 to 0.73 of 312 TFLOP/s forward, 0.5 to 0.6 backward, where
a large product reaches 0.87.
"""
_PASSES = ("__cub$", "__gpu$TopK", "Sharding", "AllocateBuffer", "topk")
"""Custom calls that mostly read and write, with little compute."""


class KernelTimes:
    """The time of each kernel of `module`: its launch, and the longer of the times for its operations and its bytes.

    `kernels` has the operations of Pallas kernels by name, which the compiled module does not contain.

    Attributes:
      dtypes: the dtypes of the products.
      unknown: custom calls and instructions with unknown operations, of which only the bytes count.
    """

    def __init__(self, module: HloModule, rates: Rates, kernels: Mapping[str, float] | None = None) -> None:
        self.module, self.rates, self.kernels = module, rates, kernels or {}
        self.unknown: set[str] = set()
        self.dtypes: set[str] = set()
        self._seconds: dict[tuple[str, str], float] = {}

    def seconds(self, computation: Computation, one: Instruction) -> float:
        """The seconds of an instruction that is not a loop, a copy to or from the host, or a collective."""
        if one.opcode in FREE or one.opcode.endswith("-done"):
            return 0.0
        key = computation.name, one.name
        if key not in self._seconds:
            operations = sum(self._operations(computation, one))
            memory = traffic(self.module, computation, one) / self.rates.hbm_bytes_per_s
            self._seconds[key] = self.rates.launch_seconds + max(operations, memory)
        return self._seconds[key]

    def _operations(self, computation: Computation, one: Instruction) -> Iterator[float]:
        """The seconds of each product in a kernel."""
        called = self.module.computations.get(one.attribute("calls") or "")
        if called is not None:
            for inner in called:
                yield from self._operations(called, inner)
            return
        product = product_of(computation, one)
        if product is not None:
            self.dtypes.add(product.dtype)
            yield self.rates.product_seconds(product)
        elif (known := self._written_by_hand(one)) is not None:
            dtype = units_of(one.arrays[0].dtype)
            self.dtypes.add(dtype)
            yield known / self.rates.flops_per_s(dtype) / ATTENTION_SHARE
        elif one.opcode == "custom-call":
            attention = attention_products(computation, one)
            self.dtypes.update(each.dtype for each in attention)
            yield from (self.rates.product_seconds(each) / ATTENTION_SHARE for each in attention)
            if not attention and not called_target(one).startswith(_PASSES):
                self.unknown.add(called_target(one))
        elif one.opcode.removesuffix("-start").removesuffix("-update") not in KNOWN and one.opcode not in FREE:
            self.unknown.add(one.opcode)

    def _written_by_hand(self, one: Instruction) -> float | None:
        """The operations of a Pallas kernel; None for an unknown kernel or another instruction."""
        named = _PALLAS.search(one.rest) if one.opcode == "custom-call" else None
        return self.kernels.get(named[1]) if named else None


_PALLAS = re.compile(r'op_name="[^"]*?([^"/]+)/pallas_call')


def attention_products(computation: Computation, one: Instruction) -> list[Product]:
    """The products of an attention kernel, of cuDNN or Pallas, from its operands; empty for other calls.

    Query, key and value are the first three operands with four axes (three without a batch) and an equal last axis, the head
    width. The forward kernel has two products over all pairs of positions. A backward kernel recomputes the scores, computes
    their gradient, and has one product for each gradient that it returns: a kernel that returns all three has five products.
    A causal mask halves the products if the call is marked causal, as cuDNN's calls are.

    >>> from remat_jax.memory.hlo.text import parse
    >>> module = parse('''ENTRY %main (q: bf16[2,64,4,16]) -> bf16[2,64,4,16] {
    ...   %q = bf16[2,64,4,16] parameter(0)
    ...   ROOT %out = bf16[2,64,4,16] custom-call(%q, %q, %q), custom_call_target="flash"
    ... }''')
    >>> main = module.computations["main"]
    >>> [product.flops for product in attention_products(main, main.root)]  # 2 · 4 · 64 · 64 pairs, 16 wide
    [1048576, 1048576]
    """
    operands = [
        array for index in range(len(one.operands)) if (made := computation.operand(one, index)) for array in made.arrays
    ]
    wide = [array for array in operands if len(array.dims) in (3, 4) and array.dtype in ("bf16", "f16", "f32", "f8e4m3fn")]
    if len(wide) < 3 or len({(len(array.dims), array.dims[-1]) for array in wide[:3]}) > 1:
        return []
    query, key = wide[0], wide[1]
    width = query.dims[-1]
    results = sum(len(array.dims) == len(query.dims) and array.dims[-1] == width for array in one.arrays)
    backward = len(wide) > 3 or "Backward" in called_target(one) or results > 1
    products = 2 + results if backward else 2
    queries, keys = _positions(query.dims), _positions(key.dims)
    heads = math.prod(query.dims[:-1]) // queries
    seen = keys // 2 if "CAUSAL" in one.rest else keys
    return [Product(units_of(query.dtype), heads, queries, width, max(1, seen))] * products


def _positions(dims: tuple[int, ...]) -> int:
    """The size of the positions axis in (…, positions, heads, width) or (…, heads, positions, width): the larger axis."""
    return max(dims[-3:-1])
