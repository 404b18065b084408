"""ATen operators as policies see them: their names in JAX, and whether they compute an array that can be saved."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

# ATen operators that equal a single JAX primitive of another name. Operators with JAX's name (exp, tanh, add, …) are left out.
PRIMITIVES = {
    "mm": "dot_general",
    "addmm": "dot_general",
    "bmm": "dot_general",
    "baddbmm": "dot_general",
    "mv": "dot_general",
    "addmv": "dot_general",
    "dot": "dot_general",
    "convolution": "conv_general_dilated",
    "sigmoid": "logistic",
    "maximum": "max",
    "minimum": "min",
    "where": "select_n",
    "sum": "reduce_sum",
    "prod": "reduce_prod",
    "amax": "reduce_max",
    "amin": "reduce_min",
    "cat": "concatenate",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_not": "not",
}
_BATCHED = frozenset({"bmm", "baddbmm"})
# Operators whose result is a view, although their schema does not declare it.
_VIEWS = frozenset({"_unsafe_view"})


@dataclass(frozen=True)
class Operator:
    """An ATen operator as a policy sees it.

    Attributes:
        primitive: JAX's name if the operator equals a single primitive, else ATen's name without the overload.
        makes_array: whether the operator computes a new array from other arrays; False for a view, an in-place change, a
            constant or a number.
        is_random: whether the operator draws from the random state.
        writes: names of the arguments that the operator changes in place.
        has_batch_dims: whether the operator is a matmul with batch dimensions.
    """

    primitive: str
    makes_array: bool
    is_random: bool = False
    writes: tuple[str, ...] = ()
    has_batch_dims: bool = False

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(cls, func: Any) -> Operator:
        """The `Operator` of an ATen function.

        >>> Operator.of(torch.ops.aten.addmm.default).primitive, Operator.of(torch.ops.aten.bmm.default).has_batch_dims
        ('dot_general', True)
        >>> Operator.of(torch.ops.aten.transpose.int).makes_array, Operator.of(torch.ops.aten.relu_.default).writes
        (False, ('self',))
        """
        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order operator, such as a compiled region
            return cls(str(func), makes_array=False)
        name = schema.name.rpartition("::")[2]
        writes = tuple(argument.name for argument in schema.arguments if _writes(argument))
        is_view = name in _VIEWS or any(argument.alias_info is not None for argument in schema.arguments)
        makes_array = not is_view and not _is_constant(name, schema) and any(map(_is_tensor, schema.returns))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        return cls(PRIMITIVES.get(name, name), makes_array, is_random, writes, name in _BATCHED)

    def written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The argument tensors that a call changes in place."""
        if not self.writes:
            return []
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        changed = [arguments.get(name) for name in self.writes]
        flat = [item for value in changed for item in (value if isinstance(value, list | tuple) else (value,))]
        return [value for value in flat if isinstance(value, torch.Tensor)]


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws from the random state. Fused attention without dropout does not, though PyTorch tags it as random.

    >>> q = torch.zeros(1, 1, 2, 2)
    >>> draws(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q), {})
    False
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            dropout = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(dropout != 0)
    return True


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_tensor(value: Any) -> bool:
    return "Tensor" in str(value.type)


def _is_constant(name: str, schema: Any) -> bool:
    # `zeros_like(x)` reads only the shape of x. Constants are free to recompute, and are usually made to be overwritten.
    return name.endswith("_like") or name.startswith("new_") or not any(_is_tensor(argument) for argument in schema.arguments)
