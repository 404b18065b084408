"""The sizes and the inputs of π0 and π0.5 for both frameworks, and a check of the inputs' shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self


@dataclass(frozen=True)
class Pi0Config:
    """The hyperparameters; the defaults are OpenPI's `dummy` transformers with a small vision tower.

    Attributes:
        widths, mlp_dims: the sizes of the language model and of the action expert.
        depth, num_heads, num_kv_heads, head_dim: the sizes that both have in common.
        num_images: the number of cameras, each with `image_size` × `image_size` pixels.
        horizon: the number of actions that are predicted at once.
        adaptive: whether the model is π0.5, where the time conditions the expert's norms and the state is in the prompt, not
            in a token of its own.

    Raises:
        ValueError: if a size is too small, or does not divide another as it must.

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
                f"widths is {self.widths} and mlp_dims is {self.mlp_dims}, expected two numbers each: the language model's"
                " and the action expert's."
            )
        sizes = ("depth", "num_heads", "head_dim", "vision_width", "vision_mlp_dim", "vision_depth", "image_size", "num_images")
        for name in (*sizes, "vocab_size", "horizon", "action_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1: the model has all its parts.")
        if self.prompt_length < 0:
            raise ValueError(f"prompt_length is {self.prompt_length}, expected at least 0.")
        if min(*self.widths, *self.mlp_dims) < 1:
            raise ValueError(
                f"widths is {self.widths} and mlp_dims is {self.mlp_dims}, expected at least 1 each: the model has both "
                "experts."
            )
        divisions = (("num_kv_heads", self.num_heads), ("vision_heads", self.vision_width), ("patch_size", self.image_size))
        for name, whole in divisions:
            if getattr(self, name) < 1 or whole % getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}, expected a divisor of {whole}.")
        for name, value in (("head_dim", self.head_dim), ("widths[1]", self.widths[1])):
            if value % 2:
                raise ValueError(f"{name} is {value}, expected an even number: it is made of sines and cosines.")

    @property
    def image_tokens(self) -> int:
        """Tokens of all images."""
        return self.num_images * (self.image_size // self.patch_size) ** 2

    @classmethod
    def pi0(cls) -> Self:
        """The published π0: 3.2 billion parameters."""
        return cls((2048, 1024), (16384, 4096), 18, 8, 1, 256, 1152, 4304, 27, 16, 224, 14, 3, 257152, 48, 32, 50)

    @classmethod
    def pi05(cls) -> Self:
        """The published π0.5."""
        return replace(cls.pi0(), prompt_length=200, adaptive=True)


class Observation(NamedTuple):
    """The robot's images, prompt and state.

    Attributes:
        images: (batch, cameras, 3, image_size, image_size) in PyTorch, with the channels last in JAX.
        image_mask: (batch, cameras), false for a missing camera.
        prompt: token numbers (batch, prompt_length).
        prompt_mask: (batch, prompt_length), false for padding.
        state: (batch, action_dim); π0.5 does not read it.

    >>> Observation(None, None, None, None, "the state").state
    'the state'
    """

    images: Any
    image_mask: Any
    prompt: Any
    prompt_mask: Any
    state: Any


def check_shapes(
    config: Pi0Config, observation: Observation, actions: Any, time: Any, *, image_shape: tuple[int, int, int]
) -> None:
    """Check that the arguments have the configuration's shapes, and that images have `image_shape`.

    Raises:
        ValueError: naming every argument with a wrong shape.
    """
    given = observation._asdict() | {"actions": actions, "time": time}
    absent = [name for name, array in given.items() if not hasattr(array, "shape")]
    if absent:
        raise ValueError(f"{', '.join(absent)}: expected arrays; give zeros for inputs that are not read.")
    if "float" not in str(observation.images.dtype):
        raise ValueError(
            f"images have dtype {observation.images.dtype}, expected floating point: divide by 127.5 and subtract 1."
        )
    if len(actions.shape) != 3:
        raise ValueError(f"actions has shape {tuple(actions.shape)}, expected (batch, horizon, action_dim).")
    batch = actions.shape[0]
    cameras, prompt = (batch, config.num_images), (batch, config.prompt_length)
    expected = {
        "images": (*cameras, *image_shape),
        "image_mask": cameras,
        "prompt": prompt,
        "prompt_mask": prompt,
        "state": (batch, config.action_dim),
        "actions": (batch, config.horizon, config.action_dim),
        "time": (batch,),
    }
    wrong = [
        f"{name} has shape {tuple(given[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if tuple(given[name].shape) != shape
    ]
    if wrong:
        raise ValueError("; ".join(wrong) + ". Resize images to image_size and pad prompts to prompt_length.")
