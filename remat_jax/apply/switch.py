"""Turns the checkpointing of a model on and off, as in OpenPI, and changes nothing else."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

from flax import linen, nnx

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.blocks import checkpoint_blocks
from remat_jax.apply.effect import run_under, traced_under
from remat_jax.apply.methods import CALL, checked_method, classes_and_methods
from remat_jax.apply.nnx_state import as_pure_function
from remat_jax.apply.own_checkpoints import check_choice
from remat_jax.apply.remat import call_block, method_or_block, subclass
from remat_jax.apply.scope import BlockPolicies, Record
from remat_jax.core.marks import CHECKPOINTS, Block
from remat_jax.errors import ArgumentError, BlockError
from remat_jax.identity import ByIdentity
from remat_jax.policy import JaxPolicy, Policy, as_policy

T = TypeVar("T")


def enable_gradient_checkpointing(model: T, policy: Any = "full", *, blocks: Any = None, own_checkpoints: str = "replace") -> T:
    """`model` with `policy` on its blocks.

    An NNX model is changed in place and returned. The class of each block becomes a checkpointed subclass of the same name, so
    functions that were jitted before are traced again. A Linen model is immutable: the result is a checkpointed copy with the
    same parameters. Evaluation without a gradient recomputes nothing and moves nothing.

    Args:
      model: an NNX module, or a Linen module that is not bound.
      policy: a policy, its name or text.
      blocks: a module class, a method of one (`Model.encode`), a glob on module paths, or a tuple of them. A Linen model needs
        `blocks`, because it has no submodules before it is called. The default for an NNX model is every module in a list of
        two or more modules of one class; of nested lists only the outermost counts. If there is no such list, the default is
        the checkpoint regions of the Linen modules inside the NNX model (`nnx.bridge.ToNNX`, as in OpenPI). To select blocks in
        these Linen modules, name Linen classes, or globs on paths inside the modules.
      own_checkpoints: by default `policy` replaces the model's own checkpoints around the blocks, as in `checkpoint_blocks`.
        `"keep"` keeps them, with a `RematWarning`.

    Raises:
      ArgumentError: `model` is no module, or a Linen model without `blocks`.
      BlockError: the model has no such blocks. If the blocks could be in Linen modules inside an NNX model, the error
        is raised when these modules are called.

    >>> from flax import nnx
    >>> model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(3)])
    >>> enabled = enable_gradient_checkpointing(model, "dots", blocks=nnx.Linear)
    >>> enabled is model, isinstance(model.layers[0], nnx.Linear), type(model.layers[0]) is nnx.Linear
    (True, True, False)
    >>> type(disable_gradient_checkpointing(model).layers[0]) is nnx.Linear
    True
    """
    checked, keeps = as_policy(policy), check_choice(own_checkpoints)
    if isinstance(model, linen.Module):
        return _enable_linen(model, checked, blocks, own_checkpoints)
    if not isinstance(model, nnx.Module):
        raise ArgumentError(f"model={model!r}: expected an NNX module or a Linen module")
    disable_gradient_checkpointing(model)
    modules = _nnx_blocks(model, blocks)
    bridged = _bridged_parts(model, blocks, modules)
    if not modules and not bridged:
        raise BlockError(_no_blocks(model, blocks))
    for module, methods in modules.items():
        _change_class(module, _checkpointed_class(cast(Hashable, type(module)), checked, keeps, methods))
    for part, module in bridged.items():
        policies = BlockPolicies.of(dict.fromkeys(_linen_blocks(blocks), checked), keeps=keeps)
        _change_class(module, _bridged_class(cast(Hashable, type(module)), policies, part, tuple(bridged)))
    return model


def disable_gradient_checkpointing(model: T) -> T:
    """`model` without the checkpointing of `enable_gradient_checkpointing`; a plain model is returned unchanged.

    Raises:
      ArgumentError: `model` is no module.

    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    >>> enabled = enable_gradient_checkpointing(model, blocks=nnx.Linear)
    >>> disable_gradient_checkpointing(enabled) is model, type(model.layers[0]) is nnx.Linear
    (True, True)
    """
    if isinstance(model, linen.Module):
        plain = getattr(type(model), "_plain_class", None)
        return plain(**_fields(model)) if plain is not None else model
    if not isinstance(model, nnx.Module):
        raise ArgumentError(f"model={model!r}: expected an NNX module or a Linen module")
    for _, module in nnx.iter_graph(model):
        plain = vars(type(module)).get("_plain_class")
        if plain is not None:
            _change_class(module, plain)
    return model


def _change_class(module: nnx.Module, cls: type) -> None:
    # Flax's __setattr__ would record `__class__` as an attribute, and the model's graph would never compare equal again.
    object.__setattr__(module, "__class__", cls)


def _made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` with cached results; only one thread at a time runs it."""
    kept, one_at_a_time = functools.cache(make), threading.RLock()

    @functools.wraps(make)
    def cached(*args: Hashable) -> Any:
        with one_at_a_time:
            return kept(*args)

    return cached


