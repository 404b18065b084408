"""One decoder layer trained with recomputation, in every form of PyTorch and JAX.

The layer maps the bytes of a text, one vector each, to the vectors of the following bytes. Every form starts from the same
weights and gets the same batches, so the losses must be equal; the kept bytes and the executions differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import torch
from torch.utils.checkpoint import checkpoint

import remat_jax as rj
import torch_ref
from remat_jax.compat import keep_to_cpu_without_gpu
from remat_jax.cost.count import matmuls
from remat_jax.parity.torch_side import imports_frozen
from remat_jax.report.tables import format_bytes, render, table

from . import pytorch, text
from .models import linen, weights

WIDTH, HEADS, BATCH, LENGTH, LEARNING_RATE = 64, 4, 8, 32, 1e-3
COLUMNS = ("framework", "form", "first loss", "last loss", "off plain by", "device", "host", "matmuls", "remark")

Torch = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]

TORCH_FORMS: dict[str, Torch] = {
    "plain": lambda layer, x: layer(x),
    "torch.utils.checkpoint, reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "torch.utils.checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "checkpoint": lambda layer, x: torch_ref.gradient_checkpoint_forward(layer, True, False, x),
    "offload": lambda layer, x: torch_ref.gradient_checkpoint_forward(layer, True, True, x),
    "dots": lambda layer, x: torch_ref.selective_checkpoint(layer, "dots", x),
}
JAX_FORMS = {"plain": "off", "checkpoint": "full", "offload": "offload_inputs", "dots": "dots"}


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Vectors of bytes and of the bytes after them, (steps) × two float32 arrays of shape (BATCH, LENGTH, WIDTH)."""
    vectors = np.random.default_rng(0).normal(size=(256, WIDTH)).astype(np.float32)
    return [(vectors[tokens], vectors[targets]) for tokens, targets in text.batches(0, BATCH, LENGTH, steps)]


def initial() -> dict[str, torch.Tensor]:
    """The initial weights of every form."""
    torch.manual_seed(0)
    return pytorch.DecoderLayer(WIDTH, HEADS).state_dict()


def train_torch(run: Torch, data: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Train in PyTorch; returns the losses, and the kept bytes and executions of the last step."""
    layer = pytorch.DecoderLayer(WIDTH, HEADS)
    layer.load_state_dict(initial())
    optimizer = torch.optim.Adam(layer.parameters(), lr=LEARNING_RATE)
    tensors = [tuple(torch.from_numpy(array) for array in pair) for pair in data]

    def loss_of(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(run(layer, x), target)

    losses = []
    for x, target in tensors:
        optimizer.zero_grad()
        with torch_ref.count_matmuls() as count:
            loss = loss_of(x, target)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    saved = torch_ref.saved_for_backward(loss_of, *tensors[0])
    device = saved.device_bytes + saved.input_bytes
    return {"losses": losses, "device": device, "host": saved.host_bytes, "matmuls": count.total}


def train_jax(policy: str, data: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Train the Linen layer under a policy; returns the fields of `train_torch`."""
    model, kind = linen.DecoderLayer(WIDTH, HEADS), "DecoderLayer"
    params = weights.from_torch(initial(), kind, scan=False)
    optimizer = optax.adam(LEARNING_RATE)

    def loss_of(params: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        return ((model.apply({"params": params}, x) - target) ** 2).mean()

    job = rj.Workload(loss_of, params, data[0], blocks=linen.DecoderLayer)
    gradient = jax.value_and_grad(job.with_policy(loss_of, policy))

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array, target: jax.Array) -> Any:
        loss, gradients = gradient(params, x, target)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    losses, executed = [], matmuls(gradient, params, *data[0])
    state = optimizer.init(params)
    for x, target in data:
        params, state, loss = step(params, state, x, target)
        losses.append(float(loss))
    kept = rj.residuals(job, policy)
    return {"losses": losses, "device": kept.device_bytes, "host": kept.host_bytes, "matmuls": executed}


def run_all(steps: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Train every form; returns one dictionary for each form."""
    data, rows = batches(steps), []
    forms = [("torch", name, run) for name, run in TORCH_FORMS.items()]
    forms += [("jax", name, policy) for name, policy in JAX_FORMS.items()]
    for framework, name, how in forms:
        progress(f"{framework}: {name}")
        row: dict[str, Any] = {"framework": framework, "form": name, "error": None}
        try:
            with warnings.catch_warnings():
                # After its warning the reentrant form raises an error, which the table reports.
                warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
                row |= train_torch(how, data) if framework == "torch" else train_jax(how, data)
        except RuntimeError as error:
            # The reentrant form cannot train a layer whose input needs no gradient, such as a first layer.
            row |= {"losses": [], "device": None, "host": None, "matmuls": None, "error": str(error).split(". ")[0]}
        rows.append(row)
    plain = np.array(rows[0]["losses"])
    for row in rows:
        row["difference"] = float(np.abs(np.array(row["losses"]) / plain - 1).max()) if row["losses"] else None
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or with `--json` one JSON object; the exit status is 0, or 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="recompute.py", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="steps of training (default 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    keep_to_cpu_without_gpu()
    with imports_frozen():  # counting kept bytes collects garbage, which takes long if much is imported
        rows = run_all(options.steps, lambda line: print(line, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps({"steps": options.steps, "rows": rows}))
        return 0
    written = [
        (
            row["framework"],
            row["form"],
            f"{row['losses'][0]:.5f}" if row["losses"] else None,
            f"{row['losses'][-1]:.5f}" if row["losses"] else None,
            f"{row['difference']:.1e}" if row["losses"] else None,
            row["device"],
            row["host"],
            row["matmuls"],
            row["error"] or "",
        )
        for row in rows
    ]
    formats = {"device": format_bytes, "host": format_bytes}
    print(render(table(f"{options.steps} steps of one decoder layer", COLUMNS, written, formats=formats)))
    return 0
