"""The vision tower of SigLIP in Flax Linen: patches, learned positions, an encoder, pooling by attention.

`rules.siglip` carries the weights of the PyTorch original, `SiglipVisionModel` of `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .transformer import Attention, run_blocks


@dataclass(frozen=True)
class SiglipConfig:
    """The hyperparameters of a SigLIP vision tower; the defaults are a small model for trials.

    >>> SiglipConfig.so400m_patch14_384().num_patches
    729
    """

    hidden_size: int = 32
    intermediate_size: int = 56
    num_layers: int = 2
    num_heads: int = 4
    image_size: int = 20
    patch_size: int = 5
    num_channels: int = 3
    layer_norm_eps: float = 1e-6

    @property
    def num_patches(self) -> int:
        """Patches of one image; pixels at the right and lower edge that fill no patch are left out."""
        return (self.image_size // self.patch_size) ** 2

    @classmethod
    def base_patch16_224(cls) -> SiglipConfig:
        return cls(768, 3072, num_layers=12, num_heads=12, image_size=224, patch_size=16)

    @classmethod
    def so400m_patch14_384(cls) -> SiglipConfig:
        return cls(1152, 4304, num_layers=27, num_heads=16, image_size=384, patch_size=14)


class FeedForward(nn.Module):
    """Linear, GELU by the tanh formula, linear."""

    config: SiglipConfig
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.Dense(self.config.intermediate_size, param_dtype=self.param_dtype, name="fc1")(x)
        return nn.Dense(self.config.hidden_size, param_dtype=self.param_dtype, name="fc2")(nn.gelu(hidden, approximate=True))


class SiglipBlock(nn.Module):
    """One layer, (B, patches, E) → the same: the class to checkpoint."""

    config: SiglipConfig
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm1, norm2 = (layer_norm(self.config, self.param_dtype, name) for name in ("layer_norm1", "layer_norm2"))
        x = x + Attention(self.config.num_heads, self.param_dtype, name="self_attn")(norm1(x))
        return x + FeedForward(self.config, self.param_dtype, name="mlp")(norm2(x))


class PoolingHead(nn.Module):
    """One learned query that attends to all patches, then a feed-forward: (B, patches, E) → (B, E)."""

    config: SiglipConfig
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = self.config.hidden_size
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, width), self.param_dtype)
        probe = jnp.broadcast_to(probe, (x.shape[0], 1, width))
        pooled = Attention(self.config.num_heads, self.param_dtype, name="attention")(probe, to=x)
        normed = layer_norm(self.config, self.param_dtype, "layernorm")(pooled)
        return (pooled + FeedForward(self.config, self.param_dtype, name="mlp")(normed))[:, 0]


class SiglipVision(nn.Module):
    """Images (B, height, width, channels) → the states of their patches (B, patches, E) and a pooled state (B, E).

    The channels come last, as everywhere in Flax; PyTorch has them first. `scan` stacks the layers' parameters on axis 0.

    Raises:
        ValueError: when an image is not square or not of the configured size.

    >>> model = SiglipVision(SiglipConfig())
    >>> images = jnp.ones((2, 20, 20, 3))
    >>> states, pooled = model.apply(model.init(jax.random.key(0), images), images)
    >>> states.shape, pooled.shape
    ((2, 16, 32), (2, 32))
    """

    config: SiglipConfig
    scan: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = encode(images, self.config, self.param_dtype, scan=self.scan)
        return x, PoolingHead(self.config, self.param_dtype, name="head")(x)


def encode(images: jax.Array, config: SiglipConfig, param_dtype: Any, *, scan: bool) -> jax.Array:
    """Return the states of the images' patches; call it in a compact method, whose module gets the parameters.

    Raises:
        ValueError: when an image is not square or not of the configured size.
    """
    expected = (config.image_size, config.image_size, config.num_channels)
    if images.shape[1:] != expected:
        raise ValueError(f"images have shape {images.shape}, expected (batch, {', '.join(map(str, expected))}): resize them")
    patch = (config.patch_size, config.patch_size)
    cut = nn.Conv(config.hidden_size, patch, strides=patch, padding="VALID", param_dtype=param_dtype, name="patches")
    x = cut(images).reshape(images.shape[0], config.num_patches, config.hidden_size)
    places = nn.Embed(config.num_patches, config.hidden_size, param_dtype=param_dtype, name="positions")
    x = x + places(jnp.arange(config.num_patches)[None])

    def block(name: str) -> SiglipBlock:
        return SiglipBlock(config, param_dtype, name=name)

    x = run_blocks(block, config.num_layers, x, scan=scan)
    return layer_norm(config, param_dtype, "post_norm")(x)


def layer_norm(config: SiglipConfig, param_dtype: Any, name: str) -> nn.LayerNorm:
    """Return a layer norm with PyTorch's two-pass variance; Flax's own default subtracts two large numbers."""
    return nn.LayerNorm(epsilon=config.layer_norm_eps, use_fast_variance=False, param_dtype=param_dtype, name=name)
