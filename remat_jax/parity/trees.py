"""Trees of arrays in both frameworks: a model's outputs as name → array, the default loss, weights that expose faults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_jax.errors import ArgumentError
from remat_jax.porting.tensors import as_numpy, as_torch, is_torch


def is_floating(value: object) -> bool:
    """Whether a value is a NumPy or JAX array, or its abstract value, of a floating-point dtype, including bfloat16."""
    return hasattr(value, "dtype") and bool(jnp.issubdtype(value.dtype, jnp.floating))


def named_outputs(result: object, side: str) -> dict[str, Any]:
    """The arrays of an output by name: keys, fields and positions joined by dots, without None.

    >>> sorted(named_outputs({"logits": np.zeros(2), "states": (np.zeros(1), None)}, "flax"))
    ['logits', 'states.0']
    """
    arrays = dict(_named_arrays(result, "", side))
    if not arrays:
        raise ArgumentError(f"{side}_module: its output holds no array; return arrays, or select them with {side}_call")
    return arrays


def _named_arrays(value: object, name: str, side: str) -> Iterator[tuple[str, Any]]:
    children = _children(value)
    if children is not None:
        for key, child in children.items():
            yield from _named_arrays(child, f"{name}.{key}" if name else str(key), side)
    elif _is_array(value) and not (side == "flax" and is_torch(value)):
        yield name or "output", value
    elif value is not None:
        raise ArgumentError(
            f"{side}_module: its output {name or 'as a whole'} is a {type(value).__name__}, not an array; select arrays with "
            f"{side}_call, such as lambda model, *inputs: model(*inputs).logits"
        )


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _children(value: object) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "dtype"):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def fields(value: object, prefix: str = "") -> dict[str, Any]:
    """The parts of an output that have a name, by name: keys, fields and the positions inside them, joined by dots.

    >>> sorted(fields({"logits": 1, "states": (2, {"last": 3})})), fields((1, 2)), fields(({"a": 1}, 2))
    (['logits', 'states.0', 'states.1.last'], {}, {'0.a': 1})
    """
    children = _children(value)
    if children is None:
        return {prefix: value} if re.search("[^0-9.]", prefix) else {}
    parts = [fields(child, f"{prefix}.{name}" if prefix else str(name)) for name, child in children.items()]
    return {name: part for each in parts for name, part in each.items()}


def in_order(value: object) -> list[Any]:
    """The arrays of an output, sorted by name if they have names: the frameworks order the keys of a dict differently.

    >>> in_order({"b": (np.ones(1), None), "a": np.zeros(1)})
    [array([0.]), array([1.])]
    """
    children = _children(value)
    if children is None:
        return [value] if _is_array(value) else []
    named = all(isinstance(name, str) for name in children)
    return [leaf for name in (sorted(children) if named else children) for leaf in in_order(children[name])]


def same_names(torch: Mapping[str, tuple[int, ...]], flax: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Flax's name → PyTorch's name, for outputs given as name → shape; if both have one output, the names may differ."""
    single = len(torch) == len(flax) == 1
    names = dict(zip(flax, torch if single else flax, strict=True))
    problems = [f"{name} {shape}: only PyTorch has it" for name, shape in torch.items() if name not in names.values()]
    problems += [f"{name} {shape}: only Flax has it" for name, shape in flax.items() if names[name] not in torch]
    problems += [
        f"{names[name]}: {torch[names[name]]} in PyTorch and {shape} in Flax"
        for name, shape in flax.items()
        if names[name] in torch and torch[names[name]] != shape
    ]
    if problems:
        raise ArgumentError(
            "the outputs differ in their names or shapes; make them equal with torch_call or flax_call:\n  "
            + "\n  ".join(problems)
        )
    return names


def default_targets(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The target of every output in the default loss: random numbers, so that all cotangents differ."""
    return {name: np.random.default_rng((11, i)).normal(size=shape) for i, (name, shape) in enumerate(sorted(shapes.items()))}


def default_loss(outputs: Mapping[str, Any], targets: Mapping[str, Any]) -> Any:
    """The default loss of `compare`: each output's squared distance from its target, divided by √size, summed over outputs.

    Division by the size itself would make gradients underflow in float16.
    """
    return sum(
        in_halves((outputs[name] - target) ** 2) * float(max(1, np.prod(target.shape)) ** -0.5)
        for name, target in targets.items()
    )


def in_halves(x: Any) -> Any:
    """The sum of an array of either framework by pairwise summation.

    On a CPU, XLA's sequential sum has several times PyTorch's rounding error, although the port is correct.

    >>> float(in_halves(np.arange(7.0)))
    21.0
    """
    x, odd = x.reshape(-1), []
    while len(x) > 1:
        half = len(x) // 2
        odd += [x[2 * half]] if len(x) % 2 else []
        x = x[:half] + x[half : 2 * half]
    return sum(odd, start=x.sum())


def excite(variables: Any, seed: int = 0, scale: float = 0.2) -> Any:
    """Return `variables`, a tree of arrays or a PyTorch state dict, with random numbers in every array that is constant.

    Biases of 0, norm parameters of 1 and running variances of 1 hide a wrong map, a missing bias, and a norm that uses
    1 + weight instead of weight. An array of zeros becomes `scale` times normal numbers. Another constant array is multiplied
    by exponentials of such numbers, so it keeps its sign. Arrays that vary, integers and booleans stay the same, and tied
    weights stay tied. The numbers depend on the seed and on the array's position in the tree.

    Raises:
        ArgumentError: `scale` is not positive.

    >>> made = excite({"bias": np.zeros(3), "scale": np.ones(3), "kernel": np.eye(2)})
    >>> bool(np.all(made["scale"] > 0)), float(np.std(made["bias"])) > 0, made["kernel"].tolist()
    (True, True, [[1.0, 0.0], [0.0, 1.0]])
    """
    if not scale > 0:
        raise ArgumentError(f"scale={scale!r}: expected a positive number, such as 0.2; with 0 nothing changes")
    leaves, treedef = jax.tree.flatten(variables, is_leaf=is_torch)
    made: dict[Any, Any] = {}
    for number, leaf in enumerate(tuple(leaves)):  # the tuple holds the leaves, so that no address is used twice
        if hasattr(leaf, "__array__"):
            key = (leaf.data_ptr(), tuple(leaf.shape)) if is_torch(leaf) and leaf.numel() else id(leaf)
            made.setdefault(key, _excited(leaf, np.random.default_rng((seed, number)), scale))
            leaves[number] = made[key]
    return jax.tree.unflatten(treedef, leaves)


def _excited(leaf: Any, random: np.random.Generator, scale: float) -> Any:
    array = as_numpy(leaf)
    if not jnp.issubdtype(array.dtype, np.floating) or not array.size or np.any(array != array.flat[0]):
        return leaf
    noise = scale * random.normal(size=array.shape)
    made = (noise if array.flat[0] == 0 else array * np.exp(noise)).astype(array.dtype)
    return as_torch(made) if is_torch(leaf) else made if isinstance(leaf, np.ndarray) else jnp.asarray(made)
