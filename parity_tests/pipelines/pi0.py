"""A small π0 and π0.5 with the same weights in both frameworks, and data that use every part of them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

import remat_jax as rj
import torch_ref
from examples import pytorch
from examples.models import pi0
from examples.models.pi0_config import Observation, Pi0Config
from examples.models.rules.pi0 import rules
from examples.models.siglip import SiglipBlock
from examples.pytorch.faithful import PI0Pytorch
from parity_tests import support as s
from remat_jax import porting

POLICIES = {"off": "off", "checkpoint": "full", "offload": "offload_inputs"}
BLOCKS = (pi0.JointLayer, SiglipBlock)
FAITHFUL = ("enabled", "disabled")
# All sizes differ, so that a misplaced tensor does not fit.
CONFIGS = {
    name: Pi0Config(widths=(24, 20), mlp_dims=(40, 36), depth=2, num_heads=4, num_kv_heads=2, head_dim=6, adaptive=adaptive)
    for name, adaptive in (("pi0", False), ("pi05", True))
}


class Step(NamedTuple):
    """The results of a step, by PyTorch's names; unused parameters have a gradient of zero."""

    loss: np.ndarray
    gradients: dict[str, np.ndarray]


@functools.cache
def batch(config: Pi0Config, dtype: str = "float64") -> tuple[Any, ...]:
    """Observation, actions, noise and time; one camera is missing, prompts are padded, times are at both ends."""
    random, size, n = np.random.default_rng(0), config.image_size, 3
    images = random.normal(size=(n, config.num_images, size, size, 3))
    present = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 1]], bool)
    prompt = random.integers(0, config.vocab_size, (n, config.prompt_length))
    words = np.arange(config.prompt_length) < np.array([[config.prompt_length], [5], [0]])
    state = random.normal(size=(n, config.action_dim))
    actions, noise = random.normal(size=(2, n, config.horizon, config.action_dim))
    observation = Observation(images, present, prompt, words, state)
    return jax.tree.map(lambda x: s.in_dtype(x, dtype), (observation, actions, noise, np.array([0.001, 0.4, 1.0])))


def as_torch(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same for PyTorch: channels first."""
    observation = given[0]._replace(images=np.moveaxis(given[0].images, -1, 2).copy())
    return pytorch.Observation(*map(torch.tensor, observation)), *map(torch.tensor, given[1:])


@functools.cache
def weights(config: Pi0Config) -> dict[str, torch.Tensor]:
    """The state dict of all tests, in float64: at their initial 0 gates and scales would hide a wrong map."""
    torch.manual_seed(0)
    model = pytorch.Pi0(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.state_dict()


def make_torch(config: Pi0Config, dtype: str = "float64") -> pytorch.Pi0:
    """A fresh model in training mode with the weights of all tests."""
    model = pytorch.Pi0(config).to(getattr(torch, dtype))
    model.load_state_dict(weights(config))
    return model.train()


def faithful(model: pytorch.Pi0, switch: str) -> PI0Pytorch:
    """OpenPI's form of a model, its switch `enabled` or `disabled`."""
    made = PI0Pytorch(model).train()
    made.gradient_checkpointing_enable()
    if switch == "disabled":
        made.gradient_checkpointing_disable()
    return made


@functools.cache
def torch_step(config: Pi0Config, form: str = "off", dtype: str = "float64") -> Step:
    """PyTorch's step: in a mode of the correct form, or under OpenPI's switch."""
    model = make_torch(config, dtype)
    if form in FAITHFUL:
        loss = faithful(model, form).loss(*as_torch(batch(config, dtype)))
    else:
        loss = model.loss(*as_torch(batch(config, dtype)), **torch_ref.mode_flags(form))
    loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return Step(loss.detach().numpy(), {name: porting.as_numpy(gradient) for name, gradient in gradients.items()})


def make_flax(config: Pi0Config, mode: str, scan: bool, dtype: str = "float64") -> tuple[Any, Any]:
    """The Flax model under the switch, and its parameters."""
    plain = pi0.Pi0(config, scan=scan, param_dtype=dtype)
    observation, actions, _, time = batch(config, dtype)
    empty = jax.eval_shape(plain.init, jax.random.key(0), observation, actions, time)
    params = porting.from_torch(weights(config), empty, rules(config, scan), dtype=dtype)["params"]
    model = plain if mode == "off" else rj.enable_gradient_checkpointing(plain, POLICIES[mode], blocks=BLOCKS)
    return model, params


def jax_step(config: Pi0Config, mode: str, scan: bool, dtype: str = "float64") -> Step:
    """The step in Flax, in a mode."""
    with jax.enable_x64(dtype == "float64"):
        model, params = make_flax(config, mode, scan, dtype)
        step = jax.value_and_grad(functools.partial(pi0.flow_matching_loss, model))
        compiled = s.quick(jax.jit(step), params, *batch(config, dtype)) if dtype == "float64" else jax.jit(step)
        loss, gradients = compiled(params, *batch(config, dtype))
        ported = porting.gradients_to_torch({"params": gradients}, rules(config, scan), numpy=True)
        return Step(np.asarray(loss), dict(ported))
