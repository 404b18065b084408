"""One `model_fn`, as in a diffusion pipeline, run by both frameworks with the same arguments.

Its blocks take everything by keyword: two streams, a dictionary, a pair of arrays, a plain number and None; they return both
streams. The frameworks differ only in the function that calls each block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import remat_jax as rj
import torch_ref
from parity_tests import support as s
from remat_jax.cost.count import count
from remat_jax.parity import float64_error

BATCH, TIME, WIDTH, BLOCKS = 2, 5, 8, 3
LINEARS = {"modulate": (WIDTH, 2 * WIDTH), "mix": (WIDTH, WIDTH), "gate": (WIDTH, WIDTH)}


def model_fn(
    forward: Callable[..., Any],
    blocks: Sequence[Any],
    image: Any,
    text: Any,
    time: Any,
    rotary: tuple[Any, Any],
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
) -> Any:
    """Run all blocks; `forward` is `gradient_checkpoint_forward` of either framework."""
    for block in blocks:
        text, image = forward(
            block,
            use_gradient_checkpointing=use_gradient_checkpointing,
            use_gradient_checkpointing_offload=use_gradient_checkpointing_offload,
            image=image,
            text=text,
            conditions={"time": time, "guidance": None},
            rotary=rotary,
            strength=0.5,
        )
    return image + text


def block_fn(layers: Any, tanh: Callable, image: Any, text: Any, conditions: Any, rotary: Any, strength: float) -> Any:
    """The mathematics of a block, in operators that both frameworks have."""
    assert conditions["guidance"] is None and type(strength) is float
    modulation = layers.modulate(conditions["time"])
    cos, sin = rotary
    hidden = image * (1 + modulation[..., :WIDTH]) + modulation[..., WIDTH:]
    mixed = tanh(layers.mix(hidden * cos + text * sin))
    return text + strength * layers.gate(mixed), image + mixed


class TorchBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (rows, columns) in LINEARS.items():
            setattr(self, name, torch.nn.Linear(rows, columns, bias=False, dtype=torch.float64))

    def forward(self, *, image: Any, text: Any, conditions: Any, rotary: Any, strength: float) -> Any:
        return block_fn(self, torch.tanh, image, text, conditions, rotary, strength)


class LinenBlock(nn.Module):
    def setup(self) -> None:
        for name, (_, columns) in LINEARS.items():
            setattr(self, name, nn.Dense(columns, use_bias=False))

    def __call__(self, *, image: Any, text: Any, conditions: Any, rotary: Any, strength: float) -> Any:
        return block_fn(self, jnp.tanh, image, text, conditions, rotary, strength)


class LinenPipeline(nn.Module):
    def setup(self) -> None:
        self.blocks = [LinenBlock() for _ in range(BLOCKS)]

    def __call__(self, *args: Any, **flags: bool) -> jax.Array:
        return model_fn(rj.gradient_checkpoint_forward, self.blocks, *args, **flags)


def in_linen(kernels: list[dict[str, Any]], *args: Any, **flags: bool) -> jax.Array:
    params = {f"blocks_{i}": {name: {"kernel": kernel} for name, kernel in each.items()} for i, each in enumerate(kernels)}
    return LinenPipeline().apply({"params": params}, *args, **flags)


@functools.cache
def arrays() -> tuple[list[dict[str, np.ndarray]], tuple[np.ndarray, ...], np.ndarray]:
    """Kernels (in, out) of every block; image, text, time, cos, sin; and the weights that reduce the output to a scalar."""
    random = np.random.default_rng(4)
    kernels = [{name: random.normal(size=size) * 0.4 for name, size in LINEARS.items()} for _ in range(BLOCKS)]
    stream = (BATCH, TIME, WIDTH)
    sizes = (stream, stream, (BATCH, 1, WIDTH), (TIME, WIDTH), (TIME, WIDTH))
    return kernels, tuple(random.normal(size=size) for size in sizes), random.normal(size=stream)


class Outcome(NamedTuple):
    tensors: dict[str, np.ndarray]
    matmuls: int
    to_host: int


@functools.cache
def in_torch(mode: str) -> Outcome:
    kernels, inputs, cotangent = arrays()
    blocks = [TorchBlock() for _ in kernels]
    with torch.no_grad():
        for block, each in zip(blocks, kernels, strict=True):
            for name, kernel in each.items():
                getattr(block, name).weight.copy_(torch.tensor(kernel.T))
    image, text, time, cos, sin = (torch.tensor(x, requires_grad=True) for x in inputs)
    with torch_ref.count_matmuls() as executed, torch_ref.receipt() as receipt:
        flags = torch_ref.mode_flags(mode)
        output = model_fn(torch_ref.gradient_checkpoint_forward, blocks, image, text, time, (cos, sin), **flags)
        (output * torch.tensor(cotangent)).sum().backward()
    weights = [{name: getattr(block, name).weight.grad.numpy().T for name in LINEARS} for block in blocks]
    gradients = [x.grad.numpy() for x in (image, text, time, cos, sin)]
    return Outcome(_named(output.detach().numpy(), weights, gradients), executed.total, receipt.bytes_on_host)


def in_jax(mode: str) -> Outcome:
    kernels, inputs, cotangent = arrays()

    def loss(kernels: Any, inputs: Any) -> Any:
        image, text, time, cos, sin = inputs
        output = in_linen(kernels, image, text, time, (cos, sin), **torch_ref.mode_flags(mode))
        return (output * cotangent).sum(), output

    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
        (weights, gradients), output = s.quick(gradient, kernels, inputs)(kernels, inputs)
        jaxpr = jax.make_jaxpr(gradient)(kernels, inputs)
    return Outcome(_named(output, weights, gradients), count(jaxpr, s.is_matmul), count(jaxpr, s.bytes_to_host))


def _named(output: Any, weights: list[dict[str, Any]], gradients: Sequence[Any]) -> dict[str, np.ndarray]:
    named = {f"{index}/{name}": x for index, each in enumerate(weights) for name, x in each.items()}
    named |= dict(zip(("image", "text", "time", "cos", "sin"), gradients, strict=True))
    return {name: np.asarray(x) for name, x in (named | {"output": output}).items()}


# Per block three products forward and six backward. The recomputation leaves out the last product, whose value nobody reads:
# PyTorch stops before it, JAX removes it.
MATMULS_PER_BLOCK = {"off": 9, "checkpoint": 11, "offload": 11}
STREAMS, SHARED = 2 * BATCH * TIME * WIDTH * 8, (BATCH + 2 * TIME) * WIDTH * 8


@pytest.mark.parametrize("mode", torch_ref.MODES)
def test_the_same_arguments_give_the_same_results(mode: str) -> None:
    plain, in_mode, ported = in_torch("off"), in_torch(mode), in_jax(mode)
    assert all(np.array_equal(plain.tensors[name], in_mode.tensors[name]) for name in plain.tensors)
    assert len(ported.tensors) == BLOCKS * len(LINEARS) + 6
    assert float64_error(plain.tensors, ported.tensors)[0] <= s.LIMIT
    assert ported.matmuls == in_mode.matmuls == BLOCKS * MATMULS_PER_BLOCK[mode]
    # PyTorch copies shared arguments once. In JAX they stay on the device: the compiler drops the copy that the first block
    # makes before another block is known.
    assert ported.to_host == in_mode.to_host == (BLOCKS * STREAMS + SHARED if mode == "offload" else 0)
