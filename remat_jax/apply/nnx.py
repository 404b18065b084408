"""Blocks that are NNX modules: the `__call__` of their class is intercepted, and their state is an input and an output.

`apply/nnx_state.py` keeps the state: only what the call changed leaves the block.

NNX leaves no module paths in the jaxpr. So this file adds the paths as named scopes while a block is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.calls import Call, dispatching, entered, named_scopes, patched, with_own_call
from remat_jax.apply.nnx_state import is_node
from remat_jax.apply.region import RegionPolicy, run_block
from remat_jax.apply.scope import BlockPolicies

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
) -> Any:
    """`original(module, *args, **kwargs)` as one checkpointed block.

    The state of the module, and of every NNX object among the arguments (an `nnx.Rngs`, a cache), is an input and an output
    of the block. The call leaves these objects as it would without a policy.
    """
    path = path or path_of(module)

    def run(inner: Any, *args: Any, **kwargs: Any) -> Any:
        parts = [part for part in _modules_in(inner) if part[0]]
        with entered(inner), known_paths(inner, path), named_scopes(parts, _modules_in, _shapes):
            return original(inner, *args, **kwargs)

    return run_block(run, policy, path, module, args, kwargs, audit)


def call_together(modules: Sequence[nnx.Module], run: Callable[..., Any], policy: RegionPolicy, x: Any, audit: Audit) -> Any:
    """`run(modules, x)` of several modules as one checkpointed block."""
    return call(nnx.List(modules), lambda together, x: run(list(together), x), policy, (x,), {}, audit, path_of(modules[0]))


def path_of(module: nnx.Module) -> str:
    """The path of `module` from its root (`known_paths`); the name of its class if it has no recorded path."""
    return _paths.get().get(id(module), type(module).__name__)


# --- module paths -----------------------------------------------------------------------------------------------------


def _modules_in(root: Any) -> list[tuple[str, nnx.Module]]:
    """The modules in `root` (a module, or a pytree of modules) with their paths; the path of `root` itself is empty."""
    return [("/".join(map(str, path)), node) for path, node in nnx.iter_graph(root) if isinstance(node, nnx.Module)]


def _shapes(module: nnx.Module) -> list[Any]:
    variables = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)]
    return [getattr(variable.get_raw_value(), "shape", None) for variable in variables]


def known_paths(root: Any, prefix: str = "") -> AbstractContextManager[None]:
    """Inside this context `path_of` returns `prefix` and a path for each module in `root`, a module or a pytree of modules."""
    paths = {id(node): f"{prefix}/{path}".strip("/") or type(node).__name__ for path, node in _modules_in(root)}
    return compat.setting(_paths, _paths.get() | paths)


# --- intercepting -----------------------------------------------------------------------------------------------------


@contextmanager
def intercepting(policies: BlockPolicies, arguments: Any) -> Iterator[None]:
    """Intercept the calls of the NNX blocks of `policies`; paths start at the modules among `arguments`."""
    classes = set(_block_classes(policies))
    if not classes:
        yield
        return
    roots = [leaf for leaf in jax.tree.leaves(arguments, is_leaf=is_node) if isinstance(leaf, nnx.Module)]
    with ExitStack() as stack:
        for root in roots:
            stack.enter_context(known_paths(root))
        stack.enter_context(patched(classes, functools.partial(dispatching, path_of=path_of, call=call)))
        yield


def _block_classes(policies: BlockPolicies) -> Iterable[type]:
    """The classes whose `__call__` may run a block: the given classes and their subclasses; for a glob, all NNX classes."""
    for block, _ in policies.entries:
        if isinstance(block, str):
            yield from with_own_call(nnx.Module)
        elif isinstance(block, type) and issubclass(block, nnx.Module):
            yield from with_own_call(block)
            yield block
