"""Matmuls and convolutions of a jaxpr: their primitives, their floating-point operations, their batch dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

MATMULS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "scaled_matmul_wrapper"})


def eqn_flops(eqn: JaxprEqn) -> int:
    """The floating-point operations of an equation: 2 per multiply-add of a matmul or convolution; 0 for other equations."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        return _products(eqn, contracting)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // out_features
    if name == "scaled_matmul_wrapper":
        return _products(eqn, (2,))
    if name.startswith("ragged_dot"):
        return _ragged(eqn)
    return 0


def _products(eqn: JaxprEqn, contracting: Sequence[int]) -> int:
    depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracting)
    return 2 * math.prod(eqn.outvars[0].aval.shape) * depth


def _ragged(eqn: JaxprEqn) -> int:
    """The operations of a grouped matmul. Each row belongs to one group, so the groups together cost as much as one matmul."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = numbers.dot_dimension_numbers
    groups = eqn.invars[2].aval.shape[-1] if set(numbers.lhs_ragged_dimensions) & set(contracting) else 1
    return _products(eqn, contracting) // groups


def has_batch_dims(primitive: str, avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """`Candidate.has_batch_dims` (`policy.rule`) for an output of this primitive. `avals`: the types of its operands."""
    if primitive == "scaled_matmul_wrapper":
        return bool(avals[0].shape[0] != 1)
    if primitive != "dot_general":
        return False
    _, (lhs_batch, rhs_batch) = params["dimension_numbers"]
    return bool(lhs_batch or rhs_batch)
