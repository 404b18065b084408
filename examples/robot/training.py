"""Trains one policy in both frameworks, in every mode, from the same weights and on the same batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import torch

import remat_jax as rj
import torch_ref
from remat_jax import porting
from remat_jax.cost.count import matmuls
from remat_jax.parity.compiling import compile_options

from .. import pytorch
from ..models import pi0
from ..models.pi0_config import Pi0Config
from ..models.rules.pi0 import rules
from ..models.siglip import SiglipBlock
from ..pytorch.faithful import PI0Pytorch
from .data import Batch

BLOCKS = (pi0.JointLayer, SiglipBlock)
POLICIES = {"off": "off", "checkpoint": "full", "offload": "offload_inputs"}
FAITHFUL = "OpenPI's own"
# Adam's epsilon exceeds the rounding error of a gradient, which a step multiplies by learning rate / epsilon.
LEARNING_RATE, EPSILON = 2e-3, 1e-4


@dataclass
class Row:
    """The results of one form.

    Attributes:
        losses: of each step of training.
        held_out: the loss on a batch that is not trained on, before and after training.
        device_bytes, host_bytes: kept between the passes; parameters and batch left out.
        matmuls: matrix multiplications of a step.
        layer_runs: how often a joint layer and a layer of the tower are executed in a step, at most; PyTorch only.
        difference: the largest relative difference of a loss from that of plain PyTorch.
    """

    framework: str
    form: str
    losses: list[float]
    held_out: tuple[float, float]
    device_bytes: int
    host_bytes: int
    matmuls: int
    layer_runs: tuple[int, int] | None = None
    difference: float = 0.0

    @property
    def has_learnt(self) -> bool:
        """Whether the loss on held-out data has fallen by at least a third."""
        return self.held_out[1] < self.held_out[0] * 2 / 3


def torch_model(config: Pi0Config) -> pytorch.Pi0:
    """The policy with the initial weights of every form, in float64 and in training mode."""
    torch.manual_seed(0)
    return pytorch.Pi0(config).double().train()


def tensors(batch: Batch) -> tuple[Any, ...]:
    """A batch for PyTorch: channels first."""
    observation = batch.observation._replace(images=np.moveaxis(batch.observation.images, -1, 2).copy())
    return pytorch.Observation(*map(torch.from_numpy, observation)), *map(torch.from_numpy, batch[1:])


def train_torch(config: Pi0Config, form: str, data: list[Batch], held_out: Batch) -> Row:
    """Train in PyTorch: `off`, `checkpoint`, `offload`, or as OpenPI does."""
    model = torch_model(config)
    if form == FAITHFUL:
        faithful = PI0Pytorch(model).train()
        faithful.gradient_checkpointing_enable()
        loss_of: Callable[..., torch.Tensor] = faithful.loss
    else:
        loss_of = functools.partial(model.loss, **torch_ref.mode_flags(form))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    saved = torch_ref.saved_for_backward(loss_of, *tensors(data[0]))
    towers = (pytorch.Pi0Layer, pytorch.SiglipLayer)
    losses, before = [], _evaluate(model, held_out)
    for batch in data:
        optimizer.zero_grad()
        with torch_ref.count_matmuls() as count, torch_ref.count_calls(*towers) as calls:
            loss = loss_of(*tensors(batch))
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    runs = tuple(max(n for module, n in calls.per_module.items() if isinstance(module, one)) for one in towers)
    after = _evaluate(model, held_out)
    return Row("PyTorch", form, losses, (before, after), saved.device_bytes, saved.host_bytes, count.total, runs)


def _evaluate(model: pytorch.Pi0, batch: Batch) -> float:
    with torch.no_grad():
        return model.loss(*tensors(batch)).item()


def train_jax(config: Pi0Config, mode: str, data: list[Batch], held_out: Batch) -> Row:
    """Train the Flax twin in a mode, its layers scanned."""
    with jax.enable_x64(True):
        plain = pi0.Pi0(config, scan=True, param_dtype="float64")
        model = plain if mode == "off" else rj.enable_gradient_checkpointing(plain, POLICIES[mode], blocks=BLOCKS)
        first = data[0]
        empty = jax.eval_shape(plain.init, jax.random.key(0), first.observation, first.actions, first.time)
        params = porting.from_torch(torch_model(config).state_dict(), empty, rules(config, scan=True))["params"]
        return _train_jax(plain, model, mode, params, data, held_out)


def _train_jax(plain: Any, model: Any, mode: str, params: Any, data: list[Batch], held_out: Batch) -> Row:
    loss_of, optimizer = functools.partial(pi0.flow_matching_loss, model), optax.adam(LEARNING_RATE, eps=EPSILON)
    gradient = jax.jit(jax.value_and_grad(loss_of))  # jitted, so that the step and the count share one trace

    def step(params: Any, state: Any, *batch: Any) -> Any:
        loss, gradients = gradient(params, *batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    evaluate = _evaluation(plain)
    before, state = float(evaluate(params, *held_out)), optimizer.init(params)
    job = rj.Workload(functools.partial(pi0.flow_matching_loss, plain), params, tuple(data[0]), BLOCKS)
    kept, executed = rj.residuals(job, POLICIES[mode]), matmuls(gradient, params, *data[0])
    compiled, losses = _compile(step, params, state, *data[0]), []
    for batch in data:
        params, state, loss = compiled(params, state, *batch)
        losses.append(float(loss))
    after = float(evaluate(params, *held_out))
    return Row("Flax", mode, losses, (before, after), kept.device_bytes, kept.host_bytes, executed)


@functools.cache
def _evaluation(plain: Any) -> Callable[..., Any]:
    """The loss of the plain model, compiled once for all modes."""
    return jax.jit(functools.partial(pi0.flow_matching_loss, plain), compiler_options=compile_options("float64"))


def _compile(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    return jax.jit(function).lower(*args).compile(compiler_options=compile_options("float64"))


def diagnose(config: Pi0Config, batch: Batch) -> list[str]:
    """The doctor's findings on OpenPI's own checkpoints, one line each, and its report on correct checkpoints."""
    observation, _, noise, time = tensors(batch)
    faithful = PI0Pytorch(torch_model(config)).train()
    faithful.gradient_checkpointing_enable()
    diagnosis = torch_ref.doctor(faithful, observation, noise, time)
    right = torch_ref.doctor(torch_model(config), observation, noise, time, use_gradient_checkpointing=True)
    return [f"{FAITHFUL}: {finding}" for finding in diagnosis.findings] + [f"checkpoint: {right}"]


def run_all(config: Pi0Config, data: list[Batch], held_out: Batch, progress: Callable[[str], None]) -> list[Row]:
    """Train every form; plain PyTorch comes first and is the reference."""
    rows = []
    for form in ("off", "checkpoint", "offload", FAITHFUL):
        progress(f"PyTorch: {form}")
        rows.append(train_torch(config, form, data, held_out))
    for mode in POLICIES:
        progress(f"Flax: {mode}")
        rows.append(train_jax(config, mode, data, held_out))
    plain = np.array(rows[0].losses)
    for row in rows:
        row.difference = float(np.abs(np.array(row.losses) / plain - 1).max())
    return rows
