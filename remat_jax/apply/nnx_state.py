"""Finds the changes that a call makes to NNX objects. A block returns them as arrays, to be written outside the block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from remat_jax import compat
from remat_jax.errors import UnsupportedError

Path = tuple[Any, ...]


class Snapshot:
    """The variables and attributes of NNX objects at one moment, to compare with later."""

    def __init__(self, nodes: Any) -> None:
        self.nodes = nodes
        # Keyed by id: an object may move to another path. Holding the object prevents reuse of its id.
        self.variables = {id(variable): (path, variable, variable.get_raw_value()) for path, variable in _variables(nodes)}
        self.attributes = dict(_attributes(nodes))

    def changes(self) -> Changes:
        """The variables and attributes that were written, created or replaced since the snapshot.

        Only these are outputs of the block. If every parameter were an output, each would have a cotangent and be copied.
        """
        changes = Changes()
        for path, variable, before in self.variables.values():
            now = variable.get_raw_value()
            if now is not before:
                changes.add(path, now)
        for path, variable in _variables(self.nodes):
            if id(variable) not in self.variables:
                kind: Any = type(variable)
                changes.add(path, variable.get_raw_value(), functools.partial(kind, **variable.get_metadata()))
        for path, value in _attributes(self.nodes):
            if path in self.attributes and self.attributes[path] is value:
                continue
            if compat.is_array(value):
                changes.add(path, value, lambda array: array)
            else:
                changes.python[path] = value
        return changes


class Changes:
    """Changed arrays, which are outputs of the block, and changed Python values, which are known while tracing.

    Attributes:
      values: the changed arrays (or pytrees of arrays).
      python: path → the changed Python value.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.python: dict[Path, Any] = {}
        self._targets: list[tuple[Path, Callable[[Any], Any] | None]] = []

    def add(self, path: Path, value: Any, make: Callable[[Any], Any] | None = None) -> None:
        """Record the new `value` of the variable at `path`, or, with `make`, the new attribute `make(value)` at `path`."""
        self.values.append(value)
        self._targets.append((path, make))

    def write(self, nodes: Any, values: list[Any]) -> None:
        """Make the same changes to `nodes`, the objects outside the block. `values` are the changed arrays as block outputs.

        Raises:
          UnsupportedError: a variable was created in an object that does not exist outside the block.
        """
        by_path = dict(nnx.iter_graph(nodes))
        for (path, make), value in zip(self._targets, values, strict=True):
            if make is None:
                by_path[path].set_raw_value(value)
            else:
                _set(by_path, path, make(value))
        for path, value in self.python.items():
            _set(by_path, path, value)


def _set(by_path: dict[Path, Any], path: Path, value: Any) -> None:
    owner, key = by_path.get(path[:-1]), path[-1]
    if owner is None:
        raise UnsupportedError(
            f"a checkpointed block created a new object at {'/'.join(map(str, path[1:-1]))!r}, and the object cannot leave "
            "the checkpoint; create it in __init__, or call the model once before checkpointing it"
        )
    if isinstance(owner, dict | list | nnx.List | nnx.Dict):
        owner[key] = value
    else:
        setattr(owner, key, value)


def _variables(nodes: Any) -> Iterator[tuple[Path, nnx.Variable[Any]]]:
    for path, node in nnx.iter_graph(nodes):
        if isinstance(node, nnx.Variable):
            yield path, node


def _attributes(nodes: Any) -> Iterator[tuple[Path, Any]]:
    """The arrays and Python values that are plain attributes, without Flax's own bookkeeping."""
    for path, node in nnx.iter_graph(nodes):
        is_flax = any(str(key).startswith(("_pytree__", "_length")) for key in path)
        if path and not is_flax and not isinstance(node, nnx.Variable) and not nnx.graphlib.is_node(node):
            yield path, node
