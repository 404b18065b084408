"""The sizes of π0 and π0.5, what they are given, and the check that the one fits the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .gemma import GemmaConfig
from .siglip import SiglipConfig


class Observation(NamedTuple):
    """What the robot sees and is told.

    Attributes:
        images: (B, cameras, image_size, image_size, 3).
        image_mask: (B, cameras), false where a camera is not there.
        prompt: token numbers (B, prompt_length).
        prompt_mask: (B, prompt_length), false for padding.
        state: (B, action_dim); π0.5 does not read it.
    """

    images: Any
    image_mask: Any
    prompt: Any
    prompt_mask: Any
    state: Any


@dataclass(frozen=True)
class Pi0Config:
    """The hyperparameters; without arguments OpenPI's `dummy` transformers behind a small vision tower.

    Attributes:
        widths, mlp_dims: of the language model and of the action expert.
        depth, num_heads, num_kv_heads, head_dim: what the two have in common.
        num_images: cameras, each of `image_size` × `image_size` pixels.
        horizon: actions that are predicted at once.
        adaptive: π0.5: the time sets the expert's norms, and there is no state token (the state is in the prompt).

    Raises:
        ValueError: if sizes do not divide, or something is missing.

    >>> Pi0Config.pi05().prompt_length
    200
    """

    widths: tuple[int, int] = (64, 64)
    mlp_dims: tuple[int, int] = (128, 128)
    depth: int = 4
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 16
    vision_width: int = 32
    vision_mlp_dim: int = 56
    vision_depth: int = 2
    vision_heads: int = 4
    image_size: int = 28
    patch_size: int = 14
    num_images: int = 3
    vocab_size: int = 257
    prompt_length: int = 16
    action_dim: int = 8
    horizon: int = 10
    adaptive: bool = False

    def __post_init__(self) -> None:
        if len(self.widths) != 2 or len(self.mlp_dims) != 2:
            raise ValueError(
                f"widths={self.widths}, mlp_dims={self.mlp_dims}: expected two numbers each, the language model's and the "
                "action expert's"
            )
        sizes = ("depth", "num_heads", "head_dim", "vision_width", "vision_mlp_dim", "vision_depth", "image_size", "num_images")
        for name in (*sizes, "vocab_size", "horizon", "action_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1, the model has all its parts")
        if self.prompt_length < 0:
            raise ValueError(f"prompt_length={self.prompt_length}: expected at least 0")
        if min(*self.widths, *self.mlp_dims) < 1:
            raise ValueError(
                f"widths={self.widths}, mlp_dims={self.mlp_dims}: expected at least 1 each, both experts are there"
            )
        divisions = (("num_kv_heads", self.num_heads), ("vision_heads", self.vision_width), ("patch_size", self.image_size))
        for name, whole in divisions:
            if getattr(self, name) < 1 or whole % getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} does not divide {whole}: choose a divisor")
        for name, value in (("head_dim", self.head_dim), ("widths[1]", self.widths[1])):
            if value % 2:
                raise ValueError(f"{name}={value}: expected an even number, it is made of sines and cosines")

    @property
    def image_tokens(self) -> int:
        """Tokens of all images."""
        return self.num_images * self.vision.num_patches

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

    @classmethod
    def pi0(cls) -> Pi0Config:
        """The published π0: 3.2 billion parameters."""
        return cls((2048, 1024), (16384, 4096), 18, 8, 1, 256, 1152, 4304, 27, 16, 224, 14, 3, 257152, 48, 32, 50)

    @classmethod
    def pi05(cls) -> Pi0Config:
        """The published π0.5."""
        return replace(cls.pi0(), prompt_length=200, adaptive=True)


def check_shapes(config: Pi0Config, observation: Observation, actions: Any, time: Any) -> None:
    """Refuse arguments of other shapes than the configuration says.

    Raises:
        ValueError: naming every argument that has one.
    """
    given = observation._asdict() | {"actions": actions, "time": time}
    absent = [name for name, one in given.items() if not hasattr(one, "shape")]
    if absent:
        raise ValueError(f"{', '.join(absent)}: expected arrays; give zeros for inputs that are not read")
    if not jnp.issubdtype(observation.images.dtype, jnp.floating):
        raise ValueError(
            f"images have dtype {observation.images.dtype}, expected floating point: divide by 127.5 and subtract 1"
        )
    if len(actions.shape) != 3:
        raise ValueError(f"actions has shape {actions.shape}, expected (batch, horizon, action_dim)")
    expected_observation, expected_actions, expected_time, _ = config.shapes(actions.shape[0])
    expected = expected_observation._asdict() | {"actions": expected_actions, "time": expected_time}
    wrong = [
        f"{name} has shape {given[name].shape}, expected {struct.shape}"
        for name, struct in expected.items()
        if given[name].shape != struct.shape
    ]
    if wrong:
        raise ValueError("; ".join(wrong) + ": resize images to image_size and pad prompts to prompt_length")
