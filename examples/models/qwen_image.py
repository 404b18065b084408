"""Qwen-Image's diffusion transformer in Flax Linen: two streams, image and text, that meet in joint attention.

`rules.qwen_image` carries the weights of the PyTorch originals, `QwenImageTransformer2DModel` of `diffusers` and `QwenImageDiT`
of DiffSynth-Studio. The two differ in the activation of the feed-forward, which is an option here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .diffusion import (
    ACTIVATIONS,
    FeedForward,
    Grid,
    Rotation,
    TimeEmbedding,
    axis_rotations,
    check_conditions,
    check_sizes,
    grid_positions,
    long_attention,
    plain_norm,
    rotate_pairs,
    time_features,
)
from .llama import RMSNorm
from .transformer import Dtype, scan_block, split_heads

EPSILON = 1e-6  # of every norm
THETA = 10000.0  # the base of the rotary frequencies
TIME_FEATURES, TIME_SCALE = 256, 1000.0


@dataclass(frozen=True)
class QwenImageConfig:
    """The hyperparameters of a Qwen-Image transformer; the defaults are a small model for trials.

    Attributes:
        in_channels, out_channels: the numbers in a token of a packed image, in the input and in the output.
        text_width: the width of the text's embeddings.
        rope_axes: how many dimensions of a head rotate with frame, row and column.
        query_chunk: how many queries attend at a time; None: all at once.
        activation: the feed-forward's activation: "gelu_tanh" is that of `diffusers`, "quick_gelu" that of DiffSynth-Studio.

    Raises:
        ValueError: when a size is less than 1, the heads do not divide the width, the axes do not fill a head, or there is no
            such activation.

    >>> QwenImageConfig.published().head_dim
    128
    """

    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 2
    in_channels: int = 12
    out_channels: int = 12
    text_width: int = 20
    rope_axes: tuple[int, int, int] = (4, 6, 6)
    query_chunk: int | None = None
    activation: str = "gelu_tanh"

    def __post_init__(self) -> None:
        check_sizes(self, "hidden_size", "num_layers", "in_channels", "out_channels", "text_width")
        if self.num_heads < 1 or self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}: choose a divisor")
        three = len(self.rope_axes) == 3 and sum(self.rope_axes) == self.head_dim
        if not three or any(axis < 0 or axis % 2 for axis in self.rope_axes):
            raise ValueError(f"rope_axes={self.rope_axes}: expected three even numbers whose sum is {self.head_dim}, a head")
        if self.activation not in tuple(ACTIVATIONS):
            raise ValueError(
                f"activation={self.activation!r}: expected 'gelu_tanh' (diffusers) or 'quick_gelu' (DiffSynth-Studio)"
            )

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def published(cls, query_chunk: int | None = None, activation: str = "gelu_tanh") -> QwenImageConfig:
        """Return the published model's hyperparameters: 60 layers, width 3072."""
        return cls(3072, 60, 24, 64, 64, 3584, (16, 56, 56), query_chunk, activation)


