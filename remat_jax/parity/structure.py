"""What a Flax model of a case is made of: its variables, unallocated for Linen, and its inputs in a dtype."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from remat_jax.parity.case import Arrays, Case, running


def structure(case: Case, dtype: str) -> tuple[Any, Any]:
    """What makes a model of its variables, and those: a Linen module and shapes, or an NNX module's two parts."""
    module = case.flax(dtype)
    if isinstance(module, nnx.Module):
        return nnx.split(module)
    if case.variables is not None:
        return module, case.variables
    init = nn.init(case.flax_call, module)
    args, kwargs = case.inputs.arguments({n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays_in(case, dtype).items()})
    arrays, treedef, where = _arrays_only((args, kwargs))

    def empty(*given: Any) -> Any:
        args, kwargs = _filled(treedef, where, given)
        return init(jax.random.key(0), *args, **kwargs)

    with running("flax_module"):
        return module, jax.eval_shape(empty, *arrays)


def arrays_in(case: Case, dtype: str) -> Arrays:
    """The inputs, floating-point ones in a dtype, the others as JAX has them now."""
    floating = case.inputs.floating
    canonical = jax.dtypes.canonicalize_dtype
    arrays = case.inputs.arrays
    return {n: x.astype(dtype) if n in floating else x.astype(canonical(x.dtype)) for n, x in arrays.items()}


def _arrays_only(tree: Any) -> tuple[list[Any], Any, list[tuple[bool, Any]]]:
    """The arrays of a tree, and what fills it again: `jax.eval_shape` takes nothing else."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
    is_array = [hasattr(leaf, "shape") for leaf in leaves]
    where = [(yes, None if yes else leaf) for yes, leaf in zip(is_array, leaves, strict=True)]
    return [leaf for yes, leaf in zip(is_array, leaves, strict=True) if yes], treedef, where


def _filled(treedef: Any, where: list[tuple[bool, Any]], arrays: Any) -> Any:
    given = iter(arrays)
    return jax.tree.unflatten(treedef, [next(given) if yes else leaf for yes, leaf in where])
