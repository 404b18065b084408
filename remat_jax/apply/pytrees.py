"""Blocks of any JAX library: classes whose instances are called (Equinox, Penzai, callable pytrees), and marked functions.

An instance is a pytree. Its arrays are the block's parameters; everything else in it is unchanged. Paths are attribute paths in
the arguments of the function that runs the model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen, nnx

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.audit import Audit
from remat_jax.apply.binding import RegionPolicy
from remat_jax.apply.calls import Call, entered, heard, intercepted, is_inside, is_listening, named_scopes, scope_of
from remat_jax.apply.haiku import is_haiku
from remat_jax.apply.methods import CALL, block_path, classes_and_methods, defines, with_own_method
from remat_jax.apply.region import run_block
from remat_jax.apply.scope import BlockPolicies
from remat_jax.errors import ArgumentError, nearest
from remat_jax.identity import ByIdentity

_NOT_TREES = (linen.Module, nnx.Module, functools.partial)
F = TypeVar("F", bound=Callable[..., Any])

# `_paths`: a callable pytree among the arguments → its attribute path. `_paths_of_class`: class → the paths of its instances
# among the arguments.
_paths: ContextVar[ByIdentity[str]] = ContextVar("paths", default=ByIdentity())  # noqa: B039 - never mutated, only replaced
_paths_of_class: ContextVar[dict[type, frozenset[str]]] = ContextVar("paths_of_class", default={})  # noqa: B039 - the same


def call(
    module: Any,
    original: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: RegionPolicy,
    audit: Audit,
    method: str = CALL,
) -> Any:
    """`original(module, *args, **kwargs)`, a call of `method`, as one checkpointed block.

    The arrays in `module` are the block's parameters.
    """

    def pure(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        with entered(module, method), named_scopes(parts_in(module)[1:], parts_in, shapes):
            return original(module, *args, **kwargs)

    return run_block(pure, block_path(path_of(module), method), module, args, kwargs, policy, audit)


def path_of(module: object) -> str:
    """The attribute path of `module` in the arguments.

    For a module that is not in the arguments (a row of a scanned stack, a cast copy): the path of the only module of its class
    in the arguments. If the arguments contain no such module, or several: the name of the class.
    """
    alike = _paths_of_class.get().get(type(module), frozenset())
    return _paths.get().get(module, next(iter(alike)) if len(alike) == 1 else type(module).__name__)


@contextmanager
def intercepting(policies: BlockPolicies, arguments: tuple[Any, ...]) -> Iterator[None]:
    """Intercept the calls of the blocks of `policies` that are no Flax modules; paths start at the function's `arguments`."""
    blocks = [block for block, _ in policies.entries]
    named = [(cls, name) for cls, name in classes_and_methods(blocks) if not _has_own_file(cls)]
    methods: set[tuple[Any, str]] = {
        (each, name)
        for cls, name in named
        for each in (cls, *with_own_method(cls, name))
        if defines(each, name) and not _has_own_file(each)
    }
    any_path = any(isinstance(block, str) for block in blocks)
    if not methods and not any_path:
        yield
        return
    if any_path:
        methods |= {(type(node), CALL) for argument in arguments for _, node in callables(argument)}
    with known_paths(*arguments), intercepted(methods, path_of, call):
        yield


@contextmanager
def known_paths(*arguments: Any) -> Iterator[None]:
    """Inside this context `path_of` returns the attribute path of each callable pytree in the `arguments`."""
    paths, of_class = _paths.get() | ByIdentity(), dict(_paths_of_class.get())
    for argument in arguments:
        for path, node in callables(argument):
            paths.setdefault(node, path)
            of_class[type(node)] = of_class.get(type(node), frozenset()) | {path}
    with compat.setting(_paths, paths), compat.setting(_paths_of_class, of_class):
        yield


class ModelArrays:
    """The parameters of a workload: a pytree of arrays, or a callable model that has other leaves too.

    Attributes:
      arrays: the pytree, with None for each leaf that is no array.
      trainable: `trainable(path, leaf)` returns whether an array has a gradient (a floating-point or complex dtype). None
        unless some array of a model has no gradient.
    """

    def __init__(self, params: Any) -> None:
        leaves, self._treedef = jax.tree.flatten(params)
        is_model = any(map(compat.is_array, leaves)) and any(callables(params))
        self._others = {nth: leaf for nth, leaf in enumerate(leaves) if is_model and not compat.is_operand(leaf)}
        kept = [None if nth in self._others else leaf for nth, leaf in enumerate(leaves)]
        self.arrays = jax.tree.unflatten(self._treedef, kept) if self._others else params
        mixed = not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in kept if leaf is not None) if is_model else False
        self.trainable = (lambda path, leaf: jnp.issubdtype(leaf.dtype, jnp.inexact)) if mixed else None

    @property
    def others(self) -> tuple[Any, ...]:
        """What of the model is no array, to compare by value: equal if `whole` makes equal models of equal arrays."""
        return (self._treedef, *((nth, type(leaf), leaf) for nth, leaf in self._others.items())) if self._others else ()

    def whole(self, arrays: Any) -> Any:
        """The model with these arrays."""
        if not self._others:
            return arrays
        array_leaves = iter(jax.tree.leaves(arrays))
        leaves = [self._others[nth] if nth in self._others else next(array_leaves) for nth in range(self._treedef.num_leaves)]
        return jax.tree.unflatten(self._treedef, leaves)

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """`loss` as a function of the arrays in place of the model."""
        if not self._others:
            return loss

        @functools.wraps(loss)
        def of_arrays(arrays: Any, *batch: Any) -> Any:
            model = self.whole(arrays)
            with known_paths(model):
                return loss(model, *batch)

        return of_arrays


