"""The trainings of `examples/qwen_image.py` and `examples/wan.py`: every mode of both frameworks, the same losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from examples.diffusion import qwen_image, training, wan


@pytest.fixture(scope="module")
def qwen_rows() -> dict[tuple[str, str], dict[str, Any]]:
    rows = training.run_all(qwen_image.pair(), qwen_image.batches(4), lambda line: None)
    return {(row["framework"], row["mode"]): row for row in rows}


@pytest.fixture(scope="module")
def wan_rows() -> dict[tuple[str, str], dict[str, Any]]:
    rows = training.run_all(wan.pair(), wan.batches(4), lambda line: None)
    return {(row["framework"], row["mode"]): row for row in rows}


def trains_alike(rows: Any) -> None:
    plain = rows["torch", "off"]
    assert plain["losses"][-1] < plain["losses"][0]
    for (framework, mode), row in rows.items():
        assert row["difference"] <= (0 if framework == "torch" else 1e-4), (framework, mode, row)


def test_qwen_image_trains_alike_in_every_mode(qwen_rows: Any) -> None:
    trains_alike(qwen_rows)


def test_wan_trains_alike_in_every_mode(wan_rows: Any) -> None:
    trains_alike(wan_rows)


def test_wan_offloads_what_a_block_is_given(wan_rows: Any) -> None:
    """On the host: the stream for each layer; prompt, times and angles once in PyTorch, for each layer in JAX."""
    config = wan.CONFIG
    words, tokens = wan.batches(1)[0][1].shape[1], wan.FRAMES * wan.HEIGHT * wan.WIDTH // 4
    stream, numbers = wan.BATCH * tokens * config.hidden_size * 4, wan.BATCH * (words + 6) * config.hidden_size * 4
    # PyTorch has each angle twice, for either number of a pair.
    assert wan_rows["torch", "offload"]["host"] == config.num_layers * stream + numbers + 2 * tokens * config.head_dim * 4
    assert wan_rows["jax", "offload"]["host"] == config.num_layers * (stream + numbers + tokens * config.head_dim * 4)
    assert wan_rows["torch", "offload as in DiffSynth-Studio"]["host"] == 0


def test_qwen_image_offloads_its_streams_but_not_where_all_goes_by_keyword(qwen_rows: Any) -> None:
    """On the host: both streams for each layer, and what the layers share, once in PyTorch and for each layer in JAX."""
    config = qwen_image.CONFIG
    batch, words = qwen_image.BATCH, len(qwen_image.batches(1)[0][1][0])
    tokens = int(np.prod(qwen_image.GRIDS[0]))
    streams = batch * (tokens + words) * config.hidden_size * 4
    # The conditioning, two numbers for each pair of a head that turns, and the mask: a byte a word, or a score's bias.
    shared = batch * config.hidden_size * 4 + (tokens + words) * config.head_dim * 4
    assert qwen_rows["torch", "offload"]["host"] == config.num_layers * streams + shared + batch * words
    bias = batch * (tokens + words) * 4
    assert qwen_rows["jax", "offload"]["host"] == config.num_layers * (streams + shared + bias)
    faithful = qwen_rows["torch", "offload as in DiffSynth-Studio"]
    assert faithful["offered"] > config.num_layers * streams and faithful["host"] == 0
    assert faithful["device"] == qwen_rows["torch", "checkpoint"]["device"]


def test_a_checkpoint_keeps_less(qwen_rows: Any) -> None:
    for framework in ("torch", "jax"):
        off, checkpoint, offload = (qwen_rows[framework, mode]["device"] for mode in training.MODES)
        assert 3 * checkpoint < off and offload < checkpoint
