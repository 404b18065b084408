"""An identity whose result has its batch axis in front under `vmap`.

JAX batches the function and the derivative rule of a `custom_jvp` separately, and takes the batch axes of both results to be
equal. A checkpoint region puts the batch axis of each result in front, so the function of a block has to do so too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from remat_jax.compat import rules
from remat_jax.compat.jaxprs import new_primitive

# The primitive has the name of JAX's copy, so that readers of a program treat it as a copy.
_in_front_p = new_primitive("copy", lambda value: value, multiple_results=False)


def batch_axis_in_front(value: Any) -> Any:
    """`value`; a `vmap` around this has the batch axis of the result in front."""
    return _in_front_p.bind(value)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _in_front_p.bind(*primals), tangents[0]


def _batch(args: Sequence[Any], axes: Sequence[int]) -> tuple[Any, int]:
    return _in_front_p.bind(jnp.moveaxis(args[0], axes[0], 0)), 0


_in_front_p.def_abstract_eval(lambda aval: aval)
rules.primitive_jvps[_in_front_p] = _jvp
rules.primitive_transposes[_in_front_p] = lambda cotangent, _: [cotangent]
rules.primitive_batchers[_in_front_p] = _batch
