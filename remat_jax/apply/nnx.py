"""Blocks that are NNX modules: the methods of their class are intercepted, and their state is an input and an output.

The block returns only the state that its call changed (`Changes`), as arrays, and the changes are written outside the block.

NNX leaves no module paths in the jaxpr. So this file adds the paths as named scopes while a block is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.calls import Call, entered, intercepted, named_scopes
from remat_jax.apply.methods import CALL, block_path, classes_and_methods, with_own_method
from remat_jax.apply.region import RegionPolicy, run_block
from remat_jax.apply.scope import BlockPolicies
from remat_jax.errors import UnsupportedError

Path = tuple[Any, ...]
"""The keys that lead from a root to one of its NNX objects, variables or attributes."""
# id of a module → its path from its root (`known_paths`). A root is an argument of the function under a policy.
_paths: ContextVar[dict[int, str]] = ContextVar("paths", default={})  # noqa: B039 - never mutated, only replaced


def call(
    module: Any,
    original: Call,
    policy: RegionPolicy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    audit: Audit,
    path: str = "",
    method: str = CALL,
) -> Any:
    """`original(module, *args, **kwargs)`, a call of `method`, as one checkpointed block.

    The state of the module, and of every NNX object among the arguments (an `nnx.Rngs`, a cache), is an input and an output
    of the block. Shared references stay shared, and updates are written back.
    """
    path = path or path_of(module)

    @contextmanager
    def around(inner: Any) -> Iterator[None]:
        parts = [part for part in _modules_in(inner) if part[0]]
        with entered(inner, method), known_paths(inner, path), named_scopes(parts, _modules_in, _shapes):
            yield

    pure, state, arguments, write = as_pure_function(module, original, args, kwargs, around)
    return write(run_block(pure, policy, block_path(path, method), state, arguments, {}, audit))


def call_together(modules: Sequence[nnx.Module], run: Callable[..., Any], policy: RegionPolicy, x: Any, audit: Audit) -> Any:
    """`run(modules, x)` of several modules as one checkpointed block."""
    return call(nnx.List(modules), lambda together, x: run(list(together), x), policy, (x,), {}, audit, path_of(modules[0]))


def path_of(module: nnx.Module) -> str:
    """The path of `module` from its root (`known_paths`); the name of its class if it has no recorded path."""
    return _paths.get().get(id(module), type(module).__name__)


def as_pure_function(
    module: Any,
    original: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    around: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    name: str = "",
) -> tuple[Call, Any, list[Any], Call]:
    """`original(module, *args, **kwargs)` as a pure function of arrays: `(pure, state, arguments, write)`.

    Call `write(pure(state, *arguments))`. `write` writes the updates back into the NNX objects and returns the outputs.

    Args:
      module: an NNX object, or None.
      around: returns the context in which the pure function calls its copy of `module`.
      name: the function's name in messages; the default is the module's class.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    positions = [index for index, leaf in enumerate(leaves) if is_node(leaf)]
    nodes = {"self": module, "arguments": {str(index): leaves[index] for index in positions}}
    arguments = [None if is_node(leaf) else leaf for leaf in leaves]
    graphdef, state = nnx.split(nodes)
    written: list[Changes] = []

    def pure(state: Any, *arguments: Any) -> Any:
        inner = nnx.merge(graphdef, state)
        before = Snapshot(inner)
        filled = list(arguments)
        for index in positions:
            filled[index] = inner["arguments"][str(index)]
        inner_args, inner_kwargs = jax.tree.unflatten(treedef, filled)
        with around(inner["self"]):
            outputs = original(inner["self"], *inner_args, **inner_kwargs)
        _refuse_nodes(outputs, name or f"block {type(module).__name__}")
        changes = before.changes()
        written.append(changes)
        return outputs, changes.values

    def write(returned: Any) -> Any:
        outputs, values = returned
        written[-1].write(nodes, values)
        return outputs

    return pure, state, arguments, write


def is_node(value: Any) -> bool:
    """Whether `value` is an NNX object. Arrays and plain containers are not."""
    return isinstance(value, nnx.Variable) or (not isinstance(value, dict | list | tuple) and nnx.graphlib.is_graph_node(value))


def _refuse_nodes(outputs: Any, name: str) -> None:
    for leaf in jax.tree.leaves(outputs, is_leaf=is_node):
        if is_node(leaf):
            raise UnsupportedError(
                f"{name} returns an NNX object ({type(leaf).__name__}); it must return arrays. Return the object's state "
                "(nnx.state), or checkpoint the modules inside this one."
            )


# --- changes of state -------------------------------------------------------------------------------------------------


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


# --- module paths -----------------------------------------------------------------------------------------------------


def _modules_in(root: Any) -> list[tuple[str, nnx.Module]]:
    """The modules in `root` (a module, or a pytree of modules) with their paths; the path of `root` itself is empty."""
    return [("/".join(map(str, path)), node) for path, node in nnx.iter_graph(root) if isinstance(node, nnx.Module)]


def _shapes(module: nnx.Module) -> list[Any]:
    return [getattr(variable.get_raw_value(), "shape", None) for _, variable in _variables(module)]


def known_paths(root: Any, prefix: str = "") -> AbstractContextManager[None]:
    """Inside this context `path_of` returns `prefix` and a path for each module in `root`, a module or a pytree of modules."""
    paths = {id(node): f"{prefix}/{path}".strip("/") or type(node).__name__ for path, node in _modules_in(root)}
    return compat.setting(_paths, _paths.get() | paths)


# --- intercepting -----------------------------------------------------------------------------------------------------


@contextmanager
def intercepting(policies: BlockPolicies, arguments: Any) -> Iterator[None]:
    """Intercept the calls of the NNX blocks of `policies`; paths start at the modules among `arguments`."""
    methods = set(_block_methods(policies))
    if not methods:
        yield
        return
    roots = [leaf for leaf in jax.tree.leaves(arguments, is_leaf=is_node) if isinstance(leaf, nnx.Module)]
    with ExitStack() as stack:
        for root in roots:
            stack.enter_context(known_paths(root))
        stack.enter_context(intercepted(methods, path_of, call))
        yield


def _block_methods(policies: BlockPolicies) -> Iterable[tuple[type, str]]:
    """The methods that may run a block: of the given classes and their subclasses; for a glob, of all NNX classes."""
    blocks = [block for block, _ in policies.entries]
    if any(isinstance(block, str) for block in blocks):
        yield from ((cls, CALL) for cls in with_own_method(nnx.Module))
    for cls, name in classes_and_methods(blocks):
        if issubclass(cls, nnx.Module):
            yield from ((each, name) for each in (cls, *with_own_method(cls, name)))
