"""Progress in a terminal: a bar with the current step, the finished parts, the time, and what goes on at this moment."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from remat_jax.report.activity import current
from remat_jax.report.tables import SafeConsole

Step = Callable[[str, int, int], None]
"""Called with the current step, the number of finished parts, and the number of all parts."""

_LONGEST = 80
"""The most letters of an activity; it may name a policy of many lines."""

_WIDE = 100
"""A terminal with fewer columns has a shorter bar."""


def silent(step: str, done: int, of: int) -> None:
    """A `Step` that does nothing."""


class _StepColumn(ProgressColumn):
    """The current step, and on a line of its own what goes on in it and for how long."""

    max_refresh = None

    def render(self, task: Any) -> Text:
        lines = [task.description] if task.description else []
        if (now := current()) is not None:
            lines.append(f"{shorten(now.text, _LONGEST, placeholder=' …')}, {time.monotonic() - now.begin:.0f} s")
        return Text("\n".join(lines))


class _PartsColumn(MofNCompleteColumn):
    """The numbers of finished and of all parts, once they are known."""

    def render(self, task: Any) -> Text:
        return Text("") if task.total is None else super().render(task)


@contextlib.contextmanager
def progress_bar(screen: Console) -> Iterator[Step]:
    """A bar on `screen`, which disappears at the end; if `screen` is not a terminal, a line for each step that begins."""
    narrow: dict[str, Any] = {"no_wrap": True}
    columns = (
        BarColumn(bar_width=24 if screen.width >= _WIDE else 8, table_column=Column(**narrow)),
        _PartsColumn(table_column=Column(**narrow)),
        TimeElapsedColumn(table_column=Column(**narrow)),
        _StepColumn(table_column=Column(ratio=1)),
    )
    with Progress(*columns, console=screen, transient=True, expand=True, disable=not screen.is_terminal) as bar:
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
