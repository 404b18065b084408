"""Twenty steps of Adam on real text: the losses of both frameworks stay equal in every mode."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

import remat_jax as rj
import torch_ref
from examples import text
from parity_tests import support as s
from remat_jax.parity import TOLERANCES

STEPS, LEARNING_RATE, DTYPE = 20, 3e-3, "float32"
BATCHES = text.batches(seed=3, batch=4, length=12, steps=STEPS)


@functools.cache
def torch_losses(mode: str) -> np.ndarray:
    model = s.make_torch("ByteDecoder", DTYPE)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in BATCHES:
        tokens, targets = (torch.tensor(x).long() for x in batch)
        loss = model.loss(tokens, targets, **torch_ref.mode_flags(mode))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def jax_losses(framework: str, mode: str, scan: bool) -> np.ndarray:
    twin = s.twin("ByteDecoder", framework, scan, s.parameters("ByteDecoder", scan, DTYPE))
    loss = rj.checkpoint_blocks(functools.partial(twin.apply, method="loss"), {s.block_of("ByteDecoder", framework): mode})
    optimizer = optax.adam(LEARNING_RATE)

    def step(parameters: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens, targets)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    parameters = jax.tree.map(jax.numpy.asarray, twin.parameters)
    state = optimizer.init(parameters)
    compiled = s.quick(jax.jit(step), parameters, state, *BATCHES[0])
    losses = []
    for batch in BATCHES:
        parameters, state, value = compiled(parameters, state, *batch)
        losses.append(float(value))
    return np.array(losses)


def largest_difference(losses: np.ndarray) -> float:
    """The largest relative difference of a step's loss from plain PyTorch's."""
    expected = torch_losses("off")
    assert losses.shape == expected.shape == (STEPS,)
    return float(np.max(np.abs(losses - expected) / expected))


@pytest.mark.parametrize("mode", ["checkpoint", "offload"])
def test_pytorch_learns_the_same_in_every_mode(mode: str) -> None:
    assert largest_difference(torch_losses(mode)) == 0.0


@pytest.mark.parametrize(("framework", "mode"), [("linen", "checkpoint"), ("linen", "offload"), ("nnx", "offload")])
def test_losses_of_both_frameworks_agree_while_training(framework: str, mode: str) -> None:
    losses = jax_losses(framework, mode, scan=True)
    assert largest_difference(losses) <= TOLERANCES["loss"].value
    assert losses[-1] < losses[0] - 0.5
