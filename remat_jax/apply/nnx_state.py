"""The state of NNX objects as inputs and outputs of a pure function.

    objects → leaves → copies → the call → changes → objects

`Objects` are the caller's NNX objects. The call runs on `NodeCopies` of them, whose leaves may be tracers. `Changes` describes
what the call did to the copies: variables written, attributes set, deleted, swapped or aliased, and new objects. Written to the
caller's objects, the changes leave them as the same call on the objects themselves would.

Only changed arrays are outputs of the pure function. If every parameter were an output, each would have a cotangent and be
copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
from flax import nnx
from flax.nnx.pytreelib import PytreeState

from remat_jax import compat
from remat_jax.core.walk import filled
from remat_jax.errors import UnsupportedError

Call = Callable[..., Any]
graphlib = nnx.graphlib


def is_node(value: object) -> bool:
    """Whether `value` is an NNX object. Arrays and plain containers are not."""
    return isinstance(value, nnx.Variable) or (not isinstance(value, dict | list | tuple) and graphlib.is_graph_node(value))


def nodes_in(tree: Any) -> list[Any]:
    """The NNX objects in a pytree, without the objects inside them."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_node) if is_node(leaf)]


def as_pure_function(function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, list[Any], list[Any], Call]:
    """`function(*args, **kwargs)` as a pure function of arrays: `(pure, state, arguments, write)`.

    Call `write(pure(state, *arguments))`. `write` makes the call's changes to the NNX objects among `args` and `kwargs`, and
    returns the outputs.

    `state` has the leaves of the NNX objects. `arguments` has the other leaves, in order, and None for each NNX object.
    """
    flat, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    places = [place for place, leaf in enumerate(flat) if is_node(leaf)]
    objects = Objects([flat[place] for place in places])
    state, arguments = objects.leaves, [None if is_node(leaf) else leaf for leaf in flat]

    def pure(state: Sequence[Any], *arguments: Any) -> tuple[list[Any], Changes]:
        copies = NodeCopies(objects, state)
        positional, named = jax.tree.unflatten(treedef, filled(arguments, places, copies.nodes))
        return copies.changes(function(*positional, **named), jax.tree.leaves((state, arguments)))

    def write(returned: tuple[list[Any], Changes]) -> Any:
        arrays, changes = returned
        return changes.write(objects, jax.tree.leaves((state, tuple(arguments))), arrays)

    return pure, state, arguments, write


class Objects:
    """The NNX objects in the pytree `nodes`, in a fixed order.

    Attributes:
      leaves: the values of the variables, and the arrays in other attributes.
    """

    def __init__(self, nodes: Any) -> None:
        self._nodes = nodes
        references = graphlib.RefMap()
        self.graphdef, self.leaves = graphlib.flatten(nodes, ref_index=references, with_paths=False, graph=True)
        self.by_index = {index: node for node, index in references.items()}

    @property
    def paths(self) -> tuple[tuple[Any, ...], ...]:
        """The path of each leaf in `nodes`."""
        return tuple(graphlib.flatten(self._nodes, with_paths=True, graph=True)[1].paths)


