"""The units of both models: a unit has the weights of one module, and each PyTorch unit maps to one Flax unit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat_jax.porting.pattern import Place, Shape
from remat_jax.porting.tensors import memory_of

# The names that modules of Flax, Equinox and Haiku give their arrays. An array with a different name is its own unit, like a
# bare parameter.
_OF_A_MODULE = {"kernel", "bias", "scale", "embedding", "weight", "mean", "var", "w", "b", "offset", "embeddings"}
_TOGETHER = (("query", "key", "value"), ("q", "k", "v"), ("q_proj", "k_proj", "v_proj"), ("wq", "wk", "wv"))
FUSED_CELL = ("dense_i", "dense_h")
# The names of the layers of an LSTM in Linen and in NNX, of a GRU, of cells whose gates are fused, and of a cell without gates.
_CELLS = (
    ("ii", "if", "ig", "io", "hi", "hf", "hg", "ho"),
    ("ii", "if_", "ig", "io", "hi", "hf", "hg", "ho"),
    ("ir", "iz", "in", "hr", "hz", "hn"),
    FUSED_CELL,
    ("i", "h"),
)
RECURRENT = ("LSTM", "GRU", "RNN")


@dataclass(frozen=True)
class TorchUnit:
    """A module's own `tensors`, as (local name, shape); `kind` is the name of its class, or of its PyTorch base class."""

    name: str
    kind: str
    tensors: tuple[tuple[str, Shape], ...]

    def full(self, local: str) -> str:
        """A tensor's full name in the state dict."""
        return _dotted(self.name, local)


@dataclass(frozen=True)
class FlaxUnit:
    """The weights of one Flax module, or of its submodules `children`. `arrays`: (local name, place, shape) of each array."""

    name: str
    arrays: tuple[tuple[str, Place, Shape], ...]
    children: tuple[str, ...] = ()


def torch_parts(module: Any, taken: set[str]) -> tuple[list[TorchUnit], list[tuple[str, str]], list[str]]:
    """The units of `module`, its tied names, and its buffers that are no weights; tensors in `taken` are left out."""
    units: list[TorchUnit] = []
    ties: list[tuple[str, str]] = []
    buffers: list[str] = []
    first_names: dict[Hashable, str] = {}
    state = module.state_dict()
    for prefix, part in module.named_modules(remove_duplicate=False):
        tensors: dict[str, Shape] = {}
        for local, parameter in part.named_parameters(recurse=False):
            name = _dotted(prefix, local)
            first = first_names.setdefault(memory_of(parameter), name)
            if first != name:
                ties += [(first, name)] if name in state else []
            elif name not in taken:
                tensors[local] = tuple(parameter.shape)
        for local, _ in part.named_buffers(recurse=False):
            name = _dotted(prefix, local)
            if name not in state or name in taken:
                continue
            if local in ("running_mean", "running_var"):
                tensors[local] = tuple(state[name].shape)
            else:
                buffers.append(name)
        units += _divided(prefix, _kind(part), tensors)
    return units, ties, buffers


def buffer_units(names: Sequence[str], state: Mapping[str, Any]) -> list[TorchUnit]:
    """A unit for each floating-point buffer: in Flax, a buffer may be a parameter."""
    return [TorchUnit(name, "Buffer", (("", tuple(state[name].shape)),)) for name in names if state[name].dtype.kind == "f"]


def _kind(part: Any) -> str:
    layers = ("MultiheadAttention", *RECURRENT, "Linear", "Embedding", "LayerNorm", "GroupNorm", "RMSNorm")
    convolutions = [f"Conv{transposed}{n}d" for transposed in ("", "Transpose") for n in (1, 2, 3)]
    bases = {base.__name__ for base in type(part).__mro__ if base.__module__.startswith("torch.nn.")}
    return next((name for name in (*layers, *convolutions) if name in bases), type(part).__name__)


def _divided(prefix: str, kind: str, tensors: Mapping[str, Shape]) -> Iterator[TorchUnit]:
    if kind in RECURRENT:
        for layer in sorted({re.sub(r"^(weight|bias)_(ih|hh)_", "", local) for local in tensors}):
            yield TorchUnit(prefix, kind, tuple(item for item in tensors.items() if item[0].endswith(f"_{layer}")))
        return
    whole = {"weight", "bias", "running_mean", "running_var", "in_proj_weight", "in_proj_bias"}
    together = tuple(item for item in tensors.items() if item[0] in whole)
    if together:
        yield TorchUnit(prefix, kind, together)
    for local, shape in tensors.items():
        if local not in whole:
            yield TorchUnit(_dotted(prefix, local), "Parameter", (("", shape),))


def flax_units(shapes: Mapping[str, Shape], *, stacks: Collection[str] = (), together: Collection[str] = ()) -> list[FlaxUnit]:
    """The units of a Flax model whose arrays have the `shapes` (path → shape).

    A module at or below a path in `stacks` holds stacked layers and gives one unit per layer. In each attention named in
    `together`, query, key and value form one unit. The layers of a recurrent cell also form one unit.
    """
    modules = _modules(shapes, stacks)
    units: list[FlaxUnit] = []
    used: set[str] = set()

    def add(name: str, parts: Mapping[str, str], children: tuple[str, ...] = ()) -> None:
        used.update(parts.values())
        arrays = {prefix + local: array for prefix, path in parts.items() for local, array in modules[path].items()}
        units.append(FlaxUnit(name, tuple((local, *array) for local, array in sorted(arrays.items())), children))

    for parent in sorted({name.rpartition("/")[0] for name in modules}):
        for group in (*(_TOGETHER if parent in together else ()), *_CELLS):
            parts = {f"{child}/": _path(parent, child) for child in group}
            if all(path in modules and path not in used for path in parts.values()):
                add(parent, parts, group)
    for name in [name for name in modules if name not in used]:
        add(name, {"": name})
    return units


