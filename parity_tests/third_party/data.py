"""Inputs that reveal faults: padding on either side, a padding token among the words, distant positions, omitted labels."""

from __future__ import annotations

import numpy as np

from parity_tests.third_party.ports import IGNORED

BATCH, LENGTH = 2, 19


def text(vocab: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tokens (B, T) with a mask of padding, at the end of the first sequence and at the start of the second; labels.

    Token 0, the padding token, also occurs among the words: there it is visible, but may not train its embedding.
    """
    random = np.random.default_rng(0)
    tokens = random.integers(1, vocab, (BATCH, LENGTH))
    mask = np.ones((BATCH, LENGTH), np.int64)
    mask[0, 15:] = mask[1, :3] = 0
    tokens[mask == 0] = tokens[0, 4] = tokens[1, 7] = 0
    labels = np.where(mask == 1, random.integers(0, vocab, (BATCH, LENGTH)), IGNORED)
    return {"input_ids": tokens, "attention_mask": mask}, labels


def far_positions(step: int) -> np.ndarray:
    """Positions `step` apart: angles of many turns, where a wrong frequency or a rounded angle shows."""
    return np.broadcast_to(np.arange(LENGTH) * step, (BATCH, LENGTH)).copy()
