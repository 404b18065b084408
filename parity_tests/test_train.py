"""Optimizer offload and gradient accumulation in both frameworks: the same parameters and gradients in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import remat_jax as rj
from examples import text
from examples.models import weights as w
from examples.pytorch import HybridOptimizer, accumulate_gradients, micro_batches
from parity_tests import support as s

STEPS = 4
BATCHES = text.batches(seed=5, batch=4, length=9, steps=STEPS)
# Equal hyperparameters, also weight_decay (1e-2 by default in torch, 1e-4 in optax). The true gradient of a key's bias is 0:
# with an eps of 1e-8 its rounding of 1e-17 would become an update.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], Any]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, optax.sgd(0.1, momentum=0.9)),
    "adam": (torch.optim.Adam, {"lr": 0.02, "eps": 1e-6}, optax.adam(0.02, eps=1e-6)),
    "adamw": (
        torch.optim.AdamW,
        {"lr": 0.02, "eps": 1e-6, "weight_decay": 1e-2},
        optax.adamw(0.02, eps=1e-6, weight_decay=1e-2),
    ),
}


def difference(trained: Any, expected: Any) -> float:
    """The largest norm-wise difference of an array, relative to the largest norm."""
    assert jax.tree.structure(trained) == jax.tree.structure(expected)
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (trained, expected)), strict=True)]
    scale = max(float(np.linalg.norm(b)) for _, b in pairs)
    return max(float(np.linalg.norm(a - b)) for a, b in pairs) / scale


def tree(model: torch.nn.Module) -> Any:
    return w.from_torch(model.state_dict(), "ByteDecoder", scan=True)


@functools.cache
def torch_trained(name: str, fraction: float | None, steps: int = STEPS) -> Any:
    """The parameters after training in PyTorch, as Linen's tree; a fraction of None is the plain optimizer."""
    model = s.make_torch("ByteDecoder")
    kind, options, _ = OPTIMIZERS[name]
    optimizer: torch.optim.Optimizer
    if fraction is None:
        optimizer = kind(model.parameters(), **options)
    else:
        optimizer = HybridOptimizer(model.parameters(), kind, offload_fraction=fraction, **options)
    for batch in BATCHES[:steps]:
        tokens, targets = (torch.tensor(x).long() for x in batch)
        optimizer.zero_grad()
        model.loss(tokens, targets).backward()
        optimizer.step()
    return tree(model)


def jax_trained(name: str, fraction: float) -> Any:
    twin = s.twin("ByteDecoder", "linen", True, s.parameters("ByteDecoder", True))
    optimizer = rj.offload_optimizer(OPTIMIZERS[name][2], fraction)

    def step(parameters: Any, state: Any, tokens: Any, targets: Any) -> Any:
        gradients = jax.grad(functools.partial(twin.apply, method="loss"))(parameters, tokens, targets)
        return optimizer.apply(gradients, state, parameters)

    parameters = jax.tree.map(jnp.asarray, twin.parameters)
    state = optimizer.init(parameters)
    compiled = s.quick(jax.jit(step), parameters, state, *BATCHES[0])
    for batch in BATCHES:
        parameters, state = compiled(parameters, state, *batch)
    return parameters


@pytest.mark.parametrize(("name", "fraction"), [("sgd", 0), ("sgd", 0.5), ("adam", 1.0), ("adamw", 0.5)])
def test_offloaded_optimizers_train_the_same_model(name: str, fraction: float) -> None:
    assert difference(torch_trained(name, fraction), torch_trained(name, None)) == 0.0
    with jax.enable_x64(True):
        trained = jax_trained(name, fraction)
    assert difference(trained, torch_trained(name, fraction)) <= s.LIMIT
    start = s.parameters("ByteDecoder", True)
    assert difference(start, torch_trained(name, fraction)) > 1e-2, "doing nothing would pass"
    assert difference(trained, torch_trained(name, None, STEPS - 1)) > 1e-3, "one step fewer would pass"


# --- accumulation -----------------------------------------------------------------------------------------------------


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eight rows of text with 1 to 9 target bytes each, so that every micro-batch has a different number of targets."""
    tokens, targets = text.batches(seed=7, batch=8, length=9, steps=1)[0]
    kept = np.arange(tokens.shape[1]) < np.array([9, 8, 1, 2, 5, 1, 1, 3])[:, None]
    return tokens, targets, kept


def torch_summed(model: Any, tokens: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, int]:
    losses = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * kept.flatten()).sum(), int(kept.sum())


def torch_accumulated(n: int) -> tuple[float, Any]:
    model = s.make_torch("ByteDecoder")
    tokens, targets, kept = (torch.tensor(x) for x in batch())
    parts = micro_batches((tokens.long(), targets.long(), kept), n)
    accumulated = accumulate_gradients(functools.partial(torch_summed, model), parts, model.parameters())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return accumulated.loss, w.from_torch(gradients, "ByteDecoder", scan=True)


def jax_accumulated(n: int | None, policy: str = "off") -> tuple[float, Any]:
    """The gradient from `n` micro-batches; None for the mean over the whole batch at once."""
    twin = s.twin("ByteDecoder", "linen", True, s.parameters("ByteDecoder", True))

    def summed(parameters: Any, tokens: Any, targets: Any, kept: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(twin.apply(parameters, tokens), targets)
        return jnp.sum(losses * kept), jnp.sum(kept)

    def whole(parameters: Any, *arrays: Any) -> Any:
        total, count = summed(parameters, *arrays)
        return total / count

    if n is None:
        function = jax.value_and_grad(whole)
    else:
        function = rj.accumulate_gradients(rj.checkpoint_blocks(summed, {s.block_of("ByteDecoder", "linen"): policy}), n)
    parameters = jax.tree.map(jnp.asarray, twin.parameters)
    value, gradients = s.run(function, parameters, *batch())
    return float(value), gradients


@pytest.mark.parametrize(("n", "policy"), [(1, "off"), (4, "full"), (8, "off")])
def test_accumulated_gradients_are_those_of_the_whole_batch_in_both(n: int, policy: str) -> None:
    expected_loss, expected = torch_accumulated(1)
    loss, gradients = torch_accumulated(n)
    assert abs(loss - expected_loss) <= s.LIMIT and difference(gradients, expected) <= s.LIMIT
    with jax.enable_x64(True):
        whole_loss, whole = jax_accumulated(None)
        found_loss, accumulated = jax_accumulated(n, policy)
    assert abs(found_loss - loss) <= s.LIMIT and difference(accumulated, gradients) <= s.LIMIT
    assert abs(found_loss - whole_loss) <= s.LIMIT and difference(accumulated, whole) <= s.LIMIT
