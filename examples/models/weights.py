"""A table that maps weights and gradients of the PyTorch reference models to their Flax counterparts.

Parameters have one form here: Linen's tree of nested dictionaries, `layers_0/…` unrolled or `layers/…` stacked on axis
0. `load_nnx` and `nnx_tree` carry that form into an NNX model and back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from remat_jax.porting import as_numpy

Array = Any
Tree = dict[str, Any]


class Entry(NamedTuple):
    """One line of the map: a PyTorch tensor, its Flax path, the transform, and that transform's adjoint.

    The adjoint pulls a Flax gradient back into PyTorch's shape. Each transform here is a permutation, so its adjoint
    is also its inverse, and the transform itself carries gradients from PyTorch to Flax.
    """

    torch: str
    flax: str
    transform: Callable[[np.ndarray], np.ndarray]
    adjoint: Callable[[np.ndarray], np.ndarray]


def same(x: np.ndarray) -> np.ndarray:
    """The identity."""
    return x


def _linear(torch: str, flax: str, weight: str = ".weight", bias: str = ".bias") -> tuple[Entry, Entry]:
    # PyTorch stores (out, in), Flax (in, out); for a square weight only the values show a missing transpose.
    kernel = Entry(f"{torch}{weight}", f"{flax}/kernel", np.transpose, np.transpose)
    return kernel, Entry(f"{torch}{bias}", f"{flax}/bias", same, same)


def _norm(name: str) -> tuple[Entry, Entry]:
    return Entry(f"{name}.weight", f"{name}/scale", same, same), Entry(f"{name}.bias", f"{name}/bias", same, same)


LAYER: tuple[Entry, ...] = (
    *_linear("self_attn", "self_attn/in_proj", ".in_proj_weight", ".in_proj_bias"),
    *_linear("self_attn.out_proj", "self_attn/out_proj"),
    *_linear("ffn.0", "ffn/up"),
    *_linear("ffn.2", "ffn/down"),
    *_norm("norm1"),
    *_norm("norm2"),
)
AROUND: tuple[Entry, ...] = (
    Entry("embedding.weight", "embed/embedding", same, same),
    Entry("position.weight", "positions/embedding", same, same),
    *_linear("head", "head"),
)


class Model(NamedTuple):
    """The map of one model: its entries outside the layers, those of each layer, and PyTorch's name of layer {}.

    `ends` are the entries of the first and of the last layer, if Flax numbers only the layers between them.
    """

    around: tuple[Entry, ...] = ()
    layer: tuple[Entry, ...] = ()
    layers: str = ""
    ends: tuple[tuple[Entry, ...], ...] = ()


MODELS = {
    "ToyModel": Model(),
    "DecoderLayer": Model(around=LAYER),
    "DecoderStack": Model(layer=LAYER, layers="layers.{}."),
    "ByteDecoder": Model(around=AROUND, layer=LAYER, layers="decoder.layers.{}."),
    "DeepMLP": Model(
        layer=_linear("", "linear", "weight", "bias"),
        layers="layers.{}.",
        ends=(_linear("", "first/linear", "weight", "bias"), _linear("", "head", "weight", "bias")),
    ),
}


def from_torch(state_dict: Mapping[str, Any], model_kind: str, *, scan: bool = False, like: Any = None) -> Tree:
    """Return the Linen parameters that equal a PyTorch state dict, in its dtypes.

    `state_dict` maps names to NumPy arrays or tensors; `model_kind` is a key of `MODELS`; `scan` stacks the layers on
    axis 0. Every tensor is used exactly once and every parameter filled. With `like` (the model's own parameters, arrays or
    `jax.ShapeDtypeStruct`), paths and shapes are checked; only this check finds that the *last* layer is missing.
    The leaves are NumPy arrays: `jnp.asarray` converts float64 to float32 unless x64 is on.

    Raises:
        ValueError: the message names every missing or unexpected tensor and, with `like`, every misshapen tensor.

    >>> names = [entry.torch for entry in LAYER]
    >>> tree = from_torch(dict.fromkeys(names, np.zeros((4, 4))), "DecoderLayer")
    >>> sorted(tree["ffn"])
    ['down', 'up']
    """
    arrays = {name: as_numpy(tensor) for name, tensor in state_dict.items()}
    entries = _entries(model_kind, _count_layers(r"(?:decoder\.)?layers\.(\d+)\.", arrays))
    expected = {entry.torch for entry in entries}
    problems = [f"{name}: missing from the state dict" for name in sorted(expected - arrays.keys())]
    problems += [f"{name}: fits no parameter of {model_kind}" for name in sorted(arrays.keys() - expected)]
    _raise(problems, model_kind)
    flat = {entry.flax: entry.transform(arrays[entry.torch]) for entry in entries}
    if scan:
        flat = _stack(flat)
    tree = unflatten_dict(flat, sep="/")
    if like is not None:
        _raise(_differences(like, tree), model_kind)
    return tree


def gradients_from_torch(named_gradients: Mapping[str, Any], model_kind: str, *, scan: bool = False, like: Any = None) -> Tree:
    """Return PyTorch gradients, name → gradient, under Flax's paths and in Flax's shapes.

    Gradients are converted by the inverse of the adjoint. Every transform of this table is a permutation, for which this
    inverse is the transform itself; for a scaling it would not be.

    Raises:
        ValueError: as `from_torch`; a parameter whose gradient is None counts as missing.
    """
    present = {name: gradient for name, gradient in named_gradients.items() if gradient is not None}
    return from_torch(present, model_kind, scan=scan, like=like)


def gradients_to_torch(tree: Mapping[str, Any], model_kind: str) -> dict[str, np.ndarray]:
    """Return Flax gradients (unrolled or stacked) under PyTorch's names and in its shapes: the adjoint of the map."""
    flat = flatten(unstack_layers(tree))
    entries = _entries(model_kind, _count_layers(r"layers_(\d+)/", flat) + len(_model(model_kind).ends))
    missing = [f"{entry.flax}: missing from the gradients" for entry in entries if entry.flax not in flat]
    extra = sorted(flat.keys() - {entry.flax for entry in entries})
    _raise(missing + [f"{path}: fits no parameter of {model_kind}" for path in extra], model_kind)
    return {entry.torch: entry.adjoint(flat[entry.flax]) for entry in entries}