class NodeCopies:
    """NodeCopies of `Objects` with other leaves.

    Attributes:
      nodes: the pytree of the objects, with the copies in it.
    """

    def __init__(self, objects: Objects, leaves: Sequence[Any]) -> None:
        by_index = graphlib.IndexMap()
        self.nodes = graphlib.unflatten(objects.graphdef, list(leaves), index_ref=by_index)
        self._by_index = dict(by_index.items())
        # Lists and dicts are copied, because a call may change them in place.
        copied: dict[int, tuple[Any, Any]] = {}
        for node in self._by_index.values():
            if isinstance(node, nnx.Pytree):
                for name, value in vars(node).items():
                    object.__setattr__(node, name, _copy(value, copied))
        self._before = {index: _snapshot(node) for index, node in self._by_index.items()}

    def changes(self, outputs: Any, inputs: Iterable[Any]) -> tuple[list[Any], Changes]:
        """The traced arrays that leave the call, and all else that leaves it.

        Args:
          outputs: the outputs of the call, a pytree of arrays, NNX objects and other values.
          inputs: the arrays that the call was given.
        """
        targets: list[tuple[int, str]] = []
        deleted: list[tuple[int, str]] = []
        values: list[Any] = []
        for index, before in self._before.items():
            now = _parts(self._by_index[index])
            deleted += [(index, name) for name in before if name not in now]
            for name, value in now.items():
                if name not in before or not _is_same(before[name], value):
                    targets.append((index, name))
                    values.append(value)
        flat, outer = jax.tree.flatten((outputs, values), is_leaf=is_node)
        # Objects from before the call are references; only new objects are described.
        graphdef, leaves = graphlib.flatten(
            flat, ref_index=graphlib.RefMap.from_indexmap(self._by_index), with_paths=False, graph=True
        )
        _refuse_traced_metadata(graphdef)
        arrays, inner = jax.tree.flatten(leaves)
        places = {id(value): place for place, value in enumerate(inputs) if compat.is_traced(value)}
        # A leaf that the caller has already, such as the kernel of a moved layer, is no output.
        sources = [
            _Input(places[id(leaf)]) if id(leaf) in places else _OUTPUT if compat.is_traced(leaf) else _Constant(leaf)
            for leaf in arrays
        ]
        leaving = [leaf for leaf, source in zip(arrays, sources, strict=True) if source is _OUTPUT]
        return leaving, Changes(tuple(targets), tuple(deleted), outer, graphdef, inner, tuple(sources))


@dataclass(frozen=True)
class _Input:
    place: int


@dataclass(frozen=True)
class _Constant:
    value: object


_OUTPUT = object()


@dataclass(frozen=True, eq=False)
class Changes:
    """What a call did to the copies, and its outputs, without the traced arrays.

    Attributes:
      targets: the changed attributes: the index of the object, and the attribute's name.
      deleted: the deleted attributes, likewise.
      outer, graphdef, inner: the structure of `(outputs, values of the targets)`, from the outside in: a pytree with NNX
        objects as leaves, the graph of these objects, and a pytree with arrays as leaves.
      sources: where each leaf comes from.
    """

    targets: tuple[tuple[int, str], ...]
    deleted: tuple[tuple[int, str], ...]
    outer: jax.tree_util.PyTreeDef
    graphdef: nnx.GraphDef[Any]
    inner: jax.tree_util.PyTreeDef
    sources: tuple[Any, ...]

    def write(self, objects: Objects, inputs: Sequence[Any], arrays: Iterable[Any]) -> Any:
        """Make the changes to the `objects`, and return the call's outputs.

        Args:
          inputs: the arrays that the call was given, as the caller has them.
          arrays: the traced arrays that left the call, as the caller has them.
        """
        computed = iter(arrays)
        leaves = [
            next(computed) if source is _OUTPUT else inputs[source.place] if isinstance(source, _Input) else source.value
            for source in self.sources
        ]
        by_index = graphlib.IndexMap()
        by_index.update(objects.by_index)
        flat = graphlib.unflatten(self.graphdef, jax.tree.unflatten(self.inner, leaves), index_ref=by_index)
        outputs, values = jax.tree.unflatten(self.outer, flat)
        for index, name in self.deleted:
            _writable(objects.by_index[index])
            object.__delattr__(objects.by_index[index], name)
        for (index, name), value in zip(self.targets, values, strict=True):
            _set(objects.by_index[index], name, value)
        return outputs


def _parts(node: object) -> dict[str, Any]:
    """All that a call can change in an NNX object."""
    if isinstance(node, nnx.Variable):
        return {"value": node.get_raw_value(), "metadata": node.get_metadata()}
    return dict(vars(node)) if isinstance(node, nnx.Pytree) else {}


def _set(node: object, name: str, value: object) -> None:
    _writable(node)
    if isinstance(node, nnx.Variable):
        node.set_raw_value(value) if name == "value" else node.set_metadata(value)
        return
    present = vars(node).get(name)
    # A list that the caller holds, too, stays the same list.
    if type(present) is list and type(value) is list:
        present[:] = value
    elif type(present) is dict and type(value) is dict:
        present.clear()
        present.update(value)
    else:
        # Flax checked the value when it was set in the copy.
        object.__setattr__(node, name, value)


def _writable(node: object) -> None:
    """Raise Flax's TraceContextError if the object belongs to another level of tracing."""
    if isinstance(node, nnx.Pytree):
        node._check_valid_context(lambda: f"Cannot mutate '{type(node).__name__}' from different trace level")


