"""The matrix products of a traced step whose whole results a softmax reads: a head's logits, and attention's scores.

No model needs these arrays as a whole: a head can run in chunks of the tokens, and an attention kernel computes the scores tile
by tile. They are recognised in the traced program by a product and an exponential of equal size, not by names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from remat_jax import compat
from remat_jax.core.walk import bodies
from remat_jax.memory.hlo.live import module_path

_LOOPS = ("scan", "while")


@dataclass(frozen=True)
class SoftmaxProduct:
    """A matrix product whose result a softmax reads.

    Attributes:
      is_head: whether it is a head's product, tokens × classes, without batch dimensions and outside loops; otherwise it is a
        product of queries and keys.
      shape: the result's shape, on all devices together.
      path: the innermost module around both the product and the softmax; empty if unknown.
      source: the user's source line.
    """

    is_head: bool
    shape: tuple[int, ...]
    path: str
    source: str

    @property
    def elements(self) -> int:
        """The number of elements of its result."""
        return math.prod(self.shape)


@dataclass
class _Body:
    """The products and exponentials of one traced body, including those of its calls."""

    in_loop: bool
    products: list[tuple[Any, str]] = field(default_factory=list)
    exponentials: dict[int, list[str]] = field(default_factory=dict)


def softmax_products(jaxpr: Any) -> tuple[SoftmaxProduct, ...]:
    """Every such product in the closed `jaxpr`, at any depth; products of equal shape, path and line count once.

    >>> import jax, jax.numpy as jnp
    >>> def head_loss(kernel, hidden):
    ...     return jnp.mean(jax.nn.log_softmax(hidden @ kernel)[..., 0])
    >>> traced = jax.make_jaxpr(head_loss)(jnp.ones((4, 50)), jnp.ones((2, 8, 4)))
    >>> [(one.is_head, one.shape) for one in softmax_products(traced)]
    [(True, (2, 8, 50))]
    """
    products: dict[SoftmaxProduct, None] = {}
    for body in _bodies(jaxpr, (), False):
        read = {_size(atom) for eqn, _ in body.products if _has_batch(eqn) for atom in eqn.invars}
        for eqn, path in body.products:
            size = _size(eqn.outvars[0])
            is_head = not _has_batch(eqn)
            # The product with the values reads the scores; a head's product runs once in the whole step.
            is_candidate = not body.in_loop if is_head else size in read
            if is_candidate and size in body.exponentials:
                shared = _common([path, *body.exponentials[size]])
                products[SoftmaxProduct(is_head, tuple(eqn.outvars[0].aval.shape), shared, compat.source_line(eqn))] = None
    return tuple(products)


def _bodies(jaxpr: Any, path: tuple[str, ...], in_loop: bool) -> Iterator[_Body]:
    collected = _Body(in_loop)
    yield from _collect(jaxpr, path, collected)
    yield collected


def _collect(jaxpr: Any, path: tuple[str, ...], collected: _Body) -> Iterator[_Body]:
    """Add the equations of `jaxpr` to `collected`, and yield the bodies of its loops, which count separately."""
    for eqn in jaxpr.jaxpr.eqns:
        here = path + compat.scopes(eqn)
        module = module_path("/".join([*here, eqn.primitive.name]))[0]
        if eqn.primitive.name == "dot_general":
            collected.products.append((eqn, module))
        elif eqn.primitive.name == "exp":
            collected.exponentials.setdefault(_size(eqn.outvars[0]), []).append(module)
        for body in bodies(eqn):
            if eqn.primitive.name in _LOOPS:
                yield from _bodies(body, here, True)
            else:
                yield from _collect(body, here, collected)


def _has_batch(eqn: Any) -> bool:
    return bool(eqn.params["dimension_numbers"][1][0])


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)


def _common(paths: list[str]) -> str:
    """The module around all of `paths`."""
    parts = [path.split("/") for path in paths]
    return "/".join(os.path.commonprefix(parts))
