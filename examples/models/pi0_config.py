"""π0's sizes as the configurations of its Flax parts, and the shapes of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .. import pi0_sizes
from ..pi0_sizes import Observation
from .gemma import GemmaConfig
from .siglip import SiglipConfig

__all__ = ["Observation", "Pi0Config"]


@dataclass(frozen=True)
class Pi0Config(pi0_sizes.Pi0Config):
    """The hyperparameters, with the configurations of the parts.

    >>> Pi0Config.pi05().vision.num_patches
    256
    """

    @property
    def vision(self) -> SiglipConfig:
        """The vision tower's own configuration."""
        return SiglipConfig(
            self.vision_width, self.vision_mlp_dim, self.vision_depth, self.vision_heads, self.image_size, self.patch_size
        )

    def gemma(self, index: int) -> GemmaConfig:
        """The configuration of the language model (0) or of the action expert (1)."""
        return GemmaConfig(
            self.vocab_size,
            self.widths[index],
            self.mlp_dims[index],
            self.depth,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
        )

    def shapes(self, batch: int, dtype: Any = jnp.float32) -> tuple[Any, ...]:
        """Shapes of an observation in `dtype`, and of actions, time and noise in float32."""
        cameras, prompt, size = (batch, self.num_images), (batch, self.prompt_length), self.image_size
        observation = Observation(
            jax.ShapeDtypeStruct((*cameras, size, size, 3), dtype),
            jax.ShapeDtypeStruct(cameras, bool),
            jax.ShapeDtypeStruct(prompt, jnp.int32),
            jax.ShapeDtypeStruct(prompt, bool),
            jax.ShapeDtypeStruct((batch, self.action_dim), dtype),
        )
        actions = jax.ShapeDtypeStruct((batch, self.horizon, self.action_dim), jnp.float32)
        return observation, actions, jax.ShapeDtypeStruct((batch,), jnp.float32), actions
