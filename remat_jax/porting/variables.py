"""The variables of a Linen or NNX model as path → array, and the inverse."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from remat_jax.errors import PortingError

Leaves = dict[str, Any]


class Variables:
    """A tree of variables as `leaves`, path → array or shape; `rebuild(leaves)` makes a tree of the same type.

    A path starts with the collection. A Linen tree is nested dictionaries. An NNX tree is a State or a module: the collection
    is Flax's name for the variable's type, and the index of a list is appended to the list's name, such as
    `params/layers_0/up/kernel`. `leaves` lacks NNX's random keys, which stay the same; with `trainable` all but the parameters.

    Raises:
        PortingError: `tree` is none of these, or two variables have the same path.
    """

    def __init__(self, tree: Any, *, trainable: bool = False) -> None:
        self.leaves: Leaves = {}
        self.rebuild: Callable[[Leaves], Any]
        if isinstance(tree, nnx.Module):
            graph, state = nnx.split(tree)
            self._read_nnx(state, trainable, None if trainable else graph)
        elif isinstance(tree, nnx.State):
            self._read_nnx(tree, trainable, None)
        elif isinstance(tree, Mapping):
            self._read_linen(tree, trainable)
        else:
            raise PortingError(
                f"variables={repr(tree)[:200]} is of type {type(tree).__name__}; "
                "give what a Linen module's init returns, or an NNX State or module."
            )

    def _read_linen(self, tree: Any, trainable: bool) -> None:
        if trainable and "params" in tree:
            tree = type(tree)({"params": tree["params"]})
        entries, treedef = jax.tree.flatten_with_path(tree)
        # A box with metadata, such as nn.Partitioned, adds the attribute of its array, which is no part of the path.
        names = [[key for key in keys if not isinstance(key, jax.tree_util.GetAttrKey)] for keys, _ in entries]
        paths = [jax.tree_util.keystr(tuple(keys), simple=True, separator="/") for keys in names]
        self._fill(paths, [leaf for _, leaf in entries])
        self.rebuild = lambda leaves: jax.tree.unflatten(treedef, [leaves[path] for path in paths])

    def _read_nnx(self, state: Any, trainable: bool, graph: Any) -> None:
        flat = nnx.to_flat_state(state)
        if trainable:
            flat = [(keys, variable) for keys, variable in flat if issubclass(variable.type, nnx.Param)]
        paths = [_nnx_path(keys, variable) for keys, variable in flat]
        values = [variable.get_value() for path, (_, variable) in zip(paths, flat, strict=True) if path is not None]
        self._fill([path for path in paths if path is not None], values)

        def rebuild(leaves: Leaves) -> Any:
            filled = [
                (keys, variable if path is None else variable.replace(leaves[path]))
                for path, (keys, variable) in zip(paths, flat, strict=True)
            ]
            rebuilt = nnx.from_flat_state(filled)
            return rebuilt if graph is None else nnx.merge(graph, rebuilt)

        self.rebuild = rebuild

    def _fill(self, paths: list[str], leaves: list[Any]) -> None:
        self.leaves = dict(zip(paths, leaves, strict=True))
        if len(self.leaves) != len(paths):
            twice = sorted({path for path in paths if paths.count(path) > 1})
            raise PortingError(f"variables: {', '.join(twice)}: several variables of one path; rename one of the modules.")
        wrong = [f"{path}: {repr(leaf)[:80]}" for path, leaf in self.leaves.items() if not hasattr(leaf, "shape")]
        if wrong:
            raise PortingError("variables: every leaf must be an array or a shape, unlike\n  " + "\n  ".join(wrong))


def _nnx_path(keys: tuple[Any, ...], variable: Any) -> str | None:
    if issubclass(variable.type, nnx.RngState):
        return None
    return re.sub(r"/(\d+)(?=/|$)", r"_\1", "/".join(map(str, (_collection(variable.type), *keys))))


def _collection(kind: type) -> str:
    """The collection of a variable type, or of its nearest base class that Flax knows."""
    for each in kind.__mro__:
        try:
            return nnx.variable_name_from_type(each)
        except ValueError:  # Flax does not know this class
            continue
    return kind.__name__.lower()
