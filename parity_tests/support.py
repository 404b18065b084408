"""Shared by the parity tests: the models in both frameworks with the same weights, their inputs, a quick compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import torch
from flax import nnx

from examples import pytorch, text
from examples.models import linen
from examples.models import nnx as nnx_models
from examples.models import weights as w
from remat_jax.core.matmuls import MATMULS
from remat_jax.parity import TOLERANCES, float64_error, judge
from remat_jax.parity.compiling import compile_options

# One thread: the pools of two frameworks on a few cores only alternate, and sums keep their order between runs.
torch.set_num_threads(1)

LIMIT = TOLERANCES["float64"].value
LAYERS = 2
SIZES: dict[str, dict[str, int]] = {
    "ToyModel": {},
    "DecoderLayer": {"d_model": 16, "nhead": 4},
    "DecoderStack": {"num_layers": LAYERS, "d_model": 16, "nhead": 4},
    "ByteDecoder": {"d_model": 16, "nhead": 4, "num_layers": LAYERS, "max_len": 12},
}
MODULES = {"linen": linen, "nnx": nnx_models}


def block_of(kind: str, api: str) -> type:
    """The checkpointed class of a model: `DecoderLayer`, or the toy itself."""
    return getattr(MODULES[api], "ToyModel" if kind == "ToyModel" else "DecoderLayer")


def quick(jitted: Any, *args: Any) -> Any:
    """Compile a jitted function for `args`, quickly: nothing here is timed."""
    return jitted.lower(*args).compile(compiler_options=compile_options("float64"))


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Compile `function` quickly and call it once."""
    return quick(jax.jit(function), *args)(*args)


@functools.cache
def first_step(optimizer: optax.GradientTransformation) -> Callable[[Any, Any], Any]:
    """The optimizer's first step on a vector of gradients and one of parameters, compiled once for all tests."""

    def step(gradients: Any, parameters: Any) -> Any:
        updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
        return optax.apply_updates(parameters, updates)

    return jax.jit(step, compiler_options=compile_options("float64"))


def on_one_vector(step: Callable[..., Any], *trees: Any) -> Any:
    """`step`, which treats each number alone, on trees of one structure: their arrays are joined, which compiles quickly."""
    arrays, structure = jax.tree.flatten(trees[0])
    assert len({array.dtype for array in arrays}) == 1
    joined = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in trees)
    parts = np.split(np.asarray(step(*joined)), np.cumsum([array.size for array in arrays])[:-1])
    after = [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]
    return jax.tree.unflatten(structure, after)


class Data(NamedTuple):
    """The inputs of a model in float64 or integers, and its target: for the decoder the next bytes, else an array."""

    x: np.ndarray
    target: np.ndarray


def data(kind: str) -> Data:
    if kind == "ByteDecoder":
        return Data(*text.batches(seed=0, batch=2, length=9, steps=1)[0])
    random = np.random.default_rng(1)
    return Data(random.normal(size=(2, 7, 16)), random.normal(size=(2, 7, 16)))


def make_torch(kind: str, dtype: str = "float64") -> torch.nn.Module:
    """A new PyTorch model with the weights of all tests."""
    torch.manual_seed(0)
    model = getattr(pytorch, kind)(**SIZES[kind]).double()
    with torch.no_grad():  # at their initial 0 and 1, biases and scales would hide a wrong map
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(getattr(torch, dtype))


@functools.cache
def torch_model(kind: str) -> torch.nn.Module:
    """`make_torch` in float64, shared by all tests; nobody may change it."""
    return make_torch(kind)


def parameters(kind: str, scan: bool, dtype: str = "float64") -> dict[str, Any]:
    """The same weights in Linen's tree, NumPy arrays."""
    tree = w.from_torch(torch_model(kind).state_dict(), kind, scan=scan)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


class Twin(NamedTuple):
    """A Flax model as a function: `apply(parameters, *inputs, method=…)`; `tree` converts the parameters to Linen's form."""

    apply: Callable[..., jax.Array]
    parameters: Any
    tree: Callable[[Any], dict[str, Any]]


def twin(kind: str, api: str, scan: bool, tree: dict[str, Any]) -> Twin:
    """The Flax model of Linen or NNX that holds the weights `tree`."""
    options = SIZES[kind] | ({"scan": scan} if "num_layers" in SIZES[kind] else {})
    make = getattr(MODULES[api], kind)
    if api == "linen":
        model = make(**options)
        return Twin(lambda p, *inputs, **kwargs: model.apply({"params": p}, *inputs, **kwargs), tree, lambda p: p)
    # Abstract until it is loaded: a parameter without a value could not be computed with.
    model = nnx.eval_shape(lambda: make(**options) if kind == "ToyModel" else make(**options, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(w.load_nnx(model, tree))

    def apply(state: Any, *inputs: Any, method: str = "__call__") -> jax.Array:
        return getattr(type(model), method)(nnx.merge(graph, state), *inputs)

    return Twin(apply, state, w.nnx_tree)


def mean_squared(output: Any, target: Any) -> Any:
    """The mean squared error, written once for both frameworks' arrays."""
    return ((output - target) ** 2).mean()


def in_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """A floating-point array in `dtype`, an integer one as it is."""
    return x.astype(dtype) if x.dtype.kind == "f" else x


def differences(exact: Any, result: Any, plain: Any, dtype: str) -> list[str]:
    """The differences between two results of groups of tensors, from plain PyTorch in float64; empty if there are none.

    Float64: the largest error per tensor. Other dtypes: the parity rule, with plain PyTorch's own error as the measure.
    """
    wrong = []
    for group, reference, candidate, yardstick in zip(exact._fields, exact, result, plain, strict=True):
        if not reference and not candidate:  # a model without parameters
            continue
        if dtype == "float64":
            error, where = float64_error(reference, candidate)
            wrong += [f"{group}: {where} is {error:.1e} off"] if not error <= LIMIT else []
        else:
            failed = [row for row in judge(reference, candidate, yardstick, dtype) if not row.passed]
            wrong += [f"{group}: {row.name} {row.problem or f'has {row.ratio:.1f} times the error'}" for row in failed]
    return wrong


# The meaning of a jaxpr's equations, for `remat_jax.cost.count.count`.


def is_matmul(eqn: Any) -> bool:
    return eqn.primitive.name in MATMULS


def bytes_to_host(eqn: Any) -> int:
    return sum(_nbytes(out) for out in eqn.outvars if _is_on_host(out)) if eqn.primitive.name == "device_put" else 0


def bytes_back(eqn: Any) -> int:
    return sum(_nbytes(atom) for atom in eqn.invars if _is_on_host(atom)) if eqn.primitive.name == "device_put" else 0


def _is_on_host(atom: Any) -> bool:
    return atom.aval.memory_space == jax.memory.Space.Host


def _nbytes(atom: Any) -> int:
    return atom.aval.size * atom.aval.dtype.itemsize
