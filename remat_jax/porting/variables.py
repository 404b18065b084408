"""The variables of a Flax model, Linen or NNX, as path → array, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from remat_jax.errors import PortingError

PARAMS = "params"
Leaves = dict[str, Any]


class Variables:
    """A tree of variables as `leaves`, path → array or shape, and the way back to a tree of the same kind.

    Paths begin with the collection. Linen: nested dictionaries; NNX: a State or a module, whose collections are those that Flax
    has for the types of its variables, and whose lists' indices join the list's name: `params/layers_0/up/kernel`. What holds
    random keys in NNX is no variable of ours and stays as it is.

    With `trainable`, only parameters: what has a gradient.

    Raises:
        PortingError: it is none of these, or two variables have one path.
    """

    def __init__(self, tree: Any, *, trainable: bool = False) -> None:
        self.leaves: Leaves = {}
        self._rebuild: Callable[[Leaves], Any]
        if isinstance(tree, nnx.Module):
            graph, state = nnx.split(tree)
            self._read_nnx(state, trainable)
            if not trainable:
                inner = self._rebuild
                self._rebuild = lambda leaves: nnx.merge(graph, inner(leaves))
        elif isinstance(tree, nnx.State):
            self._read_nnx(tree, trainable)
        elif isinstance(tree, Mapping):
            self._read_linen(tree, trainable)
        else:
            raise PortingError(
                f"variables={repr(tree)[:200]} is of type {type(tree).__name__}; "
                "give what a Linen module's init returns, or an NNX State or module."
            )

    def rebuild(self, leaves: Leaves) -> Any:
        """A tree of the kind that was given, with these leaves."""
        return self._rebuild(leaves)

    def _read_linen(self, tree: Any, trainable: bool) -> None:
        if trainable and PARAMS in tree:
            tree = type(tree)({PARAMS: tree[PARAMS]})
        entries, treedef = jax.tree_util.tree_flatten_with_path(tree)
        paths = [_linen_path(keys) for keys, _ in entries]
        self._fill(paths, [leaf for _, leaf in entries])
        self._rebuild = lambda leaves: jax.tree_util.tree_unflatten(treedef, [leaves[path] for path in paths])

    def _read_nnx(self, state: Any, trainable: bool) -> None:
        flat = nnx.to_flat_state(state)
        if trainable:
            flat = [(keys, variable) for keys, variable in flat if issubclass(variable.type, nnx.Param)]
        paths = [_nnx_path(keys, variable) for keys, variable in flat]
        pairs = [(path, variable) for path, (_, variable) in zip(paths, flat, strict=True) if path is not None]
        self._fill([path for path, _ in pairs], [variable.get_value() for _, variable in pairs])

        def rebuild(leaves: Leaves) -> Any:
            filled = [
                (keys, variable if path is None else variable.replace(leaves[path]))
                for path, (keys, variable) in zip(paths, flat, strict=True)
            ]
            return nnx.from_flat_state(filled)

        self._rebuild = rebuild

    def _fill(self, paths: list[str], leaves: list[Any]) -> None:
        self.leaves = dict(zip(paths, leaves, strict=True))
        if len(self.leaves) != len(paths):
            twice = sorted({path for path in paths if paths.count(path) > 1})
            raise PortingError(f"variables: {', '.join(twice)}: several variables of one path; rename one of the modules.")
        wrong = [f"{path}: {repr(leaf)[:80]}" for path, leaf in self.leaves.items() if not hasattr(leaf, "shape")]
        if wrong:
            raise PortingError("variables: every leaf must be an array or a shape, unlike\n  " + "\n  ".join(wrong))


def _linen_path(keys: tuple[Any, ...]) -> str:
    # A box with metadata, such as nn.Partitioned, adds the attribute that holds its array: no part of the path.
    names = [
        str(getattr(key, "key", getattr(key, "idx", None))) for key in keys if not isinstance(key, jax.tree_util.GetAttrKey)
    ]
    return "/".join(names)


def _nnx_path(keys: tuple[Any, ...], variable: Any) -> str | None:
    if issubclass(variable.type, nnx.RngState):
        return None
    return re.sub(r"/(\d+)(?=/|$)", r"_\1", "/".join(map(str, (_collection(variable.type), *keys))))


def _collection(kind: type) -> str:
    """The name of the collection of a type of variables, or of the nearest of its bases that Flax knows."""
    for each in kind.__mro__:
        try:
            return nnx.variable_name_from_type(each)
        except ValueError:  # Flax does not know this one
            continue
    return kind.__name__.lower()
