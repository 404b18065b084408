"""Weights and inputs that bring faults to light: what is 0 or 1, short or full, hides them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from remat_jax.errors import ArgumentError
from remat_jax.porting.tensors import as_numpy, as_torch, is_torch


def excite(variables: Any, seed: int = 0, scale: float = 0.2) -> Any:
    """Return `variables` with every array that is all one number made of different ones.

    Biases of 0, norm parameters of 1 and running variances of 1 hide a wrong map, a missing bias, and 1 + weight where
    weight is meant. An array of zeros becomes `scale` times normal numbers, one of another number is multiplied by their
    exponentials, so that it keeps its sign; arrays of several numbers, integers and booleans stay.

    `variables` is a tree of arrays, or a PyTorch state dict; what is the same tensor in it (tied weights) stays the same. The
    numbers depend on the seed and on the place in the tree.

    Raises:
        ArgumentError: `scale` is not positive.

    >>> made = excite({"bias": np.zeros(3), "scale": np.ones(3), "kernel": np.eye(2)})
    >>> bool(np.all(made["scale"] > 0)), float(np.std(made["bias"])) > 0, made["kernel"].tolist()
    (True, True, [[1.0, 0.0], [0.0, 1.0]])
    """
    if not scale > 0:
        raise ArgumentError(f"scale={scale!r}: expected a positive number, such as 0.2; nothing would be excited")
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
    found = (noise if array.flat[0] == 0 else array * np.exp(noise)).astype(array.dtype)
    return as_torch(found) if is_torch(leaf) else found if isinstance(leaf, np.ndarray) else jax.numpy.asarray(found)


def padding_mask(batch: int, length: int, seed: int = 0) -> np.ndarray:
    """Return a mask (B, T) of 1 for tokens and 0 for padding: at the end of one row, at the start of the next, in turn.

    Every row keeps at least half of its tokens, and no two rows need have the same padding.

    Raises:
        ArgumentError: there is no row, or a row is too short to be padded.

    >>> padding_mask(2, 6)[:, [0, -1]].tolist()
    [[1, 0], [0, 1]]
    """
    if batch < 1 or length < 2:
        raise ArgumentError(f"batch={batch!r}, length={length!r}: expected at least one row of at least two tokens")
    mask = np.ones((batch, length), np.int64)
    for row, padded in enumerate(np.random.default_rng(seed).integers(1, length // 2 + 1, batch)):
        mask[row, slice(-padded, None) if row % 2 == 0 else slice(padded)] = 0
    return mask


def far_positions(batch: int, length: int, last: int = 100_000) -> np.ndarray:
    """Return positions (B, T), evenly spread from 0 to `last`: angles of many turns, where a wrong frequency shows.

    A long sequence for rotary positions at the price of a short one.

    Raises:
        ArgumentError: the positions would not all be different.

    >>> far_positions(1, 5, 1000).tolist()
    [[0, 250, 500, 750, 1000]]
    """
    if length < 2 or last < length - 1:
        raise ArgumentError(
            f"length={length!r}, last={last!r}: expected at least two positions, and a last one for which all differ"
        )
    return np.broadcast_to(np.linspace(0, last, length).astype(np.int64), (batch, length)).copy()


def tokens(
    vocab: int, batch: int, length: int, seed: int = 0, *, mask: np.ndarray | None = None, padding: int = 0
) -> np.ndarray:
    """Return tokens (B, T) below `vocab`; where `mask` is 0, and at one place among the words as well, the padding token.

    There a model that knows padding by its token, and one that knows it by its mask, differ.

    Raises:
        ArgumentError: `padding` is no token, or `mask` has another shape.

    >>> tokens(5, 1, 4, mask=np.array([[1, 1, 1, 0]]))[0, -1]
    np.int64(0)
    """
    if not 0 <= padding < vocab or (mask is not None and mask.shape != (batch, length)):
        raise ArgumentError(
            f"padding={padding!r}, mask={mask!r}: expected a token below vocab={vocab} and a mask of shape {(batch, length)}"
        )
    found = np.random.default_rng(seed).integers(0, vocab, (batch, length))
    found[found == padding] = (padding + 1) % vocab
    if mask is not None:
        found[mask == 0] = padding
        visible = np.argwhere(mask == 1)
        found[tuple(visible[len(visible) // 2])] = padding
    return found
