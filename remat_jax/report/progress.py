"""Progress in a terminal: a bar with the current activity, the finished parts and the time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from remat_jax.report.tables import SafeConsole

Step = Callable[[str, int, int], None]
"""Called with the current activity, the number of finished parts, and the number of all parts."""


def silent(activity: str, done: int, of: int) -> None:
    """A `Step` that does nothing."""


@contextlib.contextmanager
def progress_bar(screen: Console) -> Iterator[Step]:
    """A bar on `screen`, which disappears at the end; if `screen` is not a terminal, a line for each activity that begins."""
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.description}", markup=False), console=screen, transient=True, disable=not screen.is_terminal
    ) as bar:
        bar.add_task("", total=None)
        (task,), began = bar.tasks, time.monotonic()

        def show_step(step: str, done: int, total: int) -> None:
            if bar.disable and step != task.description:
                screen.print(f"[{done}/{total}, {time.monotonic() - began:.0f} s] {step}", markup=False)
            bar.update(task.id, description=step, completed=done, total=total)

        yield show_step


@contextlib.contextmanager
def shown(progress: Step | None) -> Iterator[Step]:
    """`progress`; if it is None, a bar on standard error if this is a terminal, else a function that does nothing."""
    if progress is not None:
        yield progress
    elif sys.stderr is not None and sys.stderr.isatty():
        with progress_bar(SafeConsole(file=sys.stderr, highlight=False)) as show_step:
            yield show_step
    else:
        yield silent
