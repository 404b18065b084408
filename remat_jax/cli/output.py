"""Shared by all commands: where output goes, how errors end a command, and how progress is shown."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from remat_jax.errors import (
    ArgumentError,
    CompileError,
    InfeasibleBudget,
    RematError,
    UnsupportedArgumentError,
    UnsupportedError,
)
from remat_jax.overview.save import checked_path
from remat_jax.reading import visible
from remat_jax.report.progress import progress_bar
from remat_jax.report.svg import FORMATS
from remat_jax.report.tables import SafeConsole
from remat_jax.warning import silenced

FAILED, BAD_USAGE, INFEASIBLE, INTERRUPTED = 1, 2, 3, 130
_WIDTH_WITHOUT_TERMINAL = 120
DEFAULT_TARGET = "h200"
"""The target of every command that compiles."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]

_PLAIN = {"−": "-", "–": "-", "—": "-", "×": "x", "≤": "<=", "≥": ">=", "→": "->", "…": "...", "µ": "u", "·": ".", "█": "#"}


_EXAMPLES = {"save": "plan.json", "html": "page.html", "plot": "picture.svg", "output": "measured.toml"}


def check_files(**paths: Path | None) -> None:
    """Check by option that files can be written, before minutes of compiling."""
    for option, path in paths.items():
        if path is not None:
            checked_path(path, option, _EXAMPLES[option])
            if option == "plot" and path.suffix.lower() not in FORMATS:
                raise ArgumentError(f"plot={str(path)!r}: pictures are written as SVG; expected a name that ends in .svg")


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turn an error of writing a file into an ArgumentError that names the option."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{option}={str(path)!r} cannot be written ({error}); give another file") from None


def prepare_streams() -> None:
    """Make standard output and standard error accept every text: letters that their encodings lack are replaced."""
    codecs.register_error("remat_jax", _otherwise)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="remat_jax")


@contextlib.contextmanager
def written() -> Iterator[None]:
    """At the end of the context flush standard output; exit with a message if its disk is full or its device is gone."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        # An error with a file name is about that file, not about standard output.
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EIO) or error.filename is not None:
            raise
        # Python flushes standard output once more when it exits, which would fail again.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        sys.exit(f"error: standard output cannot be written ({error.strerror})")


def _otherwise(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def console(*, stderr: bool = False) -> Console:
    """A console on the current standard output or standard error."""
    stream = sys.stderr if stderr else sys.stdout
    return SafeConsole(file=stream, width=None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL, highlight=False)


class Answer:
    """A command's answer: as JSON on standard output, or printed for people."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._out = sys.stdout

    def show(self, *renderables: Any) -> None:
        """Print for people on standard output; with `--json` print nothing."""
        if not self.as_json:
            for renderable in renderables:
                console().print(renderable, markup=False, soft_wrap=False)

    def remark(self, text: Any) -> None:
        """Print a remark: on standard output, or on standard error with `--json`."""
        console(stderr=self.as_json).print(text, markup=False)

    def data(self, values: dict[str, Any]) -> None:
        """Print the JSON object with `--json`; otherwise print nothing."""
        if self.as_json:
            print(json.dumps(finite(values), allow_nan=False), file=self._out, flush=True)

    def error(self, message: str, status: int, **more: Any) -> NoReturn:
        """End the command with `message` on standard error; with `--json` also print a JSON object of `message` and `more`."""
        print(f"error: {visible(message)}", file=sys.stderr)
        self.data({"error": message, **more})
        raise typer.Exit(status)


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[Answer]:
    """The command's `Answer`; an error of this package ends the command with a message and an exit status.

    With `--json`, other prints, such as those of a user's file, go to standard error.
    """
    answer = Answer(as_json=as_json)
    # Warnings are silenced here, because the commands print them after their tables.
    with silenced(), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            yield answer
        except InfeasibleBudget as error:
            answer.error(str(error), INFEASIBLE, least_bytes=error.least_bytes, held_by=error.held_by)
        except RematError as error:
            is_usage = isinstance(error, UnsupportedArgumentError) or not isinstance(error, CompileError | UnsupportedError)
            answer.error(str(error), BAD_USAGE if is_usage else FAILED)


def progress() -> contextlib.AbstractContextManager[Callable[[str, int, int], None]]:
    """A progress bar on standard error; without a terminal, a line for each step that begins.

    The context's value is a function to call with the current step's name, the number of steps done, and the number of steps.
    """
    return progress_bar(console(stderr=True))


def finite(value: Any) -> Any:
    """`value`, plain data, with None for each number that JSON cannot write (infinity, NaN)."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
