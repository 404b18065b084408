"""Intercepts calls of methods and of marked functions, for libraries that have no hook around a call (NNX, Equinox)."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import jax
from flax import linen

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.audit import Audit
from remat_jax.apply.methods import CALL, block_path, defines, first_name
from remat_jax.identity import ByIdentity

Call = Callable[..., Any]

# The globs whose blocks are being traced. A glob selects only the outermost modules that it matches.
_globs: ContextVar[tuple[str, ...]] = ContextVar("globs", default=())
# The calls that are being traced under their policy: a module or function, and the method.
_inside: ContextVar[tuple[tuple[Any, str], ...]] = ContextVar("inside", default=())
# The context in which each module is called (`listening`).
_listener: ContextVar[Callable[[Any, str], AbstractContextManager[Any]] | None] = ContextVar("listener", default=None)


naming = compat.trace_context(False, reaches_blocks=False)
"""Whether modules and marked functions run in scopes named by their paths (`with_module_names`)."""


def scope_of(path: str) -> AbstractContextManager[Any]:
    """A scope named by this path, if modules have such scopes here (`naming`)."""
    return jax.named_scope(path) if naming.value else nullcontext()


def listening(listener: Callable[[Any, str], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Inside this context each module at `path` is called in the context `listener(its class, path)`.

    A marked function is called in the context `listener(function, path)`.
    """
    return compat.setting(_listener, listener)


def heard(block: object, path: str) -> AbstractContextManager[Any]:
    """The listener's context for a call of a module's class, or of a marked function, at `path`."""
    listener = _listener.get()
    return nullcontext() if listener is None else listener(block, path)


def is_listening() -> bool:
    """Whether a listener is set (`listening`)."""
    return _listener.get() is not None


def is_inside(block: object, method: str = CALL) -> bool:
    """Whether this method of a module, or this function, is being traced under its policy."""
    return any(method == of_running and _is_same(block, running) for running, of_running in _inside.get())


def entered(block: object, method: str = CALL) -> AbstractContextManager[None]:
    """Inside this context the method is being traced under its policy, so a call of it is not checkpointed again."""
    return compat.setting(_inside, (*_inside.get(), (block, method)))


def _is_same(block: Any, running: Any) -> bool:
    """Whether two modules are one. Flax's transforms around a method (`@nn.remat`) run it on a copy of the Linen module."""
    if not isinstance(block, linen.Module) or type(block) is not type(running) or block.scope is None:
        return block is running
    return running.scope is not None and block.path == running.path


def run_module(
    module: object, path: str, plain: Callable[[], Any], as_block: Callable[[Any, Audit], Any], method: str = CALL
) -> Any:
    """A call of `module` at `path`: `as_block(policy, audit)` if an active policy selects the method, else `plain()`."""
    policies = scope.active()
    if policies is None or is_inside(module, method):
        return plain()
    record = scope.record()
    if is_listening() and method == CALL:
        # A call of `super().__call__` is a part of this call.
        with heard(type(module), path), entered(module, method):
            return plain()
    if method == CALL:
        record.modules.setdefault(path, type(module).__name__)
    entry = policies.find(type(module), path, _globs.get(), method)
    if entry is None:
        return plain()
    block, policy = entry
    record.reached.add(block)
    globs = (*_globs.get(), block) if isinstance(block, str) else _globs.get()
    with compat.setting(_globs, globs), compat.blocks_around_which(checkpoints_stay=policies.keeps):
        return as_block(policy, record.audit)


@contextmanager
def intercepted(methods: Iterable[tuple[type, str]], path_of: Callable[[Any], str], call: Call) -> Iterator[None]:
    """Inside this context a call of one of the `methods` (class, name) that is a block runs as `call(module, original, …)`."""
    by_name: dict[str, set[type]] = {}
    for cls, name in methods:
        by_name.setdefault(name, set()).add(cls)
    with ExitStack() as stack:
        for name, classes in by_name.items():
            stack.enter_context(patched(classes, functools.partial(_dispatching, name, path_of, call), name))
        yield


def _dispatching(method: str, path_of: Callable[[Any], str], call: Call, original: Call) -> Call:
    @functools.wraps(original)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        name, path = first_name(type(self), method), path_of(self)

        def as_block(policy: Any, audit: Audit) -> Any:
            # A module that is called inside another one runs in a scope already.
            with nullcontext() if in_named_part() else scope_of(block_path(path, name)):
                return call(self, original, args, kwargs, policy, audit, method=name)

        return run_module(self, path, lambda: original(self, *args, **kwargs), as_block, name)

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

    def find(self, module: object, running: str, *, copies: bool) -> str | None:
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


def in_named_part() -> bool:
    """Whether a module is running whose parts have named scopes (`named_scopes`)."""
    return _innermost.get() is not None


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


# This lock is held only while a class is changed. User code never runs under it, because user code may wait for other threads.
_patch_lock = threading.Lock()
_patches: dict[tuple[type, str], _Patch] = {}
# (class, method) → the wrapped method in this context. Other threads have their own contexts and wrapped methods.
_wrapped: ContextVar[dict[tuple[type, str], Call]] = ContextVar("wrapped", default={})  # noqa: B039 - only replaced


@contextmanager
def patched(classes: Iterable[type], wrap: Callable[[Call], Call], method: str = CALL) -> Iterator[None]:
    """Replace the `method` of each class that has it by `wrap(method)` inside this context.

    Several threads may patch one class. Each thread sees its own wrapped call; the last thread to leave restores the class.
    """
    with ExitStack() as stack:
        wrapped = dict(_wrapped.get())
        for cls in classes:
            if defines(cls, method):
                original = stack.enter_context(_one_patched(cls, method))
                wrapped[cls, method] = wrap(wrapped.get((cls, method), original))
        stack.enter_context(compat.setting(_wrapped, wrapped))
        yield


class _Patch:
    """Replaces a method of a class by a function that looks up the wrapped method of the current context.

    Attributes:
      own: the method as the class itself defines it; None if the class inherits it.
      original: the method for contexts that have not wrapped the class.
      users: the number of contexts that have wrapped the class.
    """

    def __init__(self, cls: type, method: str) -> None:
        before, self.own, self.users = getattr(cls, method), vars(cls).get(method), 0

        @functools.wraps(before)
        def inherited(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            # Looked up at each call, because the base class may be patched later.
            return getattr(super(cls, module), method)(*args, **kwargs)

        self.original = original = inherited if self.own is None else before

        @functools.wraps(before)
        def look_up(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            return _wrapped.get().get((cls, method), original)(module, *args, **kwargs)

        # The undecorated function: Equinox warns of a method whose `__wrapped__` has arrays, as its own decorators do.
        look_up.__wrapped__ = inspect.unwrap(before)
        setattr(cls, method, look_up)


@contextmanager
def _one_patched(cls: type, method: str) -> Iterator[Call]:
    with _patch_lock:
        if (cls, method) not in _patches:
            _patches[cls, method] = _Patch(cls, method)
        patch = _patches[cls, method]
        patch.users += 1
    try:
        yield patch.original
    finally:
        with _patch_lock:
            patch.users -= 1
            if not patch.users:
                del _patches[cls, method]
                if patch.own is None:
                    delattr(cls, method)
                else:
                    setattr(cls, method, patch.own)