class JointAttention(nn.Module):
    """Attention of text and image tokens to all tokens; each stream has its own projections."""

    config: QwenImageConfig
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, image: jax.Array, text: jax.Array, rotation: tuple[Rotation, Rotation], bias: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        both = [self._project(*each) for each in (("text", text, rotation[1]), ("image", image, rotation[0]))]
        query, key, value = (jnp.concatenate(each, axis=1) for each in zip(*both, strict=True))
        mixed = long_attention(query, key, value, bias, self.config.query_chunk)
        words = text.shape[1]
        return self._dense("image_out")(mixed[:, words:]), self._dense("text_out")(mixed[:, :words])

    def _project(self, stream: str, x: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
        def made(kind: str) -> jax.Array:
            return split_heads(self._dense(f"{stream}_{kind}")(x), self.config.num_heads)

        def turned(kind: str) -> jax.Array:
            return rotate_pairs(RMSNorm(EPSILON, self.param_dtype, name=f"{stream}_{kind}_norm")(made(kind)), rotation)

        return turned("query"), turned("key"), made("value")

    def _dense(self, name: str) -> nn.Dense:
        return nn.Dense(self.config.hidden_size, param_dtype=self.param_dtype, name=name)


class QwenImageBlock(nn.Module):
    """One layer, image (B, N, E) and text (B, T, E) → the same: the class to checkpoint.

    `time` (B, E) shifts, scales and gates both streams, before the attention and before the feed-forward.
    """

    config: QwenImageConfig
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        image: jax.Array,
        text: jax.Array,
        time: jax.Array,
        rotation: tuple[Rotation, Rotation],
        bias: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        image_mod, text_mod = (self._modulation(stream, time) for stream in ("image", "text"))
        attend = JointAttention(self.config, self.param_dtype, name="attention")
        mixed = attend(_modulated(image, image_mod[:2]), _modulated(text, text_mod[:2]), rotation, bias)
        image, text = image + image_mod[2] * mixed[0], text + text_mod[2] * mixed[1]
        return self._fed("image", image, image_mod[3:]), self._fed("text", text, text_mod[3:])

    def _modulation(self, stream: str, time: jax.Array) -> list[jax.Array]:
        """Shift, scale and gate of both halves of the block, each (B, 1, E)."""
        made = nn.Dense(6 * self.config.hidden_size, param_dtype=self.param_dtype, name=f"{stream}_modulation")(nn.silu(time))
        return jnp.split(made[:, None], 6, axis=-1)

    def _fed(self, stream: str, x: jax.Array, modulation: list[jax.Array]) -> jax.Array:
        config = self.config
        feed = FeedForward(4 * config.hidden_size, None, config.activation, self.param_dtype, name=f"{stream}_mlp")
        return x + modulation[2] * feed(_modulated(x, modulation[:2]))


def _modulated(x: jax.Array, modulation: Sequence[jax.Array]) -> jax.Array:
    shift, scale = modulation
    return plain_norm(x, EPSILON) * (1 + scale) + shift


class QwenImage(nn.Module):
    """The velocity of a packed, noisy image: latents (B, N, in_channels) → (B, N, out_channels).

    `text` (B, T, text_width) are the prompt's embeddings, `time` (B,) the noise's share from 0 to 1, `mask` (B, T) is true
    for tokens of the text and false for padding. `grids` has the frames, rows and columns of each image, in the order of the
    tokens: the generated image, then its source images. `scan` stacks the layers' parameters on axis 0.

    Raises:
        ValueError: when a shape does not fit the configuration, the other arguments or the grids.

    >>> model = QwenImage(QwenImageConfig())
    >>> inputs = jnp.ones((1, 6, 12)), jnp.ones((1, 5, 20)), jnp.ones(1), ((1, 2, 3),)
    >>> variables = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))
    >>> jax.eval_shape(lambda variables: model.apply(variables, *inputs), variables).shape
    (1, 6, 12)
    """

    config: QwenImageConfig
    scan: bool = False
    param_dtype: Dtype = jnp.float32

    def setup(self) -> None:
        config, dtype = self.config, self.param_dtype
        self.image_in = nn.Dense(config.hidden_size, param_dtype=dtype)
        self.text_norm = RMSNorm(EPSILON, dtype)
        self.text_in = nn.Dense(config.hidden_size, param_dtype=dtype)
        self.time_in = TimeEmbedding(config.hidden_size, dtype)
        blocks = [QwenImageBlock(config, dtype) for _ in range(1 if self.scan else config.num_layers)]
        self.layers = blocks[0] if self.scan else blocks
        self.modulation = nn.Dense(2 * config.hidden_size, param_dtype=dtype)
        self.out = nn.Dense(config.out_channels, param_dtype=dtype)

    def __call__(
        self,
        latents: jax.Array,
        text: jax.Array,
        time: jax.Array,
        grids: tuple[Grid, ...],
        mask: jax.Array | None = None,
    ) -> jax.Array:
        image, text, time, shared = self.embed(latents, text, time, grids, mask)
        if self.scan:
            image, text = scan_block(self.layers, self.config.num_layers, (image, text), time, *shared, spread=True)
        else:
            for block in self.layers:
                image, text = block(image, text, time, *shared)
        return self.velocity(image, time)

    def embed(
        self, latents: jax.Array, text: jax.Array, time: jax.Array, grids: tuple[Grid, ...], mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array, tuple[tuple[Rotation, Rotation], jax.Array | None]]:
        """Return the inputs of the first block: image, text, time, and the inputs that all blocks share, rotations and bias."""
        check_shapes(self.config.in_channels, self.config.text_width, latents, text, time, grids, mask)
        image = self.image_in(latents)
        text = self.text_in(self.text_norm(text))
        features = time_features(time.astype(image.dtype), TIME_FEATURES, TIME_SCALE)
        rotation = qwen_rotations(grids, text.shape[1], self.config.rope_axes, image.dtype)
        return image, text, self.time_in(features.astype(image.dtype)), (rotation, _joint_bias(mask, image))

    def velocity(self, image: jax.Array, time: jax.Array) -> jax.Array:
        """Return the output from the last block's image stream."""
        scale, shift = jnp.split(self.modulation(nn.silu(time))[:, None], 2, axis=-1)
        return self.out(plain_norm(image, EPSILON) * (1 + scale) + shift)


def check_shapes(
    in_channels: int, text_width: int, latents: Any, text: Any, time: Any, grids: Sequence[Grid], mask: Any = None
) -> None:
    """Raise `ValueError` where shapes do not fit; a wrong axis would broadcast, or fail far from here.

    Takes arrays of NumPy, JAX and PyTorch alike, because the original needs the same shapes.
    """
    if not grids or any(not hasattr(grid, "__len__") or len(grid) != 3 or min(grid) < 1 for grid in grids):
        raise ValueError(f"grids={grids}: expected (frames, rows, columns) for each image, as in ((1, 2, 3),)")
    tokens = sum(frames * rows * columns for frames, rows, columns in grids)
    expected = (*latents.shape[:1], tokens, in_channels)
    if tuple(latents.shape) != expected:
        raise ValueError(f"latents have shape {tuple(latents.shape)}, expected {expected} for grids={grids}: pack the images")
    check_conditions(latents.shape[0], text_width, text, time)
    if mask is not None and tuple(mask.shape) != tuple(text.shape[:2]):
        given, words = tuple(mask.shape), tuple(text.shape[:2])
        raise ValueError(f"mask has shape {given}, expected {words}: one number for each token of the text")


def qwen_rotations(grids: tuple[Grid, ...], words: int, axes: tuple[int, int, int], dtype: Dtype) -> tuple[Rotation, Rotation]:
    """Return the rotations of the images' tokens and of the text's.

    Rows and columns are counted from the image's middle, and the first axis counts images. Words are on the diagonal (equal on
    all axes), beyond all images.
    """
    positions = [
        grid_positions(grid, (index, -(grid[1] - grid[1] // 2), -(grid[2] - grid[2] // 2))) for index, grid in enumerate(grids)
    ]
    beyond = max(size // 2 for grid in grids for size in grid[1:])
    diagonal = jnp.broadcast_to(beyond + jnp.arange(words), (3, words))
    image = axis_rotations(jnp.concatenate(positions, axis=1), axes, THETA, dtype)
    return image, axis_rotations(diagonal, axes, THETA, dtype)


def _joint_bias(mask: jax.Array | None, image: jax.Array) -> jax.Array | None:
    """The bias of the scores of all queries, (B, 1, 1, T + N): every image token is visible."""
    if mask is None:
        return None
    seen = jnp.concatenate([mask.astype(bool), jnp.ones(image.shape[:2], bool)], axis=1)
    return jnp.where(seen, 0, jnp.finfo(image.dtype).min).astype(image.dtype)[:, None, None]
