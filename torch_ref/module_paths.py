"""Follows the path of the running module, such as `decoder/layers/0/ffn`, by hooks that exist only while needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_lock = threading.Lock()
_running = threading.local()
_hooks: list[Any] = []
_users = 0


class ModulePaths:
    """The path of the module that is running inside a block.

    A module of the block has its path in the block. A module that the block only captures has the path of the module that
    first calls it, followed by the captured module's class name.
    """

    def __init__(self, block: Callable[..., Any], path: str) -> None:
        owner = block if isinstance(block, nn.Module) else getattr(block, "__self__", None)
        self._known: dict[nn.Module, str] = {}
        self._running: list[tuple[nn.Module | None, str]] = [(None, path)]
        if isinstance(owner, nn.Module):
            self._learn(owner, path)

    @property
    def current(self) -> str:
        """The path of the innermost module that is running."""
        return self._running[-1][1]

    def started(self, module: nn.Module) -> None:
        """Note that a module's forward begins."""
        if module not in self._known:
            self._learn(module, join(self.current, type(module).__name__))
        self._running.append((module, self._known[module]))

    def ended(self, module: nn.Module) -> None:
        """Note that a module's forward has ended, or was left by an exception."""
        if self._running[-1][0] is module:
            self._running.pop()

    def _learn(self, root: nn.Module, path: str) -> None:
        for inside, module in root.named_modules():
            self._known.setdefault(module, join(path, inside.replace(".", "/")))


def join(*parts: str) -> str:
    """Join the non-empty parts of a path.

    >>> join("decoder/layers/0", "", "ffn")
    'decoder/layers/0/ffn'
    """
    return "/".join(part for part in parts if part)


@contextmanager
def following(paths: ModulePaths) -> Iterator[None]:
    """Keep `paths` up to date on this thread only, because autograd may recompute on another thread."""
    followed = _followed()
    followed.append(paths)
    _use(1)
    try:
        yield
    finally:
        _use(-1)
        followed.remove(paths)


def _followed() -> list[ModulePaths]:
    if not hasattr(_running, "paths"):
        _running.paths = []
    return _running.paths


def _use(change: int) -> None:
    global _users
    with _lock:
        _users += change
        if _users and not _hooks:
            # Call the hook after exceptions too: an exception ends a recomputation once backward has the tensors it needs.
            _hooks.extend([register_module_forward_pre_hook(_started), register_module_forward_hook(_ended, always_call=True)])
        while _hooks and not _users:
            _hooks.pop().remove()


def _started(module: nn.Module, _: Any) -> None:
    for paths in _followed():
        paths.started(module)


def _ended(module: nn.Module, _: Any, __: Any) -> None:
    for paths in _followed():
        paths.ended(module)