@_made_once
def _checkpointed_class(cls: Any, policy: Policy | JaxPolicy, keeps: bool, methods: tuple[str, ...]) -> type:
    """The subclass of `cls` with checkpointed `methods`, the same object for the same arguments, so that `jit` caches hit."""

    def checkpointed(name: str) -> Callable[..., Any]:
        def block(self: Any, *args: Any, **kwargs: Any) -> Any:
            with compat.blocks_around_which(checkpoints_stay=keeps):
                return call_block(self, policy, args, kwargs, name)

        return method_or_block(cls, name, block)

    return _checkpointed(cls, {name: checkpointed(name) for name in methods})


def _nnx_blocks(model: nnx.Module, blocks: Any) -> dict[nnx.Module, tuple[str, ...]]:
    """The modules that have `blocks`, and their methods that are the blocks."""
    if blocks is None:
        return dict.fromkeys(repeated_modules(model), (CALL,))
    wanted = blocks if isinstance(blocks, tuple) else (blocks,)
    for block in wanted:
        if not (isinstance(block, type | str) or checked_method(block, "blocks")):
            raise ArgumentError(
                f"blocks={blocks!r}: expected a module class, a method of one (Layer.encode), a tuple of them, or a glob on "
                "module paths."
            )
    modules = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]
    globs = [block for block in wanted if isinstance(block, str)]
    matched = {path for path, _ in modules if any(fnmatchcase("/".join(map(str, path)), glob) for glob in globs)}
    # `*` matches slashes too, so a glob selects only the outermost modules that it matches.
    outermost = {path for path in matched if not any(path[:length] in matched for length in range(len(path)))}
    found: dict[nnx.Module, tuple[str, ...]] = {}
    for path, node in modules:
        names = [name for cls, name in classes_and_methods(wanted) if isinstance(node, cls)]
        names += [CALL] if path in outermost else []
        if names:
            found[node] = tuple(dict.fromkeys(names))
    return found


def repeated_modules(model: nnx.Module) -> list[nnx.Module]:
    """Every module in a list of two or more modules of one class. Of nested lists only the outermost counts."""
    lists: dict[tuple[Any, ...], list[nnx.Module]] = defaultdict(list)
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module) and path and isinstance(path[-1], int):
            lists[path[:-1]].append(node)
    repeated = {where: nodes for where, nodes in lists.items() if len(nodes) > 1 and len(set(map(type, nodes))) == 1}
    inner = {where for where in repeated for other in repeated if len(other) < len(where) and where[: len(other)] == other}
    return [node for where, nodes in repeated.items() if where not in inner for node in nodes]


def _no_blocks(model: nnx.Module, blocks: object) -> str:
    present = sorted({type(node).__name__ for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)})
    wanted = "no list of two or more modules of one class" if blocks is None else f"no module for blocks={blocks!r}"
    return f"model={type(model).__name__} has {wanted}. Pass blocks=… ; its module classes are: {', '.join(present)}."


def _enable_linen(model: linen.Module, policy: Policy | JaxPolicy, blocks: Any, own_checkpoints: str) -> linen.Module:
    if blocks is None:
        raise ArgumentError(
            f"blocks=None for the Linen model {type(model).__name__}: a Linen model has no submodules before it is called. "
            "Pass the block class: enable_gradient_checkpointing(model, policy, blocks=DecoderLayer)."
        )
    if model.scope is not None:
        raise ArgumentError(f"model={type(model).__name__} is bound: enable checkpointing on the model before model.bind")
    plain = disable_gradient_checkpointing(model)
    wanted = blocks if isinstance(blocks, tuple) else (blocks,)
    checked = BlockPolicies.of(dict.fromkeys(wanted, policy))
    return _linen_class(cast(Hashable, type(plain)), checked.entries, own_checkpoints)(**_fields(plain))


