"""Weights and inputs that expose faults: weights of 0 or 1, short sequences and full masks hide them."""

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


def padding_mask(batch: int, length: int, seed: int = 0) -> np.ndarray:
    """Return a mask (B, T) of 1 for tokens and 0 for padding; rows are padded at the end and at the start in turn.

    Every row keeps at least half of its tokens; the length of the padding varies between rows.

    Raises:
        ArgumentError: there is no row, or the rows are too short to be padded.

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
    """Return positions (B, T), evenly spaced from 0 to `last`: rotary angles make many turns, which exposes wrong frequencies.

    A short sequence thus tests the rotary positions of a long one.

    Raises:
        ArgumentError: the positions would not all be different.

    >>> far_positions(1, 5, 1000).tolist()
    [[0, 250, 500, 750, 1000]]
    """
    if length < 2 or last < length - 1:
        raise ArgumentError(
            f"length={length!r}, last={last!r}: expected at least two positions, and a last position for which all differ"
        )
    return np.broadcast_to(np.linspace(0, last, length).astype(np.int64), (batch, length)).copy()


def tokens(
    vocab: int, batch: int, length: int, seed: int = 0, *, mask: np.ndarray | None = None, padding: int = 0
) -> np.ndarray:
    """Return tokens (B, T) below `vocab`, with the padding token wherever `mask` is 0 and at a single unmasked position.

    At that position, a model that recognises padding by its token differs from a model that uses the mask.

    Raises:
        ArgumentError: `padding` is no token, or `mask` has another shape.

    >>> tokens(5, 1, 4, mask=np.array([[1, 1, 1, 0]]))[0, -1]
    np.int64(0)
    """
    if not 0 <= padding < vocab or (mask is not None and mask.shape != (batch, length)):
        raise ArgumentError(
            f"padding={padding!r}, mask={mask!r}: expected a token below vocab={vocab} and a mask of shape {(batch, length)}"
        )
    drawn = np.random.default_rng(seed).integers(0, vocab, (batch, length))
    drawn[drawn == padding] = (padding + 1) % vocab
    if mask is not None:
        drawn[mask == 0] = padding
        visible = np.argwhere(mask == 1)
        drawn[tuple(visible[len(visible) // 2])] = padding
    return drawn
