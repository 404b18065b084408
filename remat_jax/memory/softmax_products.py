"""The matrix products of a traced step whose results a softmax reads whole: a head's logits, and the scores of attention.

Both are arrays that no model needs as a whole: a head can run in chunks of the tokens, and an attention kernel makes the scores
tile by tile. They are found by what they are in the traced program, a product and an exponential of equal size, not by names.
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
    """A matrix product, and what it is.

    Attributes:
      is_head: it is a head's product, tokens × classes, without batch dimensions and in no loop; otherwise it is a product of
        queries and keys.
      shape: of its result, on all devices together.
      path: the module that has both the product and the softmax; empty where none is known.
      source: the user's source line.
    """

    is_head: bool
    shape: tuple[int, ...]
    path: str
    source: str

    @property
    def elements(self) -> int:
        """How many numbers its result has."""
        return math.prod(self.shape)


@dataclass
class _Body:
    """The equations of one traced body, those of what it calls among them, by what they compute."""

    in_loop: bool
    products: list[tuple[Any, str]] = field(default_factory=list)
    exponentials: dict[int, list[str]] = field(default_factory=dict)


def softmax_products(jaxpr: Any) -> tuple[SoftmaxProduct, ...]:
    """Every such product in the closed `jaxpr`, at any depth; those of one shape, path and line once.

    >>> import jax, jax.numpy as jnp
    >>> def head_loss(kernel, hidden):
    ...     return jnp.mean(jax.nn.log_softmax(hidden @ kernel)[..., 0])
    >>> traced = jax.make_jaxpr(head_loss)(jnp.ones((4, 50)), jnp.ones((2, 8, 4)))
    >>> [(one.is_head, one.shape) for one in softmax_products(traced)]
    [(True, (2, 8, 50))]
    """
    found: dict[SoftmaxProduct, None] = {}
    for body in _bodies(jaxpr, (), False):
        read = {_size(atom) for eqn, _ in body.products if _has_batch(eqn) for atom in eqn.invars}
        for eqn, path in body.products:
            size = _size(eqn.outvars[0])
            is_head = not _has_batch(eqn)
            # Scores are read by the product with the values; of logits there is one product in the whole step.
            wanted = not body.in_loop if is_head else size in read
            if wanted and size in body.exponentials:
                shared = _common([path, *body.exponentials[size]])
                found[SoftmaxProduct(is_head, tuple(eqn.outvars[0].aval.shape), shared, compat.source_line(eqn))] = None
    return tuple(found)


def _bodies(jaxpr: Any, path: tuple[str, ...], in_loop: bool) -> Iterator[_Body]:
    own = _Body(in_loop)
    yield from _collect(jaxpr, path, own)
    yield own


def _collect(jaxpr: Any, path: tuple[str, ...], own: _Body) -> Iterator[_Body]:
    """Add what stands in `jaxpr` to `own`; the bodies of loops, which are bodies of their own."""
    for eqn in jaxpr.jaxpr.eqns:
        here = path + compat.scopes(eqn)
        module = module_path("/".join([*here, eqn.primitive.name]))[0]
        if eqn.primitive.name == "dot_general":
            own.products.append((eqn, module))
        elif eqn.primitive.name == "exp":
            own.exponentials.setdefault(_size(eqn.outvars[0]), []).append(module)
        for body in bodies(eqn):
            if eqn.primitive.name in _LOOPS:
                yield from _bodies(body, here, True)
            else:
                yield from _collect(body, here, own)


def _has_batch(eqn: Any) -> bool:
    return bool(eqn.params["dimension_numbers"][1][0])


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)


def _common(paths: list[str]) -> str:
    """The module around all of `paths`."""
    parts = [path.split("/") for path in paths]
    return "/".join(os.path.commonprefix(parts))
