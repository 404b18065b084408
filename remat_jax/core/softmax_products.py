"""Finds the matmuls before a softmax in a traced step: they compute the logits of the output head, and attention scores.

No model needs all logits or all scores at once. The search follows the data: from a matmul, through operations on single
elements and changes of layout, to an exponential, to its sum, and to the division or the logarithm that makes a softmax of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from remat_jax import compat
from remat_jax.core.module_paths import module_path
from remat_jax.core.walk import bodies

# What a value is with respect to a matmul: its result, the exponential of it, the sum of this exponential.
_RESULT, _EXPONENTIAL, _SUM = "result", "exponential", "sum"
_RANDOM = frozenset({"random_bits", "random_gamma", "random_unwrap", "rng_bit_generator", "rng_uniform", "threefry2x32"})
_LOOPS = frozenset({"scan", "while"})
# Primitives by which dropout changes an array.
_MIXING = frozenset({"and", "div", "mul", "select_n"})
_ROUTING = frozenset({"approx_top_k", "sort", "top_k"})
# Primitives after which a value is no longer the same array of logits or scores.
_OTHER_ARRAYS = frozenset({"argmax", "argmin", "conv_general_dilated", "cumsum", "cumlogsumexp", "dot_general"})
# Primitives that keep scores plain for a kernel are linear, or choose between scores and a constant. These do neither.
_BENDING = frozenset({"erf", "integer_pow", "logistic", "sin", "tanh"})
_CUDNN_DTYPES = frozenset({"bfloat16", "float16"})
_CUDNN_FEATURES = 128


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
      classes: the length of the dimension that the softmax sums over.
      needs: what a kernel must do beside scaling and masking the scores, such as `tanh of the scores`; empty if nothing.
      cudnn_refuses: what cuDNN's attention does not take, such as `float32`; empty if it takes everything.
    """

    is_head: bool
    shape: tuple[int, ...]
    path: str
    source: str
    read: int
    classes: int
    needs: str = ""
    cudnn_refuses: str = ""

    @property
    def elements(self) -> int:
        """The number of elements of the result."""
        return math.prod(self.shape)


@dataclass(eq=False)
class TracedProduct:
    """A matmul in a traced program, and what the program does with its result.

    Attributes:
      eqn: the equation, a `dot_general`.
      path: the module path.
      in_loop: whether it is in a loop.
      exponentials: the size and the module path of each exponential of the result.
      summed: the length of the dimension over which an exponential of the result is summed.
      classes: the same, if the sum makes a softmax; 0 if there is no softmax.
      mixed: the matmuls that multiply the softmax by other values, each with the position of these values.
      other_uses: whether the softmax is changed before it is mixed (dropout), selects values (routing), or is returned.
      bent: the primitives other than scaling and masking that the softmax's argument has gone through.
    """

    eqn: JaxprEqn
    path: str
    in_loop: bool
    exponentials: list[tuple[int, str]] = field(default_factory=list)
    summed: int = 0
    classes: int = 0
    mixed: list[tuple[JaxprEqn, int]] = field(default_factory=list)
    other_uses: bool = False
    bent: list[str] = field(default_factory=list)

    @property
    def is_batched(self) -> bool:
        """Whether the matmul has batch dimensions."""
        return bool(self.eqn.params["dimension_numbers"][1][0])

    @property
    def is_head(self) -> bool:
        """Whether the matmul computes the logits of an output head."""
        return bool(self.classes) and not (self.is_batched or self.in_loop or self.mixed or self.other_uses)

    @property
    def is_attention(self) -> bool:
        """Whether the matmul computes attention scores whose softmax is read only to mix values."""
        return bool(self.classes) and self.is_batched and bool(self.mixed) and not self.other_uses

    def summary(self) -> SoftmaxProduct:
        """The matmul as plain data."""
        paths = [each.split("/") for each in (self.path, *(module for _, module in self.exponentials))]
        shared, read = "/".join(os.path.commonprefix(paths)), max(size for size, _ in self.exponentials)
        source, shape = compat.source_line(self.eqn), tuple(self.eqn.outvars[0].aval.shape)
        return SoftmaxProduct(
            self.is_head,
            shape,
            shared,
            source,
            read,
            self.classes,
            self._needs(),
            "" if self.is_head else self._cudnn_refuses(),
        )

    @property
    def _features(self) -> int:
        return math.prod(self.eqn.invars[0].aval.shape[dim] for dim in self.eqn.params["dimension_numbers"][0][0])

    def _needs(self) -> str:
        if self.bent:
            return f"{' and '.join(dict.fromkeys(self.bent))} of the scores"
        for eqn, place in self.mixed:
            contracted, batch = (sides[place] for sides in eqn.params["dimension_numbers"])
            listed = {*contracted, *batch}
            if math.prod(size for dim, size in enumerate(eqn.invars[place].aval.shape) if dim not in listed) != self._features:
                return "values with another number of features than the keys"
        return ""

    def _cudnn_refuses(self) -> str:
        """What JAX's check of a backward pass through cuDNN does not take, with or without a mask."""
        dtypes = sorted({str(atom.aval.dtype) for atom in self.eqn.invars})
        if len(dtypes) > 1 or dtypes[0] not in _CUDNN_DTYPES:
            return " and ".join(dtypes)
        if self._features > _CUDNN_FEATURES or self._features % 8:
            return f"{self._features} features of a head"
        rows = list(self.eqn.outvars[0].aval.shape[len(self.eqn.params["dimension_numbers"][1][0]) :])
        if self.classes in rows:
            rows.remove(self.classes)
        # Query heads that share a key head are a dimension beside the queries.
        return "odd lengths" if self.classes % 2 or max(rows, default=0) % 2 else ""