def is_tree_class(block: object) -> bool:
    """Whether `block` is a class of callable instances, but no Flax module class and no `functools.partial`."""
    return isinstance(block, type) and not _has_own_file(block) and defines(block, CALL)


def _has_own_file(cls: type) -> bool:
    return issubclass(cls, _NOT_TREES) or is_haiku(cls)


def callables(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The callable nodes of a pytree that are no Flax modules, with their paths. A node comes before the nodes inside it."""
    if isinstance(tree, nnx.Module):
        return
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    if len(children) == 1 and children[0][1] is tree:
        return  # a leaf
    if is_tree_class(type(tree)):
        yield "/".join(path) or type(tree).__name__, tree
    for keys, child in children:
        yield from callables(child, (*path, jax.tree_util.keystr(keys, simple=True, separator="/")))


def parts_in(module: Any) -> list[tuple[str, Any]]:
    """The callable pytrees in `module` with their paths; the path of `module` itself is empty."""
    return [("" if part is module else path, part) for path, part in callables(module)]


def shapes(module: Any) -> list[Any]:
    """The shapes of the arrays of `module`."""
    return [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(module)]


# --- marked functions -------------------------------------------------------------------------------------------------


def block(fn: F | None = None, *, parameters: str | Iterable[str] | None = None) -> Any:
    """Mark a function as a block for `blocks=` and `checkpoint_blocks`. The function's results do not change.

    Args:
      fn: the function, called once for each layer with pytrees of arrays. Leave it out in `@rj.block(parameters=…)`.
      parameters: names of the arguments that hold parameters. A policy's rules for inputs do not apply to parameters. The
        default is the first argument, unless that is an array.

    Raises:
      ArgumentError: `fn` is no function, or has no argument named in `parameters`.

    >>> import jax, jax.numpy as jnp
    >>> from remat_jax import checkpoint_blocks
    >>> from remat_jax.cost.count import matmuls
    >>> @block
    ... def layer(weights, x):
    ...     return jnp.tanh(x @ weights["up"]) @ weights["down"]
    >>> def loss(layers, x):
    ...     for weights in layers:
    ...         x = layer(weights, x)
    ...     return x.sum()
    >>> layers, x = [{"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}] * 2, jnp.ones((2, 4))
    >>> full = checkpoint_blocks(loss, {layer: "full"})
    >>> [matmuls(jax.value_and_grad(f), layers, x) for f in (loss, full)]  # full runs the first product of each layer again
    [11, 13]
    """
    if fn is None:
        return functools.partial(block, parameters=parameters)
    if not inspect.isroutine(fn):
        raise ArgumentError(
            f"fn={fn!r}: expected a function (put a functools.partial into a lambda or a def); a class whose instances are "
            "called needs no mark"
        )
    names = (parameters,) if isinstance(parameters, str) else parameters
    held = None if names is None else _Parameters(fn, tuple(names))
    path = fn.__name__.replace("<lambda>", "lambda")

    @functools.wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        policies = None if is_inside(marked) else scope.active()
        if policies is not None and is_listening():
            with heard(marked, path), entered(marked):
                return fn(*args, **kwargs)
        policy = None if policies is None else policies.find_function(marked)
        if policies is None or policy is None:
            with scope_of(path):
                return fn(*args, **kwargs)
        record = scope.record()
        record.reached.add(marked)
        record.modules.setdefault(path, path)
        parameters, args, kwargs = _split(args, kwargs) if held is None else held.split(args, kwargs)

        def pure(parameters: Any, /, *args: Any, **kwargs: Any) -> Any:
            if held is None:
                args = (*parameters, *args)
            else:
                args, kwargs = held.join({**parameters, **kwargs})
            with entered(marked):
                return fn(*args, **kwargs)

        with compat.blocks_around_which(checkpoints_stay=policies.keeps), scope_of(path):
            return run_block(pure, path, parameters, args, kwargs, policy, record.audit)

    scope.marked.add(marked)
    return marked


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """`(parameters, args, kwargs)`: the parameters are the first argument, unless it is an array."""
    count = 1 if args and not compat.is_array(args[0]) else 0
    return args[:count], args[count:], kwargs


class _Parameters:
    """The arguments of a function that hold parameters, by name."""

    def __init__(self, fn: Callable[..., Any], names: Sequence[str]) -> None:
        self.names, self.signature = names, inspect.signature(fn)
        for name in names:
            if name not in self.signature.parameters:
                parameters = list(self.signature.parameters)
                raise ArgumentError(
                    f"parameters={name!r}: no argument of {getattr(fn, '__name__', fn)} has this name."
                    f"{nearest(name, parameters)} There are: {', '.join(parameters)}"
                )

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """`(parameters, (), others)`: the parameters and the other arguments, each a dict by argument name."""
        others = dict(self.signature.bind(*args, **kwargs).arguments)
        return {name: others.pop(name) for name in self.names if name in others}, (), others

    def join(self, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`arguments`, given by name, as the positional and keyword arguments that the function takes."""
        order = {name: arguments[name] for name in self.signature.parameters if name in arguments}
        bound = inspect.BoundArguments(self.signature, order)
        return bound.args, bound.kwargs
