"""The right pairs, as the arguments of `compare`; right settings pass and raise no alarm."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from examples.models import linen
from parity_tests import support as s
from parity_tests.third_party import ports as p
from parity_tests.third_party.of_transformers import PORTS
from parity_tests.third_party.ports import Port
from remat_jax.parity import ParityReport, compare

QUICK: dict[str, Any] = {"modes": "off", "dtypes": "float64", "memory": False}
"""A comparison of one second: faults in float64 need no other dtype or mode."""

STACK = """
    layers.{i}.self_attn.in_proj_weight -> params/layers_{i}/self_attn/in_proj/kernel | linear
    layers.{i}.self_attn.in_proj_bias -> params/layers_{i}/self_attn/in_proj/bias
    layers.{i}.self_attn.out_proj.weight -> params/layers_{i}/self_attn/out_proj/kernel | linear
    layers.{i}.self_attn.out_proj.bias -> params/layers_{i}/self_attn/out_proj/bias
    layers.{i}.ffn.0.weight -> params/layers_{i}/ffn/up/kernel | linear
    layers.{i}.ffn.0.bias -> params/layers_{i}/ffn/up/bias
    layers.{i}.ffn.2.weight -> params/layers_{i}/ffn/down/kernel | linear
    layers.{i}.ffn.2.bias -> params/layers_{i}/ffn/down/bias
    layers.{i}.norm{n}.weight -> params/layers_{i}/norm{n}/scale
    layers.{i}.norm{n}.bias -> params/layers_{i}/norm{n}/bias
"""
DECODER = f"""
    embedding.weight -> params/embed/embedding
    position.weight -> params/positions/embedding
    {STACK.replace("    layers", "    decoder.layers")}
    head.weight -> params/head/kernel | linear
    head.bias -> params/head/bias
"""
# A square output projection, norms of queries and keys, biases, tied embeddings, a padding token.
LLAMA = dataclasses.replace(PORTS["qwen3"], config=dataclasses.replace(PORTS["qwen3"].config, head_dim=8, padding=0))


# A small residual convolutional net with batch norms, written once in each framework.

WIDTH, CLASSES = 8, 8  # a square head, whose transpose would fit
CONV = """
    stem.weight -> params/stem/kernel | conv2d
    stem.bias -> params/stem/bias
    norm.weight -> params/norm/scale
    norm.bias -> params/norm/bias
    norm.running_{which} -> batch_stats/norm/{which}
    blocks.{i}.conv{n}.weight -> params/blocks_{i}/conv{n}/kernel | conv2d
    blocks.{i}.conv{n}.bias -> params/blocks_{i}/conv{n}/bias
    blocks.{i}.norm.weight -> params/blocks_{i}/norm/scale
    blocks.{i}.norm.bias -> params/blocks_{i}/norm/bias
    blocks.{i}.norm.running_{which} -> batch_stats/blocks_{i}/norm/{which}
    head.weight -> params/head/kernel | linear
    head.bias -> params/head/bias
    extra: *num_batches_tracked
"""


class TorchBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv2d(WIDTH, WIDTH, 3, padding=1), torch.nn.Conv2d(WIDTH, WIDTH, 1)
        self.norm, self.act = torch.nn.BatchNorm2d(WIDTH), torch.nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(self.act(self.norm(self.conv1(x))))


class TorchConvNet(torch.nn.Module):
    """Images (B, 3, H, W) to logits (B, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = torch.nn.Conv2d(3, WIDTH, 3, stride=2, padding=1), torch.nn.BatchNorm2d(WIDTH)
        self.blocks = torch.nn.ModuleList([TorchBlock(), TorchBlock()])
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class BatchNorm(nn.BatchNorm):
    """Flax's batch norm; with `unbiased` it keeps n / (n - 1) times a batch's variance, as PyTorch does."""

    unbiased: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, **options: Any) -> jax.Array:
        before = self.variables.get("batch_stats", {}).get("var")
        made = super().__call__(x, **options)
        if self.unbiased and before is not None and not self.use_running_average:
            count = x.size // x.shape[-1]
            kept = self.momentum * before
            after = self.get_variable("batch_stats", "var")
            self.put_variable("batch_stats", "var", kept + (after - kept) * count / (count - 1))
        return made