def softmax_products(jaxpr: ClosedJaxpr) -> tuple[SoftmaxProduct, ...]:
    """Every output head and attention in the closed `jaxpr`, at any depth. Equal `SoftmaxProduct`s count once."""
    return tuple(dict.fromkeys(each.summary() for each in traced_products(jaxpr) if each.is_head or each.is_attention))


def traced_products(jaxpr: ClosedJaxpr) -> list[TracedProduct]:
    """Every matmul in the closed `jaxpr`, at any depth."""
    flow = _Flow()
    for atoms in flow.follow(jaxpr, [_NOTHING] * len(jaxpr.in_avals), (), in_loop=False):
        for _, product in atoms.roles:
            product.other_uses = True
    return flow.products


@dataclass(frozen=True)
class _Value:
    """What is known about a value: its roles with respect to matmuls, and whether it has random numbers and no other data."""

    roles: frozenset[tuple[str, TracedProduct]] = frozenset()
    is_random: bool = False
    is_fixed: bool = False


_NOTHING, _FIXED = _Value(), _Value(is_fixed=True)


class _Flow:
    """Follows the results of matmuls through a jaxpr."""

    def __init__(self) -> None:
        self.products: list[TracedProduct] = []

    def follow(self, jaxpr: ClosedJaxpr, inputs: Sequence[_Value], path: tuple[str, ...], *, in_loop: bool) -> list[_Value]:
        """The outputs of the closed `jaxpr`, called with `inputs` in the module `path`."""
        values = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.jaxpr.eqns:
            operands = [_value(values, atom) for atom in eqn.invars]
            values.update(zip(eqn.outvars, self._outputs(eqn, operands, path, in_loop), strict=True))
        return [_value(values, atom) for atom in jaxpr.jaxpr.outvars]

    def _outputs(self, eqn: JaxprEqn, operands: list[_Value], path: tuple[str, ...], in_loop: bool) -> list[_Value]:
        name, here = eqn.primitive.name, path + compat.scopes(eqn)
        inside = [] if name == "pallas_call" else bodies(eqn)
        if inside:
            return self._call(eqn, inside, operands, here, in_loop)
        module = module_path("/".join([*here, name]))[0]
        if name == "dot_general":
            self._mix(eqn, operands)
            self.products.append(TracedProduct(eqn, module, in_loop))
            return [_Value(frozenset({(_RESULT, self.products[-1])}))]
        is_fixed = all(value.is_fixed for value in operands) and name not in _RANDOM
        is_random = name in _RANDOM or (not is_fixed and all(value.is_random or value.is_fixed for value in operands))
        roles = frozenset(_roles(eqn, name, operands, module))
        kept = [frozenset(role for role in roles if _fits(role, atom)) for atom in eqn.outvars]
        return [_Value(each, is_random, is_fixed) for each in kept]

    def _call(
        self, eqn: JaxprEqn, inside: list[Any], operands: list[_Value], path: tuple[str, ...], in_loop: bool
    ) -> list[_Value]:
        name, outputs = eqn.primitive.name, [_NOTHING] * len(eqn.outvars)
        for body in inside:
            size = len(body.in_avals)
            # The first operand of a `cond` is no argument of its branches.
            is_called = name != "while" and size <= len(operands)
            given = operands[len(operands) - size :] if is_called else [_NOTHING] * size
            results = self.follow(body, given, path, in_loop=in_loop or name in _LOOPS)
            if len(results) == len(outputs):
                outputs = [_joined(pair) for pair in zip(outputs, results, strict=True)]
        return outputs

    def _mix(self, eqn: JaxprEqn, operands: Sequence[_Value]) -> None:
        """Record that a matmul multiplies a softmax by values. A matmul of the backward pass does not count."""
        (contracted, batch), backward = eqn.params["dimension_numbers"], "transpose(" in str(eqn.source_info.name_stack)
        for place, other in ((0, 1), (1, 0)):
            rest = eqn.invars[other].aval.ndim - len(contracted[other]) - len(batch[other])
            for role, product in () if backward or not rest else operands[place].roles:
                if role == _EXPONENTIAL:
                    product.mixed.append((eqn, other))