def attentions(shapes: Mapping[str, Shape], stacks: Collection[str]) -> list[str]:
    """The paths of the modules that contain a query, a key and a value."""
    modules = _modules(shapes, stacks)
    parents = {name.rpartition("/")[0] for name in modules}
    return sorted(p for p in parents if any(all(_path(p, child) in modules for child in group) for group in _TOGETHER))


def _modules(shapes: Mapping[str, Shape], stacks: Collection[str]) -> dict[str, dict[str, tuple[Place, Shape]]]:
    modules: dict[str, dict[str, tuple[Place, Shape]]] = {}
    for path, shape in shapes.items():
        name, local = _owner(path)
        parts = name.split("/")
        numbered = [depth for depth in range(len(parts)) if "/".join(parts[: depth + 1]) in stacks]
        for index in itertools.product(*map(range, shape[: len(numbered)])):
            numbers = dict(zip(numbered, index, strict=True))
            named = [f"{part}_{numbers[depth]}" if depth in numbers else part for depth, part in enumerate(parts)]
            if not local and len(parts) - 1 in numbers:  # the name of an array may end with a number of its own
                named[-1] = f"{numbers[len(parts) - 1]}/{parts[-1]}"
            layer = "/".join(named)
            place = Place(path, index)
            modules.setdefault(layer, {})[local] = (place, place.shape(shape))
    return modules


def _owner(path: str) -> tuple[str, str]:
    """The name of the unit of an array, and the array's local name."""
    rest = path.partition("/")[2]
    module, _, leaf = rest.rpartition("/")
    return (module, leaf) if leaf in _OF_A_MODULE else (rest, "")


def _dotted(*names: str) -> str:
    return ".".join(filter(None, names))


def _path(*names: str) -> str:
    return "/".join(filter(None, names))


def stackings(shapes: Mapping[str, Shape], units: Sequence[TorchUnit]) -> Iterator[frozenset[str]]:
    """The paths of modules and arrays that may hold stacked layers, in several ways; the first way is no stack.

    The arrays of a stack have equal leading sizes. Paths that differ only in numbers are stacks together, such as each layer's
    experts. If PyTorch has lists of these lengths, different stacks are tried together, and stacks in stacks.
    """
    families, lengths = _families(shapes), _lengths(units)
    together = [_outermost(families, {length}) for length in sorted(lengths)] + [_outermost(families, lengths)]
    ways = [frozenset[str](), *(family for family, _ in families), *together]
    for first in dict.fromkeys((*together, *(family for family, size in families if size in lengths))):
        rest = {path: shape[1:] for path, shape in shapes.items() if any(_is_below(_owner(path)[0], each) for each in first)}
        inner = [(family - first, size) for family, size in _families(rest) if size in lengths]
        ways += [first | second for second in (*(family for family, _ in inner), *(_outermost(inner, {n}) for n in lengths))]
    yield from dict.fromkeys(ways)


def _outermost(families: Sequence[tuple[frozenset[str], int]], sizes: Collection[int]) -> frozenset[str]:
    """The paths of all families of these sizes, without paths below others."""
    outer = frozenset[str]()
    for family, size in families:
        outer |= {path for path in family if size in sizes and not any(_is_below(path, other) for other in outer)}
    return outer


def _lengths(units: Sequence[TorchUnit]) -> set[int]:
    """The lengths of PyTorch's lists of modules."""
    children: dict[str, set[str]] = {}
    for unit in units:
        parts = unit.name.split(".")
        for depth, part in enumerate(parts):
            if part.isdecimal():
                children.setdefault(".".join(parts[:depth]), set()).add(part)
    return {len(numbers) for numbers in children.values()}


def _families(shapes: Mapping[str, Shape]) -> list[tuple[frozenset[str], int]]:
    """The sets of paths whose arrays have equal leading sizes, with this size; the outermost paths come first."""
    sizes: dict[str, list[int]] = {}
    for path, shape in shapes.items():
        parts = _owner(path)[0].split("/")
        for depth in range(1, len(parts) + 1):
            sizes.setdefault("/".join(parts[:depth]), []).append(shape[0] if shape else 0)
    families: dict[tuple[str, int], set[str]] = {}
    for name, leading in sizes.items():
        if len(set(leading)) == 1 and leading[0]:
            families.setdefault((re.sub(r"\d+", "#", name), leading[0]), set()).add(name)
    order = sorted(families, key=lambda family: (family[0].count("/"), -sum(len(sizes[name]) for name in families[family])))
    return [(frozenset(families[family]), family[1]) for family in order]


def _is_below(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")


def natural(name: str) -> list[tuple[str, int]]:
    """A key that sorts `Dense_2` before `Dense_10`."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]
