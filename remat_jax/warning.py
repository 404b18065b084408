"""What a reader must know and is no error: Python warnings of one category, each said once."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from remat_jax.reading import visible


class RematWarning(UserWarning):
    """Category of every warning of ours: a policy without effect, an offload that moved less than was asked, a full host.

    The same text stands in the printed report. From one line of a program a text is given once.

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
# The file and line of the caller with each text that it was given: Python's own record is emptied by every change of a filter.
_given: set[tuple[str, int, str]] = set()


def warn(messages: str | Iterable[str] | None) -> None:
    """Give the user's line that called this package each of `messages` as a `RematWarning`, unless it had it before.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     for _ in range(3):
    ...         warn("the host has too little memory")
    >>> [(str(one.message), one.category.__name__) for one in caught]
    [('the host has too little memory', 'RematWarning')]
    """
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
    """While this holds, `warn` does nothing: the caller reports the same texts itself. Also a decorator.

    >>> with silenced():
    ...     warn("never seen")
    """
    token = _silenced.set(True)
    try:
        yield
    finally:
        _silenced.reset(token)


def _caller() -> tuple[str, int, int]:
    """File and line of the nearest frame outside of this package, and its `stacklevel` for the function that asks."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, depth