@_made_once
def _linen_class(cls: Any, policies: tuple[tuple[Any, Any], ...], own_checkpoints: str) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(cls.__call__, self)
        return checkpoint_blocks(run, dict(policies), own_checkpoints=own_checkpoints)(*args, **kwargs)

    return _checkpointed(cls, {CALL: __call__})


def _checkpointed(cls: Any, methods: Mapping[str, Callable[..., Any]]) -> Any:
    """`cls` with other methods. `disable_gradient_checkpointing` reads the plain class from `_plain_class`."""
    checkpointed = subclass(cls, methods)
    checkpointed._plain_class = cls
    return checkpointed


def _fields(model: linen.Module) -> dict[str, Any]:
    return {
        field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.init and field.name != "parent"
    }


# --- Linen modules inside an NNX model ----------------------------------------------------------------------------------
#
# A part is an `nnx.bridge.ToNNX` in the model. Its Linen blocks are known only when it is called. So its class is replaced by a
# subclass that runs every call, of any method, under the policies. After every part was called, a block that no part called is
# an error.

Part = tuple[str, type]
"""The path of a part in its model, and the class of its Linen module."""


def _bridged_parts(model: nnx.Module, blocks: Any, modules: Iterable[nnx.Module]) -> dict[Part, nnx.Module]:
    """The parts that may have `blocks`, with their modules; empty if `modules` has NNX blocks and `blocks` no Linen class."""
    wanted = _linen_blocks(blocks)
    # A glob that matches NNX modules is not applied to Linen modules.
    if not wanted or (modules and all(isinstance(block, str) for block in wanted)):
        return {}
    others = ByIdentity((module, None) for module in modules)
    return {
        ("/".join(map(str, path)), type(node.to_nnx__module)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.bridge.ToNNX) and node not in others
    }


def _linen_blocks(blocks: Any) -> tuple[Block, ...]:
    """The `blocks` that a Linen module can have: Linen classes and globs. The default is the part's own checkpoints."""
    wanted = (CHECKPOINTS,) if blocks is None else blocks if isinstance(blocks, tuple) else (blocks,)
    return tuple(
        block for block in wanted if isinstance(block, str) or (isinstance(block, type) and issubclass(block, linen.Module))
    )


class _Calls:
    """Collects the blocks that calls of a model's parts have reached so far.

    Attributes:
      parts: the parts not called yet.
      record: the record of all calls, until the policies are known to have an effect; then None.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = set(parts)
        self.record: Record | None = Record()

    def add(self, part: Part | None, record: Record, policies: BlockPolicies) -> None:
        """Record a call of `part`, and check the policies once all parts were called.

        `part` is None for a method other than `__call__`, because such a method may reach no block.

        Raises:
          BlockError, NoEffectError: the error that `scope.missed` returns.
        """
        if self.record is None:
            return
        self.parts -= {part}
        self.record.reached |= record.reached
        self.record.modules |= record.modules
        self.record.audit.add(record.audit)
        if self.parts:
            return
        error = scope.missed(policies, self.record)
        self.record = None if error is None else Record(reached=self.record.reached, modules=self.record.modules)
        if error is not None:
            raise error


_calls_of = _made_once(lambda policies, parts: _Calls(parts))


@_made_once
def _bridged_class(cls: Any, policies: BlockPolicies, part: Part, parts: tuple[Part, ...]) -> Any:
    """The subclass of `cls`, a `ToNNX`, whose calls run under `policies`. All `parts` share one record of their calls."""
    calls: _Calls = _calls_of(policies, parts)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._pytree__state.initializing:
            return cls.__call__(self, *args, **kwargs)
        pure, state, arguments, write = as_pure_function(cls.__call__, (self, *args), kwargs)
        returned, record = run_under(policies, pure, (state, *arguments), {})
        is_whole = kwargs.get("method") is None
        if is_whole and part in calls.parts and not record.reached:
            # If a `jit` inside has a cached trace under the same policies, the call reached blocks without recording them.
            record = traced_under(policies.anew(), pure, (state, *arguments), {})
        calls.add(part if is_whole else None, record, policies)
        return write(returned)

    return _checkpointed(cls, {CALL: __call__})
