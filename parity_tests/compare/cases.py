"""Pairs of models that compute the same, as the arguments of `compare`, and ways to make the Flax one compute another thing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from examples.models import linen
from examples.models import nnx as nnx_models
from parity_tests import support as s
from parity_tests.third_party import ports as p
from parity_tests.third_party import test_gpt2, test_llama
from remat_jax.parity import ParityReport, compare

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
GPT2, LLAMA = test_gpt2.PORT, test_llama.PORTS["llama"]
QUICK: dict[str, Any] = {"modes": "off", "dtypes": "float64", "memory": False}
"""A comparison of a second: what is wrong in float64 needs no other dtype and no other mode to be found."""

Call = Callable[..., Any]


@functools.cache
def original(name: str) -> Any:
    """The PyTorch model in float32, one for all tests; `compare` does not change it."""
    return s.make_torch("DecoderStack", "float32") if name == "stack" else p.make_torch(GPT2, "float32")


def stack(api: str = "linen", **options: Any) -> dict[str, Any]:
    """The decoder stack of both frameworks."""
    if api == "nnx":
        from flax import nnx

        model: Any = nnx_models.DecoderStack(**s.SIZES["DecoderStack"], rngs=nnx.Rngs(0))
    else:
        model = linen.DecoderStack(**s.SIZES["DecoderStack"])
    inputs = (s.data("DecoderStack").x.astype(np.float32),)
    return {"torch_module": original("stack"), "flax_module": model, "inputs": inputs, "rules": STACK, **options}


def gpt2(scan: bool = False, **options: Any) -> dict[str, Any]:
    """GPT-2 of `transformers` and its port."""
    return {
        "torch_module": original("gpt2"),
        "flax_module": GPT2.make_flax(GPT2.config, scan=scan),
        "inputs": dict(GPT2.inputs),
        "rules": GPT2.rules(GPT2.config, scan),
        "torch_call": lambda model, **inputs: model(**inputs).logits,
        "flax_call": lambda model, **inputs: model(*GPT2.arguments(inputs)),
        **options,
    }


def run(case: dict[str, Any], **options: Any) -> ParityReport:
    """`compare` of a case."""
    return compare(**{**case, **options})


# Changes to a Flax model from outside: what stands at a path is called otherwise.

Change = Callable[[Call, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def at(path: str, change: Change) -> Callable[[Call], Call]:
    """A `flax_call` in which the module at `path` is called through `change`."""

    def wrap(call: Call) -> Call:
        def intercept(method: Call, args: Any, kwargs: Any, context: Any) -> Any:
            if "/".join(context.module.path) == path and context.method_name == "__call__":
                return change(method, context.module, args, kwargs)
            return method(*args, **kwargs)

        def changed(model: Any, *args: Any, **kwargs: Any) -> Any:
            with nn.intercept_methods(intercept):
                return call(model, *args, **kwargs)

        return changed

    return wrap


def plain(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def output(change: Call) -> Change:
    """The module's output goes through `change`."""
    return lambda method, module, args, kwargs: change(method(*args, **kwargs))


def detached(method: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The module's arguments have no gradient."""
    return method(*jax.lax.stop_gradient(args), **jax.lax.stop_gradient(kwargs))


def skipped(method: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The module gives its input back."""
    method(*args, **kwargs)
    return args[0] if args else kwargs["x"]


def without_bias_gradient(method: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The module's bias is a constant to the backward pass."""
    made = method(*args, **kwargs)
    bias = module.variables["params"]["bias"]
    return made - bias + jax.lax.stop_gradient(bias)


def scaled_cotangent(factor: float) -> Call:
    """The identity, the cotangent times `factor`."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent * factor,))
    return identity


def swapped_queries_and_keys(fused: jax.Array) -> jax.Array:
    query, key, value = jnp.split(fused, 3, axis=-1)
    return jnp.concatenate([key, query, value], axis=-1)


def another_epsilon(epsilon: float) -> Change:
    """A layer norm with another epsilon."""

    def norm(method: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        method(*args, **kwargs)
        x, weights = args[0], module.variables["params"]
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
        return centred * scale * weights["scale"] + weights["bias"]

    return norm
