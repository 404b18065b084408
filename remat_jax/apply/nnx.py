"""Blocks that are NNX modules: the methods of their class are intercepted, and their state is an input and an output.

`apply/nnx_state.py` keeps the state: only what the call changed leaves the block.

NNX leaves no module paths in the jaxpr. So this file adds the paths as named scopes while a block is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.binding import RegionPolicy
from remat_jax.apply.calls import Call, entered, intercepted, named_scopes
from remat_jax.apply.methods import CALL, block_path, classes_and_methods, with_own_method
from remat_jax.apply.nnx_state import nodes_in
from remat_jax.apply.region import run_block
from remat_jax.apply.scope import BlockPolicies
from remat_jax.identity import ByIdentity

# A module → its path from its root (`known_paths`). A root is an argument of the function under a policy.
_paths: ContextVar[ByIdentity[str]] = ContextVar("paths", default=ByIdentity())  # noqa: B039 - never mutated, only replaced


def call(
    module: nnx.Pytree,
    original: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: RegionPolicy,
    audit: Audit,
    path: str = "",
    method: str = CALL,
) -> Any:
    """`original(module, *args, **kwargs)`, a call of `method`, as one checkpointed block.

    The state of the module, and of every NNX object among the arguments (an `nnx.Rngs`, a cache), is an input and an output
    of the block. The call leaves these objects as it would without a policy.
    """
    path = path or path_of(module)

    def run(inner: nnx.Pytree, /, *args: Any, **kwargs: Any) -> Any:
        parts = [part for part in parts_in(inner) if part[0]]
        with entered(inner, method), known_paths(inner, path), named_scopes(parts, parts_in, shapes):
            return original(inner, *args, **kwargs)

    return run_block(run, block_path(path, method), module, args, kwargs, policy, audit)


def call_together(modules: Sequence[nnx.Module], run: Callable[..., Any], policy: RegionPolicy, x: Any, audit: Audit) -> Any:
    """`run(modules, x)` of several modules as one checkpointed block."""
    return call(nnx.List(modules), lambda together, x: run(list(together), x), (x,), {}, policy, audit, path_of(modules[0]))


def path_of(module: nnx.Module) -> str:
    """The path of `module` from its root (`known_paths`); the name of its class if it has no recorded path."""
    return _paths.get().get(module, type(module).__name__)


# --- module paths -----------------------------------------------------------------------------------------------------


def parts_in(root: Any) -> list[tuple[str, nnx.Module]]:
    """The modules in `root` (a module, or a pytree of modules) with their paths; the path of `root` itself is empty."""
    return [("/".join(map(str, path)), node) for path, node in nnx.iter_graph(root) if isinstance(node, nnx.Module)]


def shapes(module: nnx.Module) -> list[Any]:
    """The shapes of the values of the variables in `module`."""
    variables = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)]
    return [getattr(variable.get_raw_value(), "shape", None) for variable in variables]


def known_paths(root: Any, prefix: str = "") -> AbstractContextManager[None]:
    """Inside this context `path_of` returns `prefix` and a path for each module in `root`, a module or a pytree of modules."""
    paths = ByIdentity((node, f"{prefix}/{path}".strip("/") or type(node).__name__) for path, node in parts_in(root))
    return compat.setting(_paths, _paths.get() | paths)


@contextmanager
def known_paths_in(arguments: Any) -> Iterator[None]:
    """`known_paths` for each module in a pytree of arguments. The path of such a module itself is the name of its class."""
    with ExitStack() as stack:
        for root in nodes_in(arguments):
            if isinstance(root, nnx.Module):
                stack.enter_context(known_paths(root))
        yield


def loss_of_state(model: nnx.Module, loss: Call) -> tuple[Call, Any, Any]:
    """`loss(model, *batch)` as a function of parameters, other state and batch; the model's parameters and other state."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def of_params(params: Any, rest: Any, *batch: Any) -> Any:
        # Copy the variables at this level of tracing; otherwise Flax refuses to write to counters and statistics.
        merged = nnx.merge(graphdef, *jax.tree.map(lambda leaf: leaf, (params, rest)))
        with known_paths(merged):
            return loss(merged, *batch)

    of_params.__name__ = getattr(loss, "__name__", "loss")
    return of_params, params, rest


# --- intercepting -----------------------------------------------------------------------------------------------------


@contextmanager
def intercepting(policies: BlockPolicies, arguments: Any) -> Iterator[None]:
    """Intercept the calls of the NNX blocks of `policies`; paths start at the modules among `arguments`."""
    methods = set(_block_methods(policies))
    if not methods:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(known_paths_in(arguments))
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
