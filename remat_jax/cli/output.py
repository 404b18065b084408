"""What all commands share: where output goes, how errors end, and how long work shows that it lives."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from remat_jax.errors import ArgumentError, CompileError, InfeasibleBudget, RematError, UnsupportedError
from remat_jax.reading import visible
from remat_jax.report.svg import FORMATS
from remat_jax.report.tables import SafeConsole
from remat_jax.warning import silenced

FAILED, BAD_USAGE, INFEASIBLE = 1, 2, 3
# Where nobody looks at a terminal (a log, a file) there is no width to keep to.
_WIDTH_WITHOUT_TERMINAL = 120

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]


_PLAIN = {"−": "-", "–": "-", "—": "-", "×": "x", "≤": "<=", "≥": ">=", "→": "->", "…": "...", "µ": "u", "·": ".", "█": "#"}


def check_picture(plot: Path) -> None:
    """Check before minutes of compiling that a picture can have this name."""
    if plot.suffix.lower() not in FORMATS:
        raise ArgumentError(f"plot={str(plot)!r}: pictures are written as SVG; expected a name that ends in .svg")


def prepare_streams() -> None:
    """Have standard output and error take every text: what their encoding lacks in other letters, and a closed one nothing."""
    codecs.register_error("remat_jax", _otherwise)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="remat_jax")


@contextlib.contextmanager
def written() -> Iterator[None]:
    """All that is printed reaches standard output; exits 1 with a message where a disk is full, or the device is gone."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        # One with a file's name is of that file.
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EIO) or error.filename is not None:
            raise
        # Python would try once more at its end.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        sys.exit(f"error: standard output cannot be written ({error.strerror})")


def _otherwise(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter, "?") for letter in wrong), error.end


def console(*, stderr: bool = False) -> Console:
    """A console on standard output or standard error, as they are now."""
    stream = sys.stderr if stderr else sys.stdout
    return SafeConsole(file=stream, width=None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL, highlight=False)


class Answer:
    """A command's answer: as JSON on standard output, or printed for people."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._out = sys.stdout

    def show(self, *renderables: Any) -> None:
        """Print for people: on standard output, and not at all with `--json`."""
        if not self.as_json:
            for renderable in renderables:
                console().print(renderable, markup=False, soft_wrap=False)

    def remark(self, text: Any) -> None:
        """Print what must be seen either way: after the answer for people, on standard error with `--json`."""
        console(stderr=self.as_json).print(text, markup=False)

    def data(self, values: dict[str, Any]) -> None:
        """Print the JSON object; not at all without `--json`."""
        if self.as_json:
            print(json.dumps(finite(values), allow_nan=False), file=self._out, flush=True)

    def error(self, message: str, status: int, **more: Any) -> NoReturn:
        """End the command with a message on standard error, and the same, and `more`, as a JSON object with `--json`."""
        print(f"error: {visible(message)}", file=sys.stderr)
        self.data({"error": message, **more})
        raise typer.Exit(status)


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[Answer]:
    """Give the command its `Answer`, and end it with a message and an exit status where one of our errors is raised.

    With `--json`, whatever else prints meanwhile (a user's own file, say) prints to standard error.
    """
    answer = Answer(as_json=as_json)
    # The commands print our warnings after their tables.
    with silenced(), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            yield answer
        except InfeasibleBudget as error:
            answer.error(str(error), INFEASIBLE, least_bytes=error.least_bytes, held_by=error.held_by)
        except RematError as error:
            answer.error(str(error), FAILED if isinstance(error, CompileError | UnsupportedError) else BAD_USAGE)


@contextlib.contextmanager
def progress(total: int | None = None) -> Iterator[_Steps]:
    """A bar on standard error; where that is no terminal, a line for each thing that begins."""
    screen = console(stderr=True)
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.description}", markup=False), console=screen, transient=True, disable=not screen.is_terminal
    ) as bar:
        yield _Steps(bar, screen, total)


class _Steps:
    """Tells what is being done, and how much of it is behind."""

    def __init__(self, bar: Progress, screen: Console, total: int | None) -> None:
        self._bar, self._screen, self._said, self._began = bar, screen, "", time.monotonic()
        self._task = bar.add_task("", total=total)

    def tell(self, what: str, done: int, total: int) -> None:
        """`what` is being done, and `done` of `total` parts are behind."""
        self._bar.update(self._task, description=what, completed=done, total=total)
        if self._bar.disable and what != self._said:
            self._screen.print(f"[{done}/{total}, {time.monotonic() - self._began:.0f} s] {what}", markup=False)
        self._said = what


def finite(value: Any) -> Any:
    """Plain data in which every number that JSON cannot write (infinity, not a number) is None."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