def refusing_hidden_writes(function: Call, name: str) -> Call:
    """`function`, which must not write traced arrays to attributes of Python objects that are neither arrays nor NNX objects.

    Raises:
      UnsupportedError: when called, if it does. The attribute is as it was before.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        before = [(path, held, dict(vars(held))) for path, held in _python_objects(args, kwargs)]
        outputs = function(*args, **kwargs)
        for path, held, attributes in before:
            for attribute, value in dict(vars(held)).items():
                if value is not attributes.get(attribute) and any(map(compat.is_traced, jax.tree.leaves(value))):
                    vars(held).clear()
                    vars(held).update(attributes)
                    raise UnsupportedError(
                        f"{name} writes an array to {path}.{attribute}, an attribute of a Python object, and the array cannot "
                        "leave the checkpoint. Return it, or keep it in an attribute of an NNX module: in an nnx.Variable, or "
                        "as nnx.data(…)."
                    )
        return outputs

    return run


def hidden_objects(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The NNX objects in attributes of Python objects among the arguments, as text for an error; may be empty."""
    return ", ".join(
        f"{path}.{name}" for path, held in _python_objects(args, kwargs) for name, value in vars(held).items() if is_node(value)
    )


def _python_objects(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The instances of Python classes in the arguments and in the attributes of NNX objects, with text that shows where."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_node)
    yield from ((type(leaf).__name__, leaf) for leaf in leaves if _is_python_object(leaf))
    for node in Objects(nodes_in(leaves)).by_index.values():
        if isinstance(node, nnx.Pytree):
            for name, value in vars(node).items():
                if _is_python_object(value):
                    yield f"{type(node).__name__}.{name}", value


def _is_python_object(value: object) -> bool:
    # Functions and classes have attributes, too, but they are no place for arrays.
    is_other = is_node(value) or compat.is_array(value) or isinstance(value, type | ModuleType) or inspect.isroutine(value)
    return not is_other and isinstance(getattr(value, "__dict__", None), dict)


def _copy(value: Any, copied: dict[int, tuple[Any, Any]]) -> Any:
    """`value` with new lists and dicts. `copied` maps the id of each list and dict to itself and its copy."""
    if id(value) in copied:
        return copied[id(value)][1]
    if type(value) is list:
        new_list: list[Any] = []
        copied[id(value)] = value, new_list
        new_list.extend(_copy(item, copied) for item in value)
        return new_list
    if type(value) is dict:
        new_dict: dict[Any, Any] = {}
        copied[id(value)] = value, new_dict
        new_dict.update((key, _copy(item, copied)) for key, item in value.items())
        return new_dict
    return tuple(_copy(item, copied) for item in value) if type(value) is tuple else value


def _snapshot(node: object) -> dict[str, Any]:
    """The parts of an object now, to compare with later."""
    copied: dict[int, tuple[Any, Any]] = {}
    return {name: _flags(value) or _copy(value, copied) for name, value in _parts(node).items()}


def _is_same(before: Any, value: Any) -> bool:
    """Whether a part of an object is what it was in the snapshot."""
    if type(value) in (list, tuple):
        return type(before) is type(value) and len(before) == len(value) and all(map(_is_same, before, value))
    if type(value) is dict:
        return (
            type(before) is dict and before.keys() == value.keys() and all(_is_same(before[key], value[key]) for key in value)
        )
    flags = _flags(value)
    return before is value if flags is None else bool(before == flags)


def _flags(value: object) -> jax.tree_util.PyTreeDef | None:
    """The flags in Flax's own part of a module, which also holds the level of tracing; None for any other value."""
    return jax.tree.structure(value) if isinstance(value, PytreeState) else None


def _refuse_traced_metadata(graphdef: nnx.GraphDef[Any]) -> None:
    for definition in graphdef.nodes:
        if isinstance(definition, graphlib.VariableDef):
            traced = [name for name, value in definition.metadata.items() if any(map(compat.is_traced, jax.tree.leaves(value)))]
            if traced:
                raise UnsupportedError(
                    f"a checkpointed block makes a new {definition.type.__name__} with an array as its metadata {traced[0]!r}, "
                    "which cannot leave the checkpoint; keep the array in a variable of its own"
                )
