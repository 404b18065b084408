"""Real images to train on: scikit-learn's two photographs, and their captions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

CAPTIONS = ("a Chinese temple", "a dahlia in flower")  # of the photographs, in scikit-learn's order


class Words(NamedTuple):
    """A caption's bytes as embeddings (T, width) in float32, and a mask (T,) that is false for padding."""

    embeddings: np.ndarray
    mask: np.ndarray


def photographs(shrink: int = 4) -> np.ndarray:
    """Return both photographs as numbers from -1 to 1, (2, 427 // shrink, 640 // shrink, 3), averaged over squares of `shrink`
    pixels.
    """
    from sklearn.datasets import load_sample_images

    pixels = np.stack(load_sample_images().images).astype(np.float32) / 127.5 - 1
    height, width = (size // shrink for size in pixels.shape[1:3])
    cut = pixels[:, : height * shrink, : width * shrink]
    return cut.reshape(2, height, shrink, width, shrink, 3).mean((2, 4), dtype=np.float32)


def crops(random: np.random.Generator, images: np.ndarray, which: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return a random part of each image of `which`, (len(which), height, width, 3).

    Raises:
        ValueError: when the images are smaller.
    """
    rows, columns = (size - part for size, part in zip(images.shape[1:3], (height, width), strict=True))
    if rows < 0 or columns < 0:
        raise ValueError(f"height={height}, width={width}: expected at most {images.shape[1]} and {images.shape[2]}")
    corners = zip(which, random.integers(0, rows + 1, len(which)), random.integers(0, columns + 1, len(which)), strict=True)
    return np.stack([images[image, top : top + height, left : left + width] for image, top, left in corners])


def captions(width: int) -> Words:
    """Return both captions, padded to equal length; a fixed random table stands in for a frozen text encoder."""
    length = max(map(len, CAPTIONS))
    tokens = np.array([list(caption.ljust(length, "\0").encode()) for caption in CAPTIONS])
    table = np.random.default_rng(0).normal(size=(128, width)).astype(np.float32)
    return Words(table[tokens], tokens != 0)


def noised(random: np.random.Generator, clean: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return noisy inputs (1 - t) · clean + t · noise, times t (B,), and the velocities to learn, noise - clean.

    Rectified flow: Liu et al., Flow straight and fast, 2022.
    """
    noise = random.normal(size=clean.shape).astype(np.float32)
    time = random.uniform(0.02, 0.98, len(clean)).astype(np.float32)
    share = time.reshape(-1, *[1] * (clean.ndim - 1))
    return (1 - share) * clean + share * noise, time, noise - clean