def _count_layers(pattern: str, names: Iterable[str]) -> int:
    """Return one more than the highest layer number, so that a missing layer in between is noticed; at least one."""
    return max((int(match[1]) for name in names if (match := re.match(pattern, name))), default=0) + 1


def _model(model_kind: str) -> Model:
    if model_kind not in MODELS:
        raise ValueError(f"model_kind={model_kind!r} is unknown: choose one of {', '.join(MODELS)}")
    return MODELS[model_kind]


def _entries(model_kind: str, num_layers: int) -> list[Entry]:
    """The entries of a model with `num_layers` layers, counted as in PyTorch, where the ends are layers too."""
    model = _model(model_kind)

    def numbered(layer: tuple[Entry, ...], index: int, flax: str) -> list[Entry]:
        return [entry._replace(torch=model.layers.format(index) + entry.torch, flax=flax + entry.flax) for entry in layer]

    entries = list(model.around)
    for layer, index in zip(model.ends, (0, num_layers - 1), strict=False):
        entries += numbered(layer, index, "")
    before = len(model.ends) // 2
    for index in range(num_layers - len(model.ends)):
        entries += numbered(model.layer, index + before, f"layers_{index}/")
    return entries


def flatten(tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a tree of parameters or gradients as path → NumPy array, the form that `remat_jax.parity` compares.

    >>> list(flatten({"head": {"bias": np.zeros(2)}}))
    ['head/bias']
    """
    return {path: np.asarray(leaf) for path, leaf in flatten_dict(dict(tree), sep="/").items()}


def stack_layers(tree: Mapping[str, Any]) -> Tree:
    """Return `layers_0/…`, `layers_1/…` as `layers/…`, stacked on axis 0; the rest as it is."""
    return unflatten_dict(_stack(flatten(tree)), sep="/")


def unstack_layers(tree: Mapping[str, Any]) -> Tree:
    """Return `layers/…`, stacked on axis 0, as `layers_0/…`, `layers_1/…`; the rest as it is.

    >>> unstack_layers({"layers": {"norm1": {"scale": np.array([[1.0], [2.0]])}}})["layers_1"]["norm1"]["scale"]
    array([2.])
    """
    flat: dict[str, np.ndarray] = {}
    for path, leaf in flatten(tree).items():
        if path.startswith("layers/"):
            flat |= {f"layers_{index}/{path.removeprefix('layers/')}": each for index, each in enumerate(leaf)}
        else:
            flat[path] = leaf
    return unflatten_dict(flat, sep="/")


def _stack(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    result: dict[str, np.ndarray] = {}
    numbered: dict[str, dict[int, np.ndarray]] = {}
    for path, leaf in flat.items():
        if match := re.match(r"layers_(\d+)/(.*)", path):
            numbered.setdefault(f"layers/{match[2]}", {})[int(match[1])] = leaf
        else:
            result[path] = leaf
    # Sort by number: by name, layers_10 comes before layers_2.
    return result | {path: np.stack([leaves[i] for i in sorted(leaves)]) for path, leaves in numbered.items()}


def load_nnx(model: nnx.Module, tree: Mapping[str, Any]) -> nnx.Module:
    """Put Linen-form parameters into an NNX model in place, dtypes kept, and return it.

    The model may be abstract (`nnx.eval_shape`), so that it is never initialised; the parameters may be traced.

    Raises:
        ValueError: naming every parameter that the model or the tree lacks, or whose shape differs; or if JAX
            would convert float64 to float32 because x64 is off.
    """
    _raise(_differences(nnx_tree(nnx.state(model, nnx.Param)), tree), type(model).__name__)
    flat = flatten_dict(dict(tree), sep="/")
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    filled = [(keys, variable.replace(_as_jax(flat[_path(keys)]))) for keys, variable in state]
    nnx.update(model, nnx.from_flat_state(filled))
    return model


def nnx_tree(state: Any) -> Tree:
    """Return an NNX state of parameters, or gradients of that form, as Linen's tree: `layers.0` becomes `layers_0`."""
    flat = {_path(keys): variable.get_value() for keys, variable in nnx.to_flat_state(state)}
    return unflatten_dict(flat, sep="/")


def _as_jax(array: Array) -> jax.Array:
    result = jnp.asarray(array)
    if result.dtype != array.dtype:
        raise ValueError(f"the weights are {array.dtype.name} and JAX made {result.dtype.name} of them: enable x64")
    return result


def _path(keys: Iterable[str | int]) -> str:
    return re.sub(r"^layers/(\d+)/", r"layers_\1/", "/".join(map(str, keys)))


def _differences(like: Any, tree: Mapping[str, Any]) -> list[str]:
    wanted = {"/".join(str(key.key) for key in path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(like)}
    given = {path: leaf.shape for path, leaf in flatten_dict(dict(tree), sep="/").items()}
    problems = [f"{path}: missing" for path in sorted(wanted.keys() - given.keys())]
    problems += [f"{path}: the model has no such parameter" for path in sorted(given.keys() - wanted.keys())]
    both = sorted(wanted.keys() & given.keys())
    return problems + [f"{p}: shape {given[p]}, expected {wanted[p]}" for p in both if given[p] != wanted[p]]


def _raise(problems: list[str], model: str) -> None:
    if problems:
        raise ValueError(f"the weights do not fit {model}, {len(problems)} problems:\n  " + "\n  ".join(problems))
