"""A port and its original with the same weights and inputs, and one training step of both in every mode and dtype."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import remat_jax as rj
import torch_ref
from parity_tests import support as s
from parity_tests.small_pairs import gradients_of
from remat_jax import porting
from remat_jax.parity import keep_float64

MODES = torch_ref.MODES
POLICIES = {"off": "off", "checkpoint": "full", "offload": "offload_inputs"}
# PyTorch's default decay; optax has another. The epsilon is above the rounding of float32 gradients, which the step multiplies
# by learning rate / epsilon: with 1e-4 a correct port had up to 3 times PyTorch's error after a step.
ADAMW = {"weight_decay": 1e-2, "eps": 1e-3}
LEARNING_RATE = 1e-2
OPTAX_ADAMW = optax.adamw(LEARNING_RATE, **ADAMW)
IGNORED = -100  # an ignored label

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Port:
    """A model of `transformers` or `diffusers`, its Flax port, and data that use all of both.

    Attributes:
        config: the port's small configuration.
        make_torch: gives the original for a configuration of the port, initialised somehow.
        make_flax: gives the port: `make_flax(config, scan=…, param_dtype=…)`.
        torch_block, block: the classes that are checkpointed.
        rules: gives the weight map of a configuration: `rules(config, scan)`.
        inputs: the original's keyword arguments.
        constants: the keyword arguments that are no arrays.
        targets: for each output's name, in the port's order, integer labels or an array for the mean squared error.
        arguments: the port's positional arguments, made of the inputs.
        published: for each published configuration, the model's number of parameters.
        paper: gives the inputs of a published model, as arrays of any strides; by default those of the tests.
        carried: how many tokens go from layer to layer; by default those of the first output.
    """

    config: Any
    make_torch: Callable[[Any], torch.nn.Module]
    make_flax: Callable[..., nn.Module]
    torch_block: type[torch.nn.Module]
    block: type[nn.Module]
    rules: Callable[..., porting.Rules]
    inputs: Arrays
    targets: Arrays
    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    published: Mapping[Any, int] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    paper: Callable[[Any], Arrays] | None = None
    carried: int | None = None

    def apply(self, model: nn.Module, variables: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Run the port; its outputs have the names of the targets, in their order."""
        outputs = model.apply(variables, *self.arguments(inputs))
        return dict(zip(self.targets, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))


class Case(NamedTuple):
    """One training step: of PyTorch, or of JAX with its layers unrolled or scanned."""

    form: str
    mode: str
    dtype: str

    def __str__(self) -> str:
        return "-".join(self)


class Result(NamedTuple):
    """The results of a step, by PyTorch's names and in its shapes."""

    outputs: Arrays
    gradients: Arrays
    after_adamw: Arrays


# PyTorch.


@functools.cache
def weights(port: Port) -> dict[str, torch.Tensor]:
    """The state dict of all tests, in float64; nobody may change it."""
    torch.manual_seed(0)
    with keep_float64():
        model = port.make_torch(port.config)
    with torch.no_grad():  # at their initial 0 and 1, biases and scales would hide a wrong map
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.state_dict()


def precisely(dtype: str) -> Any:
    """In float64 nothing may fall back to float32; other dtypes run as a user runs them."""
    return keep_float64() if dtype == "float64" else contextlib.nullcontext()


def make_torch(port: Port, dtype: str, config: Any = None) -> torch.nn.Module:
    """A new original in training mode; with the port's own configuration it has the weights of all tests."""
    with precisely(dtype):
        model = port.make_torch(config or port.config).to(getattr(torch, dtype)).train()
        if config is None:
            model.load_state_dict(weights(port))
    return model


@contextlib.contextmanager
def in_mode(port: Port, model: torch.nn.Module, mode: str) -> Iterator[None]:
    """Checkpoint by the library's own switch, offload by `torch_ref`, because the library's offload needs an accelerator."""
    if mode == "checkpoint":
        # The same switch in `transformers` and in `diffusers`.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.enable_gradient_checkpointing
        enable()
    offloaded = torch_ref.checkpoint_blocks(model, {port.torch_block: POLICIES[mode]}) if mode == "offload" else None
    with offloaded or contextlib.nullcontext():
        yield


