"""Replaces functions of JAX where JAX has no hook, from when they are needed: importing this package changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Patch:
    """Attributes that are replaced while any thread is inside `with patch:`, and restored afterwards.

    Other threads see the replacements too, so a replacement must do the same as the original for them.

    Args:
      places: for each attribute its owner, its name, and a function that makes the replacement from the original. If the owner
        is a dictionary, the name is a key.

    >>> class Owner:
    ...     sign = staticmethod(lambda x: x)
    >>> with Patch((Owner, "sign", lambda original: staticmethod(lambda x: -original(x)))):
    ...     print(Owner.sign(1))
    -1
    >>> Owner.sign(1)
    1
    """

    def __init__(self, *places: tuple[Any, Any, Callable[[Any], Any]]) -> None:
        self._places, self._lock, self._users = places, threading.RLock(), 0
        self._own: list[tuple[bool, Any]] = []
        self._is_kept = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._own = [_replace(*place) for place in self._places]
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for (owner, name, _), (has_own, value) in zip(self._places, self._own, strict=True):
                    _restore(owner, name, has_own, value)

    def keep(self) -> None:
        """Replace the attributes from now on."""
        with self._lock:
            if not self._is_kept:
                self.__enter__()
            self._is_kept = True


def _replace(owner: Any, name: Any, make: Callable[[Any], Any]) -> tuple[bool, Any]:
    """Replace one attribute; whether the owner itself, and not its class, has it, and its value."""
    if isinstance(owner, dict):
        value = owner[name]
        owner[name] = make(value)
        return True, value
    own = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))
    return own


def _restore(owner: Any, name: Any, has_own: bool, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    elif has_own:
        setattr(owner, name, value)
    else:
        delattr(owner, name)
