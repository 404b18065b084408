"""The right pairs, as the arguments of `compare`; right settings pass and raise no alarm."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import torch

from examples.models import linen
from parity_tests import support as s
from parity_tests.mutants import convnet
from parity_tests.third_party import ports as p
from parity_tests.third_party import test_gpt2, test_llama
from parity_tests.third_party.ports import Port

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
LLAMA = dataclasses.replace(
    test_llama.PORTS["qwen3"],
    config=dataclasses.replace(test_llama.PORTS["qwen3"].config, head_dim=8, padding=0),
)


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
    return convnet.TorchConvNet().train(train)


def conv(train: bool = True, **options: Any) -> dict[str, Any]:
    """A convolutional net with batch norms, in train mode or in evaluation."""
    return {
        "torch_module": torch_convnet(train),
        "flax_module": convnet.ConvNet(train),
        "inputs": (np.random.default_rng(0).normal(size=(3, 8, 8, 3)),),
        "rules": convnet.RULES,
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


MODELS = {
    "decoder": decoder,
    "conv": conv,
    "gpt2": functools.partial(transformer, test_gpt2.PORT),
    "llama": functools.partial(transformer, LLAMA),
}


@functools.cache
def variables(name: str) -> Any:
    """The variables of a right Flax model, never allocated; every mutant of the model has the same."""
    made = MODELS[name]()
    inputs, call = made["inputs"], made.get("flax_call", operator.call)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return jax.eval_shape(nn.init(call, made["flax_module"]), jax.random.key(0), *args, **kwargs)
