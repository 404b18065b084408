"""`checkpoint_sequential` beside `torch.utils.checkpoint.checkpoint_sequential`: the same segments, executions, gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint_sequential

import remat_jax as rj


def runs_of_torch(layers: int, segments: int, weights: np.ndarray, x: np.ndarray) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Each layer's executions in forward and backward, and the gradients of the weights and of the input."""
    counts = [0] * layers
    kernels = [torch.tensor(w, requires_grad=True) for w in weights]

    def layer(index: int):
        def run(x):
            counts[index] += 1
            return torch.tanh(x @ kernels[index])

        return run

    inputs = torch.tensor(x, requires_grad=True)
    # Without early stop, so that a recomputed segment is counted in full.
    out = checkpoint_sequential([layer(index) for index in range(layers)], segments, inputs, use_reentrant=False)
    out.sum().backward()
    return counts, np.stack([kernel.grad.numpy() for kernel in kernels]), inputs.grad.numpy()


def runs_of_jax(layers: int, segments: int, weights: np.ndarray, x: np.ndarray) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The same in JAX; a layer's runs are counted by an added tan, in the jaxpr after dead-code elimination."""
    from remat_jax.cost.count import count

    def loss(weights, x, *, seen=None):
        fns = [lambda x, i=i: jnp.tanh(x @ weights[i]) for i in range(layers)]
        if seen is not None:
            # Only the counted layer has a tan, whose derivative needs no second tan.
            fns[seen] = lambda x: jnp.tanh(x @ weights[seen]) * jnp.tan(jnp.tanh(x @ weights[seen]))
        return rj.checkpoint_sequential(fns, segments, x).sum()

    def runs(index):
        jaxpr = jax.make_jaxpr(jax.grad(lambda w, x: loss(w, x, seen=index), argnums=(0, 1)))(
            jnp.asarray(weights), jnp.asarray(x)
        )
        return count(jaxpr, lambda eqn: eqn.primitive.name == "tan")

    grads = jax.grad(loss, argnums=(0, 1))(jnp.asarray(weights), jnp.asarray(x))
    return [runs(index) for index in range(layers)], np.asarray(grads[0]), np.asarray(grads[1])


@pytest.mark.parametrize(("layers", "segments"), [(5, 1), (5, 2), (5, 3), (6, 3), (4, 4)])
def test_same_segments_same_gradients(x64, layers, segments):
    rng = np.random.default_rng(0)
    weights, x = rng.normal(size=(layers, 4, 4)) / 2, rng.normal(size=(3, 4))
    theirs, ours = (run(layers, segments, weights, x) for run in (runs_of_torch, runs_of_jax))
    assert ours[0] == theirs[0]
    for got, want in zip(ours[1:], theirs[1:], strict=True):
        assert np.linalg.norm(got - want) <= 1e-12 * np.linalg.norm(want)