def _roles(eqn: JaxprEqn, name: str, operands: Sequence[_Value], module: str) -> Iterator[tuple[str, TracedProduct]]:
    """Yield the roles of the results of an equation without a body. Note in each matmul what the equation does with it."""
    meets_random = name in _MIXING and any(value.is_random for value in operands)
    reduces = name.startswith("reduce") and name != "reduce_precision"
    for place, value in enumerate(operands):
        for role, product in value.roles:
            if role == _SUM:
                if name == "log" or (name == "div" and place == 1) or (name == "integer_pow" and eqn.params["y"] < 0):
                    product.classes = product.summed
                elif not reduces:
                    yield role, product
                continue
            product.other_uses |= name in _ROUTING or meets_random
            if role == _RESULT and name in _BENDING:
                product.bent.append(name)
            if name in ("exp", "exp2") and role == _RESULT:
                product.exponentials.append((_size(eqn.outvars[0]), module))
                yield _EXPONENTIAL, product
            elif name == "reduce_sum" and role == _EXPONENTIAL and len(eqn.params["axes"]) < eqn.invars[0].aval.ndim:
                product.summed = math.prod(eqn.invars[0].aval.shape[axis] for axis in eqn.params["axes"])
                yield _SUM, product
            elif name not in _OTHER_ARRAYS and not reduces:
                yield role, product


def _fits(role: tuple[str, TracedProduct], atom: Var) -> bool:
    """Whether an array may be the result of the matmul, or its exponential: it has between half and all of its elements."""
    whole = _size(role[1].eqn.outvars[0])
    return role[0] == _SUM or whole <= 2 * _size(atom) <= 2 * whole


def _value(values: Mapping[Any, _Value], atom: Var | Literal) -> _Value:
    if hasattr(atom, "val"):
        return _FIXED
    value = values.get(atom, _NOTHING)
    # A single number, such as a dropout rate, does not decide whether an array is random.
    return replace(value, is_fixed=True) if _size(atom) == 1 and not value.is_random else value


def _joined(values: Sequence[_Value]) -> _Value:
    return _Value(frozenset(role for value in values for role in value.roles), any(value.is_random for value in values))


def _size(atom: Var | Literal) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
