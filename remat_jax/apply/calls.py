"""Intercepting the calls of classes and of marked functions, for libraries that have no hook around a call (NNX, Equinox)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply import scope

Call = Callable[..., Any]

# The globs whose blocks are being traced: a glob selects the outermost modules that it matches.
_globs: ContextVar[tuple[str, ...]] = ContextVar("globs", default=())
# The ids of the blocks that are being traced under their policy.
_inside: ContextVar[tuple[int, ...]] = ContextVar("inside", default=())


def is_inside(block: Any) -> bool:
    """Whether a module or function is being traced under its policy."""
    return id(block) in _inside.get()


@contextmanager
def entered(block: Any) -> Iterator[None]:
    """Marks `block` as running inside its checkpoint, so that its call is not checkpointed again."""
    token = _inside.set((*_inside.get(), id(block)))
    try:
        yield
    finally:
        _inside.reset(token)


def dispatching(original: Call, path_of: Callable[[Any], str], call: Call) -> Call:
    """`original`, the `__call__` of a class, which `call` runs instead if the active policies have one for the module.

    Args:
      path_of: the module path of an instance.
      call: `call(module, original, policy, args, kwargs, audit)`.
    """

    @functools.wraps(original)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        policies = scope.active()
        if policies is None or is_inside(self):
            return original(self, *args, **kwargs)
        record = scope.record()
        path = path_of(self)
        record.modules.setdefault(path, type(self).__name__)
        entry = policies.find(type(self), path, _globs.get())
        if entry is None:
            return original(self, *args, **kwargs)
        block, policy = entry
        record.reached.add(block)
        token = _globs.set((*_globs.get(), block) if isinstance(block, str) else _globs.get())
        try:
            with compat.blocks_around_which(checkpoints_stay=policies.keeps):
                return call(self, original, policy, args, kwargs, record.audit)
        finally:
            _globs.reset(token)

    return dispatch


class Scopes:
    """Opens the named scope of a module, relative to the scope of the module that calls it."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names, self.around = names, ContextVar("around", default="")

    @contextmanager
    def entered(self, module: Any) -> Iterator[None]:
        """Trace the call of a module in its scope."""
        name, around = self.names.get(id(module)), self.around.get()
        if name is None or name == around:
            yield
            return
        relative = name.removeprefix(around + "/") if around else name
        token = self.around.set(name)
        try:
            with jax.named_scope(relative):
                yield
        finally:
            self.around.reset(token)


def with_own_call(cls: Any) -> Iterable[type]:
    """The subclasses, at any depth, that define `__call__` themselves."""
    for subclass in cls.__subclasses__():
        if "__call__" in vars(subclass):
            yield subclass
        yield from with_own_call(subclass)


# Held only while a class is changed, never while user code runs: that may wait for other threads.
_patch_lock = threading.Lock()
_patches: dict[type, _Patch] = {}
# class → its call, wrapped in this context. Other threads have contexts and wraps of their own.
_wrapped: ContextVar[dict[type, Call]] = ContextVar("wrapped", default={})  # noqa: B039 - never mutated, only replaced


@contextmanager
def patched(classes: Iterable[type], wrap: Callable[[Call], Call]) -> Iterator[None]:
    """Replace the `__call__` of each class by `wrap(__call__)` inside this context.

    Several threads may patch the same class. Each thread sees its own wraps; the last one to leave restores the class.
    """
    with ExitStack() as stack:
        wrapped = dict(_wrapped.get())
        for cls in classes:
            if any("__call__" in vars(base) for base in cls.__mro__):
                original = stack.enter_context(_one_patched(cls))
                wrapped[cls] = wrap(wrapped.get(cls, original))
        token = _wrapped.set(wrapped)
        try:
            yield
        finally:
            _wrapped.reset(token)


class _Patch:
    """Replaces the `__call__` of a class by a function that looks up the wrapped call of the current context.

    Attributes:
      own: the `__call__` that the class itself defines; None if it inherits it.
      original: the call to run in a context that has not wrapped it.
      users: how many contexts have wrapped it.
    """

    def __init__(self, cls: Any) -> None:
        before, self.own, self.users = cls.__call__, vars(cls).get("__call__"), 0

        @functools.wraps(before)
        def inherited(module: Any, *args: Any, **kwargs: Any) -> Any:
            # Looked up at each call: whether the base class is patched may change.
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