def batch_norm(train: bool) -> BatchNorm:
    """The norm with PyTorch's epsilon, momentum and two-pass variance."""
    return BatchNorm(not train, momentum=0.9, epsilon=1e-5, use_fast_variance=False, name="norm")


class Block(nn.Module):
    """As `TorchBlock`, channels last."""

    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = batch_norm(self.train)(nn.Conv(WIDTH, (3, 3), padding=1, name="conv1")(x))
        return x + nn.Conv(WIDTH, (1, 1), name="conv2")(nn.gelu(y, approximate=False))


class ConvNet(nn.Module):
    """As `TorchConvNet`: images (B, H, W, 3) to logits."""

    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (3, 3), strides=2, padding=1, name="stem")(x)
        x = nn.relu(batch_norm(self.train)(x))
        for index in range(2):
            x = Block(self.train, name=f"blocks_{index}")(x)
        return nn.Dense(CLASSES, name="head")(jnp.mean(x, (1, 2)))


# The pairs.


def decoder(**options: Any) -> dict[str, Any]:
    """The decoder of the examples over bytes, causal."""
    return {
        "torch_module": s.torch_model("ByteDecoder"),
        "flax_module": linen.ByteDecoder(**s.SIZES["ByteDecoder"]),
        "inputs": (s.data("ByteDecoder").x.astype(np.int64),),
        "rules": DECODER,
        **options,
    }


@functools.cache
def torch_convnet(train: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    return TorchConvNet().train(train)


def conv(train: bool = True, **options: Any) -> dict[str, Any]:
    """A convolutional net with batch norms, in train mode or in evaluation."""
    return {
        "torch_module": torch_convnet(train),
        "flax_module": ConvNet(train),
        "inputs": (np.random.default_rng(0).normal(size=(3, 8, 8, 3)),),
        "rules": CONV,
        "torch_call": lambda model, x: model(x.permute(0, 3, 1, 2)),
        **options,
    }


@functools.cache
def original(port: Port) -> torch.nn.Module:
    return p.make_torch(port, "float64")


def transformer(port: Port, scan: bool = False, **options: Any) -> dict[str, Any]:
    """A model of `transformers` and its port."""
    return {
        "torch_module": original(port),
        "flax_module": port.make_flax(port.config, scan=scan),
        "inputs": dict(port.inputs),
        "rules": port.rules(port.config, scan),
        "torch_call": lambda model, **inputs: p.torch_outputs(port, model, inputs),
        "flax_call": lambda model, **inputs: named(port, model(*port.arguments(inputs))),
        **options,
    }


def named(port: Port, outputs: Any) -> dict[str, Any]:
    return dict(zip(port.targets, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))


@functools.cache
def torch_stack() -> Any:
    """The PyTorch model in float32, shared by all tests; `compare` does not change it."""
    return s.make_torch("DecoderStack", "float32")


def stack(api: str = "linen", **options: Any) -> dict[str, Any]:
    """The decoder stack of both frameworks."""
    more = {"rngs": nnx.Rngs(0)} if api == "nnx" else {}
    model = s.MODULES[api].DecoderStack(**s.SIZES["DecoderStack"], **more)
    inputs = (s.data("DecoderStack").x.astype(np.float32),)
    return {"torch_module": torch_stack(), "flax_module": model, "inputs": inputs, "rules": STACK, **options}


def run(case: dict[str, Any], **options: Any) -> ParityReport:
    """`compare` of a case."""
    return compare(**{**case, **options})


MODELS = {
    "decoder": decoder,
    "conv": conv,
    "gpt2": functools.partial(transformer, PORTS["gpt2"]),
    "llama": functools.partial(transformer, LLAMA),
}


@functools.cache
def variables(name: str) -> Any:
    """The variables of a right Flax model, never allocated; every mutant of the model has the same."""
    made = MODELS[name]()
    inputs, call = made["inputs"], made.get("flax_call", operator.call)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return jax.eval_shape(nn.init(call, made["flax_module"]), jax.random.key(0), *args, **kwargs)
