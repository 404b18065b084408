"""The variables of a Linen or NNX model as path → array, and the inverse."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from remat_jax.errors import PortingError
from remat_jax.porting.tensors import is_torch

Leaves = dict[str, Any]
Entries = list[tuple[str, Any]]
Rebuild = Callable[[Leaves], Any]


class Variables:
    """A tree of variables as `leaves`, path → array or shape; `rebuild(leaves)` makes a tree of the same type.

    A path starts with the collection. A Linen tree is nested dictionaries. An NNX tree is a State or a module: the collection
    is Flax's name for the variable's type, and the index of a list is appended to the list's name, such as
    `params/layers_0/up/kernel`. `leaves` omits NNX's random keys, which `rebuild` keeps; `trainable` selects only parameters.

    Raises:
        PortingError: `tree` has another type, a leaf is no array or shape, or two variables have the same path.
    """

    def __init__(self, tree: Any, *, trainable: bool = False) -> None:
        if isinstance(tree, nnx.Module | nnx.State):
            entries, self.rebuild = _read_nnx(tree, trainable)
        elif isinstance(tree, Mapping):
            entries, self.rebuild = _read_linen(tree, trainable)
        else:
            raise PortingError(
                f"variables={repr(tree)[:200]} is of type {type(tree).__name__}; "
                "give what a Linen module's init returns, or an NNX State or module."
            )
        self.leaves: Leaves = dict(entries)
        if len(self.leaves) != len(entries):
            twice = sorted(path for path, count in Counter(path for path, _ in entries).items() if count > 1)
            raise PortingError(f"variables: {', '.join(twice)}: several variables of one path; rename one of the modules.")
        wrong = [f"{path}: {repr(leaf)[:80]}" for path, leaf in entries if not hasattr(leaf, "shape") or is_torch(leaf)]
        if wrong:
            raise PortingError(
                "variables: every leaf must be a NumPy or JAX array, or a shape, unlike\n  " + "\n  ".join(wrong)
            )


def _read_linen(tree: Any, trainable: bool) -> tuple[Entries, Rebuild]:
    if trainable and "params" in tree:
        tree = type(tree)({"params": tree["params"]})
    with_keys, treedef = jax.tree.flatten_with_path(tree)
    # A box with metadata, such as nn.Partitioned, adds an attribute to the keys; the path omits this attribute.
    names = [tuple(key for key in keys if not isinstance(key, jax.tree_util.GetAttrKey)) for keys, _ in with_keys]
    paths = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys in names]
    entries = [(path, leaf) for path, (_, leaf) in zip(paths, with_keys, strict=True)]
    return entries, lambda leaves: jax.tree.unflatten(treedef, [leaves[path] for path in paths])


def _read_nnx(tree: Any, trainable: bool) -> tuple[Entries, Rebuild]:
    graph, state = nnx.split(tree) if isinstance(tree, nnx.Module) else (None, tree)
    kind = nnx.Param if trainable else nnx.Variable
    flat = [(keys, variable) for keys, variable in nnx.to_flat_state(state) if issubclass(variable.type, kind)]
    paths = {keys: _nnx_path(keys, variable) for keys, variable in flat if not issubclass(variable.type, nnx.RngState)}

    def rebuild(leaves: Leaves) -> Any:
        filled = [(keys, variable.replace(leaves[paths[keys]]) if keys in paths else variable) for keys, variable in flat]
        rebuilt = nnx.from_flat_state(filled)
        return rebuilt if graph is None or trainable else nnx.merge(graph, rebuilt)

    return [(paths[keys], variable.get_value()) for keys, variable in flat if keys in paths], rebuild


def _nnx_path(keys: tuple[Any, ...], variable: Any) -> str:
    return re.sub(r"/(\d+)(?=/|$)", r"_\1", "/".join(map(str, (_collection(variable.type), *keys))))


def _collection(kind: type) -> str:
    """Flax's name for a variable type, or for its nearest base class that Flax knows."""
    for each in kind.__mro__:
        try:
            return nnx.variable_name_from_type(each)
        except ValueError:  # Flax does not know this class
            continue
    return kind.__name__.lower()
