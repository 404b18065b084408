"""Intercepts calls of classes and of marked functions, for libraries that have no hook around a call (NNX, Equinox)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.audit import Audit
from remat_jax.identity import ByIdentity

Call = Callable[..., Any]

# The globs whose blocks are being traced. A glob selects only the outermost modules that it matches.
_globs: ContextVar[tuple[str, ...]] = ContextVar("globs", default=())
# The blocks that are being traced under their policy.
_inside: ContextVar[tuple[Any, ...]] = ContextVar("inside", default=())


def is_inside(block: Any) -> bool:
    """Whether a module or function is being traced under its policy."""
    return any(block is running for running in _inside.get())


def entered(block: Any) -> AbstractContextManager[None]:
    """Inside this context `block` is being traced under its policy, so a call of `block` is not checkpointed again."""
    return compat.setting(_inside, (*_inside.get(), block))


def run_module(module: Any, path: str, plain: Callable[[], Any], checkpointed: Callable[[Any, Audit], Any]) -> Any:
    """A call of `module` at `path`: `checkpointed(policy, audit)` if an active policy selects the module, else `plain()`."""
    policies = scope.active()
    if policies is None or is_inside(module):
        return plain()
    record = scope.record()
    record.modules.setdefault(path, type(module).__name__)
    entry = policies.find(type(module), path, _globs.get())
    if entry is None:
        return plain()
    block, policy = entry
    record.reached.add(block)
    globs = (*_globs.get(), block) if isinstance(block, str) else _globs.get()
    with compat.setting(_globs, globs), compat.blocks_around_which(checkpoints_stay=policies.keeps):
        return checkpointed(policy, record.audit)


def dispatching(original: Call, path_of: Callable[[Any], str], call: Call) -> Call:
    """A wrapper of `original`, the `__call__` of a class. It runs blocks as `call(module, original, policy, …)`."""

    @functools.wraps(original)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_module(
            self,
            path_of(self),
            lambda: original(self, *args, **kwargs),
            lambda policy, audit: call(self, original, policy, args, kwargs, audit),
        )

    return dispatch


Parts = list[tuple[str, Any]]
"""The modules in a block, with their paths from the block."""


class _PartPaths:
    """The paths of a block's parts, and of copies of the parts.

    Flax's transforms run copies of modules, and so does code that calls `nnx.split` and `nnx.merge`. Inside the running part, a
    copy has the path of the only part of its class; if there are several, of the only one whose arrays have the same shapes.
    """

    def __init__(self, parts: Parts, parts_in: Callable[[Any], Parts], shapes: Callable[[Any], Any]) -> None:
        self._parts, self._parts_in, self._shapes = parts, parts_in, shapes
        self._paths = ByIdentity((part, path) for path, part in parts)

    def find(self, module: Any, running: str, *, copies: bool) -> str | None:
        """The path of a part or, with `copies`, of a copy of a part; None for any other module.

        `running` is the path of the part that calls `module`; empty for the block.
        """
        if copies and module not in self._paths:
            inside = f"{running}/" if running else ""
            alike = [(path, part) for path, part in self._parts if type(part) is type(module) and path.startswith(inside)]
            if len(alike) > 1:
                shapes = self._shapes(module)
                alike = [(path, part) for path, part in alike if self._shapes(part) == shapes]
            if len(alike) == 1:
                for path, part in self._parts_in(module):
                    self._paths[part] = f"{alike[0][0]}/{path}".strip("/")
        return self._paths.get(module)


# The paths of the innermost block. Copies inside a block that is inside another block are of the inner block's parts.
_innermost: ContextVar[_PartPaths | None] = ContextVar("innermost", default=None)


@contextmanager
def named_scopes(parts: Parts, parts_in: Callable[[Any], Parts], shapes: Callable[[Any], Any]) -> Iterator[None]:
    """Inside this context each part of a block, or copy of a part, runs in a scope named by its path.

    The path is relative to the enclosing part that is running.

    Args:
      parts: the block's parts.
      parts_in: returns the modules in a module with their paths; the path of the module itself is empty.
      shapes: returns the shapes of the arrays of a module.
    """
    paths, around = _PartPaths(parts, parts_in, shapes), ContextVar("around", default="")

    def wrap(original: Call) -> Call:
        @functools.wraps(original)
        def named(self: Any, *args: Any, **kwargs: Any) -> Any:
            outer = around.get()
            name = paths.find(self, outer, copies=_innermost.get() is paths)
            if name is None or name == outer:
                return original(self, *args, **kwargs)
            relative = name.removeprefix(outer + "/") if outer else name
            with compat.setting(around, name), jax.named_scope(relative):
                return original(self, *args, **kwargs)

        return named

    with patched({type(module) for _, module in parts}, wrap), compat.setting(_innermost, paths):
        yield


def with_own_call(cls: Any) -> Iterable[type]:
    """The subclasses, at any depth, that define `__call__` themselves."""
    for subclass in cls.__subclasses__():
        if "__call__" in vars(subclass):
            yield subclass
        yield from with_own_call(subclass)


# This lock is held only while a class is changed. User code never runs under it, because user code may wait for other threads.
_patch_lock = threading.Lock()
_patches: dict[type, _Patch] = {}
# class → its wrapped `__call__` in this context. Other threads have their own contexts and wrapped calls.
_wrapped: ContextVar[dict[type, Call]] = ContextVar("wrapped", default={})  # noqa: B039 - never mutated, only replaced


@contextmanager
def patched(classes: Iterable[type], wrap: Callable[[Call], Call]) -> Iterator[None]:
    """Replace the `__call__` of each class by `wrap(__call__)` inside this context.

    Several threads may patch one class. Each thread sees its own wrapped call; the last thread to leave restores the class.
    """
    with ExitStack() as stack:
        wrapped = dict(_wrapped.get())
        for cls in classes:
            if any("__call__" in vars(base) for base in cls.__mro__):
                original = stack.enter_context(_one_patched(cls))
                wrapped[cls] = wrap(wrapped.get(cls, original))
        stack.enter_context(compat.setting(_wrapped, wrapped))
        yield


class _Patch:
    """Replaces the `__call__` of a class by a function that looks up the wrapped call of the current context.

    Attributes:
      own: the `__call__` that the class itself defines; None if the class inherits its `__call__`.
      original: the `__call__` for contexts that have not wrapped the class.
      users: the number of contexts that have wrapped the class.
    """

    def __init__(self, cls: Any) -> None:
        before, self.own, self.users = cls.__call__, vars(cls).get("__call__"), 0

        @functools.wraps(before)
        def inherited(module: Any, *args: Any, **kwargs: Any) -> Any:
            # Looked up at each call, because the base class may be patched later.
            return super(cls, module).__call__(*args, **kwargs)  # type: ignore[misc]

        self.original = original = inherited if self.own is None else before

        @functools.wraps(before)
        def look_up(module: Any, *args: Any, **kwargs: Any) -> Any:
            return _wrapped.get().get(cls, original)(module, *args, **kwargs)

        cls.__call__ = look_up


@contextmanager
def _one_patched(cls: Any) -> Iterator[Call]:
    with _patch_lock:
        if cls not in _patches:
            _patches[cls] = _Patch(cls)
        patch = _patches[cls]
        patch.users += 1
    try:
        yield patch.original
    finally:
        with _patch_lock:
            patch.users -= 1
            if not patch.users:
                del _patches[cls]
                if patch.own is None:
                    del cls.__call__
                else:
                    cls.__call__ = patch.own
