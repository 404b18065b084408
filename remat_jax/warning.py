"""This package's Python warnings: one category, each message once per line of user code."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from remat_jax.reading import visible


class RematWarning(UserWarning):
    """The category of this package's warnings: a policy without effect, an offload that moved too little, a full host.

    Printed reports contain the same texts. Each line of user code gets a message once.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.filterwarnings("error", category=RematWarning)  # a job that must not start with a warning
    ...     warn("the host has too little memory")
    Traceback (most recent call last):
      ...
    remat_jax.warning.RematWarning: the host has too little memory
    """


_PACKAGE = str(Path(__file__).parent)
_silenced: ContextVar[bool] = ContextVar("silenced", default=False)
# The file, line and message of every warning given. Python's own registry would forget them at every change of a filter.
_given: set[tuple[str, int, str]] = set()


def warn(messages: str | Iterable[str] | None) -> None:
    """Issue each of `messages` as a warning at the line of user code that called this package, once per line and message."""
    if messages is None or _silenced.get():
        return
    file, line, depth = _caller()
    for message in map(visible, [messages] if isinstance(messages, str) else messages):
        key = (file, line, message)
        if key not in _given:
            warnings.warn(message, RematWarning, stacklevel=depth)
            _given.add(key)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """In this context `warn` does nothing, because the caller reports the messages itself. It is also a decorator."""
    token = _silenced.set(True)
    try:
        yield
    finally:
        _silenced.reset(token)


def is_silenced() -> bool:
    """Whether `warn` issues nothing here."""
    return _silenced.get()


def _caller() -> tuple[str, int, int]:
    """The file and line of the nearest frame outside this package, and the `stacklevel` with which `warn` points to it."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, depth
