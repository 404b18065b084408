"""Shared parts of the diffusion transformers' ports: patches, rotary positions on a grid, times, attention over long sequences.

Dtypes derive from the inputs, as in `transformer`: float64 stays float64, and precision-critical parts are at least float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .transformer import Dtype, attention, rotations, wide

Grid = tuple[int, int, int]  # frames, rows and columns of tokens
Rotation = tuple[jax.Array, jax.Array]


def pack(x: Any, patch: tuple[int, int]) -> Any:
    """Return images (B, H, W, C) as tokens (B, H/p · W/q, C·p·q), row by row, the channel first within a token.

    Takes arrays of NumPy, JAX and PyTorch alike.

    Raises:
        ValueError: when `patch` does not divide the image.

    >>> pack(np.arange(16).reshape(1, 4, 4, 1), (2, 2))[0, 1].tolist()
    [2, 3, 6, 7]
    """
    if len(x.shape) != 4:
        raise ValueError(f"images have shape {tuple(x.shape)}, expected (batch, height, width, channels)")
    batch, height, width, channels = x.shape
    rows, columns = patch
    check_patches((height, width), patch)
    x = x.reshape(batch, height // rows, rows, width // columns, columns, channels)
    x = x.transpose(0, 1, 3, 5, 2, 4) if not hasattr(x, "permute") else x.permute(0, 1, 3, 5, 2, 4)
    return x.reshape(batch, (height // rows) * (width // columns), channels * rows * columns)


def unpack(x: Any, grid: tuple[int, int], patch: tuple[int, int]) -> Any:
    """Return tokens (B, rows · columns, C·p·q) as images (B, rows·p, columns·q, C): the inverse of `pack`.

    >>> image = np.arange(48.0).reshape(1, 4, 6, 2)
    >>> bool((unpack(pack(image, (2, 2)), (2, 3), (2, 2)) == image).all())
    True
    """
    (rows, columns), (p, q) = grid, patch
    x = x.reshape(x.shape[0], rows, columns, -1, p, q)
    x = x.transpose(0, 1, 4, 2, 5, 3) if not hasattr(x, "permute") else x.permute(0, 1, 4, 2, 5, 3)
    return x.reshape(x.shape[0], rows * p, columns * q, -1)


def check_patches(size: tuple[int, ...], patch: tuple[int, ...]) -> None:
    """Raise `ValueError` unless patches of the size `patch` fill an image or a video of the size `size`."""
    if any(p < 1 or n < p or n % p for n, p in zip(size, patch, strict=True)):
        shown = " x ".join(map(str, size))
        raise ValueError(f"patch={patch} does not divide {shown}: crop or pad to a multiple of it, or choose another patch")


def check_sizes(config: Any, *names: str) -> None:
    """Raise `ValueError` unless these numbers of a configuration are at least 1, and `query_chunk` too if it is given."""
    for name in (*names, *(["query_chunk"] if config.query_chunk is not None else [])):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}: expected at least 1")


def check_conditions(batch: int, text_width: int, text: Any, time: Any) -> None:
    """Raise `ValueError` unless the prompts' embeddings are (batch, tokens, text_width) and the times (batch,).

    Takes arrays of NumPy, JAX and PyTorch alike.
    """
    if text.ndim != 3 or tuple(text.shape[::2]) != (batch, text_width) or 0 in text.shape:
        raise ValueError(f"text has shape {tuple(text.shape)}, expected ({batch}, tokens, {text_width})")
    if tuple(time.shape) != (batch,):
        raise ValueError(f"time has shape {tuple(time.shape)}, expected ({batch},): one number for each of the batch")


def grid_positions(grid: Grid, first: tuple[int, int, int] = (0, 0, 0)) -> jax.Array:
    """Return frame, row and column of each token, (3, frames · rows · columns), counted from `first`.

    >>> grid_positions((1, 2, 3), first=(0, -1, 0)).tolist()
    [[0, 0, 0, 0, 0, 0], [-1, -1, -1, 0, 0, 0], [0, 1, 2, 0, 1, 2]]
    """
    return jnp.stack([jax.lax.broadcasted_iota(jnp.int32, grid, axis).reshape(-1) + first[axis] for axis in range(3)])


def axis_rotations(positions: jax.Array, axes: tuple[int, ...], theta: float, dtype: Dtype) -> Rotation:
    """Return cosine and sine for positions (axes, T), each (1, T, 1, D/2), in `dtype` but at least float32.

    The first `axes[0]` of a head's D dimensions rotate with the first position, the next `axes[1]` with the second, and so on.
    """
    parts = [rotations(each[None], size, theta, wide(dtype)) for each, size in zip(positions, axes, strict=True)]
    cos, sin = (jnp.concatenate(each, axis=-1) for each in zip(*parts, strict=True))
    return cos, sin


def rotate_pairs(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate each pair (x[2i], x[2i + 1]) of (B, T, H, D) by its angle, in the rotation's dtype; the result has `x`'s dtype."""
    cos, sin = rotation
    pairs = x.astype(cos.dtype).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def time_features(time: jax.Array, features: int, scale: float = 1.0, *, exact: bool = False) -> jax.Array:
    """Return cosines and then sines of a time at frequencies from 1 to 1/10000, (B,) → (B, features), float32 at least.

    From Vaswani et al., 2017, for `scale · time`. At a time of 1000, rounding a frequency to float32 changes its angle by 6e-5.
    Frequencies are rounded where `diffusers` and DiffSynth-Studio's Qwen-Image round them; with `exact` the angles are those
    of float64, as in DiffSynth-Studio's Wan.

    Raises:
        ValueError: when `features` is odd.

    >>> time_features(jnp.zeros(1), 4).tolist()
    [[1.0, 1.0, 0.0, 0.0]]
    """
    if features % 2:
        raise ValueError(f"features={features} is odd: expected an even number, half of them cosines and half sines")
    half, dtype = features // 2, wide(time.dtype)
    time = time.astype(dtype)[:, None]
    if exact:
        angles = exact_angles(time, scale * 10000.0 ** -(np.arange(half) / half))
    else:
        exponents = np.asarray(-math.log(10000.0), dtype) * np.arange(half, dtype=dtype) / np.asarray(half, dtype)
        angles = scale * (time * jnp.asarray(np.exp(exponents.astype(np.float64)), dtype))
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def exact_angles(time: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Return time (float32 or float64) times frequencies in radians, minus whole turns: in float32 to 1e-6, for any time.

    In float32 both factors are split into parts of 12 bits, whose products are exact, also after subtracting whole turns
    (Dekker, A floating-point technique for extending the available precision, 1971).
    """
    if time.dtype != jnp.float32:
        return time * jnp.asarray(frequencies, time.dtype)
    turns, rest = jnp.zeros((), time.dtype), frequencies / (2 * np.pi)
    first = jax.lax.reduce_precision(time, 8, 11)
    for _ in range(3):
        mantissa, exponent = np.frexp(rest)
        part = np.ldexp(np.round(np.ldexp(mantissa, 12)), exponent - 12)
        rest = rest - part
        for piece in (first, time - first):
            product = piece * jnp.asarray(part, time.dtype)
            turns = turns + (product - jnp.round(product))
    return 2 * np.pi * (turns - jnp.round(turns))


class TimeEmbedding(nn.Module):
    """linear2(silu(linear1(features))), (B, F) → (B, width)."""

    width: int
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        hidden = nn.silu(nn.Dense(self.width, param_dtype=self.param_dtype, name="linear1")(features))
        return nn.Dense(self.width, param_dtype=self.param_dtype, name="linear2")(hidden)


class FeedForward(nn.Module):
    """Linear, one of `ACTIVATIONS`, linear: (B, T, E) → (B, T, width); the default width is E."""

    hidden: int
    width: int | None = None
    activation: str = "gelu_tanh"
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inside = ACTIVATIONS[self.activation](nn.Dense(self.hidden, param_dtype=self.param_dtype, name="fc1")(x))
        return nn.Dense(self.width or x.shape[-1], param_dtype=self.param_dtype, name="fc2")(inside)


def quick_gelu(x: jax.Array) -> jax.Array:
    """Return x · sigmoid(1.702 x), an approximation of GELU (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016)."""
    return x * nn.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
    "quick_gelu": quick_gelu,
}


def plain_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """Return a layer norm without parameters over the last axis, computed in float32 at least, in the dtype of `x`."""
    exact = x.astype(wide(x.dtype))
    centred = exact - jnp.mean(exact, axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def long_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None, chunk: int | None = None
) -> jax.Array:
    """Return `transformer.attention`, `chunk` queries at a time, so that scores of all queries never exist at once.

    Each chunk's scores are recomputed in the backward pass (Rabe and Staats, Self-attention does not need O(n²)
    memory, 2021). Shapes: `query` (B, T, H, D), `key` and `value` (B, S, H, D); `bias` broadcasts to (B, 1, 1, S); the
    result is (B, T, H·D). Without `chunk`, or with `chunk` ≥ T, it is `transformer.attention` itself.

    Raises:
        ValueError: when `chunk` is less than 1.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: expected at least 1, or None for all queries at once")
    batch, length, heads, width = query.shape
    if chunk is None or chunk >= length:
        return attention(query, key, value, bias)
    parts = -(-length // chunk)
    filled = jnp.pad(query, ((0, 0), (0, parts * chunk - length), (0, 0), (0, 0)))
    chunks = jnp.moveaxis(filled.reshape(batch, parts, chunk, heads, width), 1, 0)
    mixed = jax.lax.map(jax.checkpoint(lambda part: attention(part, key, value, bias)), chunks)
    return jnp.moveaxis(mixed, 0, 1).reshape(batch, parts * chunk, heads * width)[:, :length]
