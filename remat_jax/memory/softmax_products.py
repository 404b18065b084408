"""Finds the matmuls before a softmax in a traced step: they compute the logits of the output head, and attention scores.

No model needs all logits or all scores at once. The matmuls are recognised by an exponential of the same size, not by names.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from remat_jax import compat
from remat_jax.core.walk import bodies
from remat_jax.memory.hlo.live import module_path


@dataclass(frozen=True)
class SoftmaxProduct:
    """A matmul whose result a softmax reads.

    Attributes:
      is_head: whether the matmul computes the logits of an output head (no batch dimensions, outside loops); else it multiplies
        queries and keys.
      shape: the result's shape, on all devices together.
      path: the innermost module around both the matmul and the softmax; empty if unknown.
      source: the user's source line of the matmul.
      read: the number of elements that the softmax reads: all of them, or fewer if the loss leaves out the last token.
    """

    is_head: bool
    shape: tuple[int, ...]
    path: str
    source: str
    read: int

    @property
    def elements(self) -> int:
        """The number of elements of the result."""
        return math.prod(self.shape)


@dataclass
class _Body:
    """The matmuls and exponentials, each with its module path, of one loop's body or of all code outside loops."""

    in_loop: bool
    products: list[tuple[Any, str]] = field(default_factory=list)
    exponentials: list[tuple[Any, str]] = field(default_factory=list)


def softmax_products(jaxpr: Any) -> tuple[SoftmaxProduct, ...]:
    """Every matmul in the closed `jaxpr`, at any depth, whose result a softmax reads. Equal `SoftmaxProduct`s count once."""
    products: dict[SoftmaxProduct, None] = {}
    for body in _bodies(jaxpr):
        read = {_size(atom) for eqn, _ in body.products if _has_batch(eqn) for atom in eqn.invars}
        for eqn, path in body.products:
            result = eqn.outvars[0]
            is_head = not _has_batch(eqn)
            # An output head is outside loops. Scores are an operand of another batched matmul, which multiplies them by values.
            is_candidate = not body.in_loop if is_head else _size(result) in read
            readers = [(atom, module) for atom, module in body.exponentials if is_softmax_of(atom, result, is_head=is_head)]
            if is_candidate and readers:
                paths = [each.split("/") for each in (path, *(module for _, module in readers))]
                shared, most = "/".join(os.path.commonprefix(paths)), max(_size(atom) for atom, _ in readers)
                products[SoftmaxProduct(is_head, tuple(result.aval.shape), shared, compat.source_line(eqn), most)] = None
    return tuple(products)


def _bodies(jaxpr: Any, path: tuple[str, ...] = (), *, in_loop: bool = False) -> list[_Body]:
    """A `_Body` for each loop in `jaxpr`, then one for all equations outside loops."""
    loops: list[_Body] = []
    body = _Body(in_loop)

    def collect(jaxpr: Any, path: tuple[str, ...]) -> None:
        for eqn in jaxpr.jaxpr.eqns:
            name, here = eqn.primitive.name, path + compat.scopes(eqn)
            module = module_path("/".join([*here, name]))[0]
            if name == "dot_general":
                body.products.append((eqn, module))
            elif name == "exp":
                body.exponentials.append((eqn.outvars[0], module))
            for inner in bodies(eqn):
                if name in ("scan", "while"):
                    loops.extend(_bodies(inner, here, in_loop=True))
                else:
                    collect(inner, here)

    collect(jaxpr, path)
    return [*loops, body]


def is_softmax_of(exponential: Any, product: Any, *, is_head: bool) -> bool:
    """Whether an exponential may belong to a softmax of `product`, the result of a matmul. Compares their shapes.

    For attention only the numbers of elements must be equal, because scores may be reshaped before the softmax. For an output
    head the last dimensions must be equal too, or the shapes must be permutations of each other (transposed logits). Otherwise
    a feed-forward matmul with as many elements as the scores would count as a head. If a head's last dimension is equal, the
    exponential may have as few as half the elements, because a loss may leave out the last token.
    """
    shapes = exponential.aval.shape, product.aval.shape
    size, whole = map(math.prod, shapes)
    same_last = bool(all(shapes)) and shapes[0][-1] == shapes[1][-1]
    if not is_head or size == whole:
        return size == whole and (not is_head or same_last or sorted(shapes[0]) == sorted(shapes[1]))
    return bool(same_last and size < whole <= 2 * size)


def _has_batch(eqn: Any) -> bool:
    return bool(eqn.params["dimension_numbers"][1][0])


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)
