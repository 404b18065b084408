"""Observations of photographs, and actions that can be read from them.

Each camera shows a random square of one of scikit-learn's two photographs; the third camera is sometimes missing. The prompt
says whether to reach for the content of the first camera or to avoid it. The actions go in a straight line from the state to a
goal made of that camera's mean colour, or to the opposite goal.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ..models.pi0_config import Observation, Pi0Config

PROMPTS = {"reach": 1.0, "leave it": -1.0}
LEVELS = 16  # of each number of the state in the prompt
FIRST_LEVEL = 201  # tokens 1 to 200 are bytes, 0 is padding


class Batch(NamedTuple):
    """The inputs of a training step as NumPy arrays; images have their channels last."""

    observation: Observation
    actions: np.ndarray
    noise: np.ndarray
    time: np.ndarray


@functools.cache
def photographs() -> tuple[np.ndarray, ...]:
    """Return the two photographs, (427, 640, 3) each, in −1 … 1.

    >>> [image.shape for image in photographs()]
    [(427, 640, 3), (427, 640, 3)]
    """
    from sklearn.datasets import load_sample_images

    return tuple(image.astype(np.float64) / 127.5 - 1 for image in load_sample_images().images)


def batches(config: Pi0Config, seed: int, batch: int, steps: int) -> list[Batch]:
    """Return `steps` batches, the same for the same seed, in float64.

    Raises:
        ValueError: when prompts, and for π0.5 the state in them, are longer than `prompt_length`, or the vocabulary is
            too small for their tokens.
    """
    longest = max(map(len, PROMPTS)) + config.adaptive * config.action_dim
    if config.prompt_length < longest or config.vocab_size < FIRST_LEVEL + LEVELS:
        raise ValueError(
            f"prompt_length={config.prompt_length}, vocab_size={config.vocab_size}: expected at least {longest} and "
            f"{FIRST_LEVEL + LEVELS} for these prompts"
        )
    random = np.random.default_rng(seed)
    return [_batch(config, random, batch) for _ in range(steps)]


def _batch(config: Pi0Config, random: np.random.Generator, batch: int) -> Batch:
    images = np.stack([_crop(random, config.image_size) for _ in range(batch * config.num_images)])
    images = images.reshape(batch, config.num_images, *images.shape[1:])
    present = np.ones((batch, config.num_images), bool)
    present[:, 2:] = random.random((batch, max(config.num_images - 2, 0))) < 0.7
    state = random.uniform(-1, 1, (batch, config.action_dim))
    chosen = random.integers(0, len(PROMPTS), batch)
    prompt = [_tokens(config, list(PROMPTS)[one], numbers) for one, numbers in zip(chosen, state, strict=True)]
    tokens = np.stack([np.pad(one, (0, config.prompt_length - len(one))) for one in prompt])
    goal = np.array(list(PROMPTS.values()))[chosen, None] * (images[:, 0].mean((1, 2)) @ goals(config.action_dim))
    way = (np.arange(config.horizon) + 1)[:, None] / config.horizon
    actions = state[:, None] + way * (goal - state)[:, None]
    noise = random.normal(size=actions.shape)
    observation = Observation(images, present, tokens.astype(np.int32), tokens > 0, state)
    return Batch(observation, actions, noise, sample_time(random, batch))


def sample_time(random: np.random.Generator, batch: int) -> np.ndarray:
    """Return times of the flow, Beta(1.5, 1) · 0.999 + 0.001: more often near 1 (the noise), and never 0 (the actions).

    >>> bool(abs(sample_time(np.random.default_rng(0), 100_000).mean() - (0.6 * 0.999 + 0.001)) < 0.003)
    True
    """
    return random.beta(1.5, 1.0, batch) * 0.999 + 0.001


@functools.cache
def goals(action_dim: int) -> np.ndarray:
    """Return the map from a colour to a goal: (3, action_dim)."""
    return np.random.default_rng(0).normal(size=(3, action_dim))


def _crop(random: np.random.Generator, size: int) -> np.ndarray:
    """A square of two to six times an image's size, averaged down to this size."""
    photograph = photographs()[random.integers(2)]
    factor = int(random.integers(2, 7))
    side = factor * size
    if side > min(photograph.shape[:2]):
        factor, side = 1, size
    top, left = (int(random.integers(0, extent - side + 1)) for extent in photograph.shape[:2])
    square = photograph[top : top + side, left : left + side]
    return square.reshape(size, factor, size, factor, 3).mean((1, 3))


def _tokens(config: Pi0Config, prompt: str, state: np.ndarray) -> list[int]:
    tokens = [1 + byte for byte in prompt.encode()]
    if not config.adaptive:
        return tokens
    levels = np.clip(((state + 1) / 2 * LEVELS).astype(int), 0, LEVELS - 1)
    return tokens + [FIRST_LEVEL + int(level) for level in levels]
