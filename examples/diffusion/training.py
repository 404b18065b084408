"""Trains one model in both frameworks and every mode, from the same weights and on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import torch

import remat_jax as rj
import torch_ref
from remat_jax import porting
from remat_jax.parity import LOSS_STEPS
from remat_jax.parity.compiling import compile_options

LEARNING_RATE = 2e-3
Batch = tuple[np.ndarray, ...]
MODES = ("off", "checkpoint", "offload")


@dataclass(frozen=True)
class Pair:
    """A PyTorch model and its Flax port, each run by a `model_fn` that puts a checkpoint around every block.

    Attributes:
        name: the model's name.
        make_torch: gives a fresh PyTorch model.
        torch_loss: `(model, checkpoint_forward, flags) → loss(*batch)`.
        flax_loss: `(flags) → loss(variables, *batch)`.
        shapes: the port's variables, never allocated.
        rules: the weight map.
        block: the port's class that is checkpointed.
    """

    name: str
    make_torch: Callable[[], torch.nn.Module]
    torch_loss: Callable[..., Callable[..., torch.Tensor]]
    flax_loss: Callable[[Mapping[str, bool]], Callable[..., jax.Array]]
    shapes: Any
    rules: porting.Rules
    block: type


def train_torch(pair: Pair, mode: str, checkpoint_forward: Callable[..., Any], batches: Sequence[Batch]) -> dict[str, Any]:
    """Train in PyTorch; returns the losses, the bytes offered to an offload, and the bytes kept between the passes."""
    model = pair.make_torch()
    loss_of = pair.torch_loss(model, checkpoint_forward, torch_ref.mode_flags(mode))
    # Parameters that the loss does not reach, such as the text stream after the last attention, have no gradient here, and
    # a gradient of 0 in JAX. Both optimizers leave them unchanged because there is no weight decay.
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    data = [tuple(map(torch.from_numpy, batch)) for batch in batches]
    saved = torch_ref.saved_for_backward(loss_of, *data[0])
    with torch_ref.receipt() as receipt:
        loss_of(*data[0])
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # Without parameters and batch, as in JAX.
    kept = {"device": saved.device_bytes, "host": saved.host_bytes}
    return {"losses": losses, "offered": receipt.bytes_offered, **kept}


def train_jax(pair: Pair, mode: str, batches: Sequence[Batch]) -> dict[str, Any]:
    """Train the port; returns the fields of `train_torch`."""
    loss_of = pair.flax_loss(torch_ref.mode_flags(mode))
    variables = porting.from_torch(pair.make_torch().state_dict(), pair.shapes, pair.rules)
    optimizer = optax.adam(LEARNING_RATE)

    @jax.jit
    def step(variables: Any, state: Any, batch: Batch) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(variables, *batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(variables, updates), state, loss

    losses, state = [], optimizer.init(variables)
    compiled = step.lower(variables, state, batches[0]).compile(compiler_options=compile_options("float32"))
    for batch in batches:
        variables, state, loss = compiled(variables, state, batch)
        losses.append(float(loss))
    kept = rj.residuals(rj.Workload(loss_of, pair.shapes, batches[0], blocks=pair.block), "off")
    return {"losses": losses, "offered": None, "device": kept.device_bytes, "host": kept.host_bytes}


def run_all(pair: Pair, batches: Sequence[Batch], progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Train in every form, plain PyTorch first; returns one dictionary for each form.

    `difference` is the largest relative difference of a loss from plain PyTorch's in the first `LOSS_STEPS` steps, for which
    `TOLERANCES["loss"]` holds: the rounding difference of the two frameworks grows from step to step.
    """
    right, faithful = torch_ref.gradient_checkpoint_forward, torch_ref.faithful.gradient_checkpoint_forward
    forms: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
        *(("torch", mode, lambda mode=mode: train_torch(pair, mode, right, batches)) for mode in MODES),
        ("torch", "offload as in DiffSynth-Studio", lambda: train_torch(pair, "offload", faithful, batches)),
        *(("jax", mode, lambda mode=mode: train_jax(pair, mode, batches)) for mode in MODES),
    ]
    rows = []
    for framework, name, train in forms:
        progress(f"{framework}: {name}")
        rows.append({"framework": framework, "mode": name, **train()})
    plain = np.array(rows[0]["losses"][:LOSS_STEPS])
    for row in rows:
        row["difference"] = float(np.abs(np.array(row["losses"][:LOSS_STEPS]) / plain - 1).max())
        moved = row["host"] if row["mode"].startswith("offload") else None
        row["remark"] = "moved nothing: every argument goes by keyword" if moved == 0 else ""
    return rows
