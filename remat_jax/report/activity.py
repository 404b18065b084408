"""What the package does at this moment, for the bar in a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Activity:
    """Something that takes long, since `begin` of `time.monotonic`."""

    text: str
    begin: float = field(default_factory=time.monotonic)


# Those that go on, in any thread: the bar is drawn by a thread of its own.
_going_on: list[Activity] = []


@contextlib.contextmanager
def activity(text: str) -> Iterator[None]:
    """Tell the bar in a terminal, if there is one, what goes on inside this context: `tracing the loss`.

    >>> with activity("tracing the loss"), activity("exporting full"):
    ...     current().text
    'exporting full'
    >>> current() is None
    True
    """
    begun = Activity(text)
    _going_on.append(begun)
    try:
        yield
    finally:
        _going_on.remove(begun)


def current() -> Activity | None:
    """The activity that began last and goes on."""
    last = _going_on[-1:]  # another thread may end it between two looks
    return last[0] if last else None
