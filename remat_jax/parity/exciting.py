"""Weights that expose faults: weights of 0 or 1 hide them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from remat_jax.errors import ArgumentError
from remat_jax.porting.tensors import as_numpy, as_torch, is_torch


def excite(variables: Any, seed: int = 0, scale: float = 0.2) -> Any:
    """Return `variables` with random numbers in every array that is constant.

    Biases of 0, norm parameters of 1 and running variances of 1 hide a wrong map, a missing bias, and a norm that uses
    1 + weight instead of weight. An array of zeros becomes `scale` times normal numbers. Any other constant is multiplied by
    the exponentials of such numbers, so that it keeps its sign. Arrays that vary, integers and booleans stay the same.

    `variables` is a tree of arrays, or a PyTorch state dict; tied weights in it stay tied. The numbers depend on the seed and
    on the array's position in the tree.

    Raises:
        ArgumentError: `scale` is not positive.

    >>> made = excite({"bias": np.zeros(3), "scale": np.ones(3), "kernel": np.eye(2)})
    >>> bool(np.all(made["scale"] > 0)), float(np.std(made["bias"])) > 0, made["kernel"].tolist()
    (True, True, [[1.0, 0.0], [0.0, 1.0]])
    """
    if not scale > 0:
        raise ArgumentError(f"scale={scale!r}: expected a positive number, such as 0.2; with 0 nothing changes")
    leaves, treedef = jax.tree.flatten(variables, is_leaf=is_torch)
    made: dict[Any, Any] = {}
    for number, leaf in enumerate(leaves):
        if hasattr(leaf, "__array__"):
            key = (leaf.data_ptr(), tuple(leaf.shape)) if is_torch(leaf) and leaf.numel() else id(leaf)
            made.setdefault(key, _excited(leaf, np.random.default_rng((seed, number)), scale))
            leaves[number] = made[key]
    return jax.tree.unflatten(treedef, leaves)


def _excited(leaf: Any, random: np.random.Generator, scale: float) -> Any:
    array = as_numpy(leaf)
    if not jax.numpy.issubdtype(array.dtype, np.floating) or not array.size or np.any(array != array.flat[0]):
        return leaf
    noise = scale * random.normal(size=array.shape)
    made = (noise if array.flat[0] == 0 else array * np.exp(noise)).astype(array.dtype)
    return as_torch(made) if is_torch(leaf) else made if isinstance(leaf, np.ndarray) else jax.numpy.asarray(made)
