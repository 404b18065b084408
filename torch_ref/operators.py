"""What ATen operators are to a policy: their names in JAX, and which of them make an array that can be kept."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

# One ATen operator, one primitive of JAX. Operators that both call alike (exp, tanh, add, mul, …) need no line here.
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
# Its result is a view, though its schema does not say so.
_VIEWS = frozenset({"_unsafe_view"})


@dataclass(frozen=True)
class Operator:
    """An ATen operator as a policy sees it.

    Attributes:
        primitive: its name: JAX's where one operator is one primitive, else ATen's own without the overload.
        makes_array: whether it computes an array from others. Not so: a view, a change in place, a constant, a number.
        is_random: whether it draws from the random state.
        writes: names of the arguments that it changes in place.
        has_batch_dims: whether it is a product with batch dimensions.
    """

    primitive: str
    makes_array: bool
    is_random: bool = False
    writes: tuple[str, ...] = ()
    has_batch_dims: bool = False

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(cls, func: Any) -> Operator:
        """Look an operator up.

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
        makes_array = not is_view and not _is_constant(name, schema) and any(_is_tensor(one) for one in schema.returns)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        return cls(PRIMITIVES.get(name, name), makes_array, is_random, writes, name in _BATCHED)

    def written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """List the tensors among the arguments that a call changes in place."""
        if not self.writes:
            return []
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        found = [given.get(name) for name in self.writes]
        flat = [one for value in found for one in (value if isinstance(value, list | tuple) else (value,))]
        return [value for value in flat if isinstance(value, torch.Tensor)]


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws from the random state: fused attention has the tag, and does not where its dropout is 0.

    >>> q = torch.zeros(1, 1, 2, 2)
    >>> draws(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q), {})
    False
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_tensor(value: Any) -> bool:
    return "Tensor" in str(value.type)


def _is_constant(name: str, schema: Any) -> bool:
    # `zeros_like(x)` reads the shape of x only. Constants cost nothing to make again, and are made to be written on.
    return name.endswith("_like") or name.startswith("new_") or not any(_is_tensor(one) for one in schema.arguments)