def torch_outputs(port: Port, model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    outputs = model(**inputs, **port.constants)
    return {name: outputs[name] for name in port.targets}


def torch_loss(outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of integer labels, else the mean squared error, summed over the outputs."""

    def single_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.is_floating_point():
            return s.mean_squared(output, target)
        return torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)

    return torch.stack([single_loss(outputs[name], target) for name, target in targets.items()]).sum()


def tensors(arrays: Arrays, dtype: str) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(array).to(getattr(torch, dtype) if array.dtype.kind == "f" else None)
        for name, array in arrays.items()
    }


@functools.cache
def torch_step(port: Port, mode: str, dtype: str) -> Result:
    """The original's step."""
    model = make_torch(port, dtype)
    with precisely(dtype), in_mode(port, model, mode):
        outputs = torch_outputs(port, model, tensors(port.inputs, dtype))
        torch_loss(outputs, tensors(port.targets, dtype)).backward()
    for parameter in model.parameters():
        # Parameters that the loss does not reach, such as the text stream after Qwen-Image's last attention, have no gradient
        # in PyTorch, and AdamW leaves them alone; in JAX they have zeros, and decay. Here both have zeros.
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = gradients_of(model)
    torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **ADAMW).step()
    return Result(numpy(outputs), gradients, numpy(model.state_dict()))


def numpy(named: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: porting.as_numpy(tensor) for name, tensor in named.items()}


# JAX.


def jax_loss(outputs: Mapping[str, jax.Array], targets: Mapping[str, jax.Array]) -> jax.Array:
    """The same as `torch_loss`."""

    def single_loss(output: jax.Array, target: jax.Array) -> jax.Array:
        if jnp.issubdtype(target.dtype, jnp.floating):
            return s.mean_squared(output, target)
        counted = target != IGNORED
        each = optax.softmax_cross_entropy_with_integer_labels(output, jnp.where(counted, target, 0))
        return jnp.sum(each * counted) / jnp.sum(counted)

    return sum((single_loss(outputs[name], target) for name, target in targets.items()), jnp.zeros(()))


def batch(port: Port, dtype: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    inputs, targets = ({name: s.in_dtype(x, dtype) for name, x in arrays.items()} for arrays in (port.inputs, port.targets))
    return inputs, targets


def shapes(port: Port, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The port's variables, never allocated."""
    return jax.eval_shape(lambda x: model.init(jax.random.key(0), *port.arguments(x)), inputs)


@functools.cache
def empty(port: Port, scan: bool) -> Any:
    """The shapes of the variables of the port's own configuration; nobody may change them."""
    return shapes(port, port.make_flax(port.config, scan=scan), port.inputs)


@functools.cache
def variables(port: Port, scan: bool, dtype: str) -> Any:
    """The port's variables with the weights of all tests; nobody may change them."""
    return porting.from_torch(weights(port), empty(port, scan), port.rules(port.config, scan), dtype=dtype)


def loss_of(port: Port, model: nn.Module) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    def loss(variables: Any, inputs: Any, targets: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        outputs = port.apply(model, variables, inputs)
        return jax_loss(outputs, targets), outputs

    return loss


def jax_step(port: Port, case: Case) -> Result:
    """The port's step."""
    scan = case.form == "scan"
    loss = loss_of(port, port.make_flax(port.config, scan=scan))
    if case.mode != "off":
        loss = rj.checkpoint_blocks(loss, {port.block: POLICIES[case.mode]})

    with jax.enable_x64(case.dtype == "float64"):
        given = variables(port, scan, case.dtype)
        gradients, outputs = s.run(jax.grad(loss, has_aux=True), given, *batch(port, case.dtype))
        after = s.on_one_vector(s.first_step(OPTAX_ADAMW), gradients, given)
        rules = port.rules(port.config, scan)
        return Result(
            {name: np.asarray(x) for name, x in outputs.items()},
            porting.gradients_to_torch(gradients, rules, numpy=True),
            porting.to_torch(after, rules, like=weights(port), numpy=True),
        )
