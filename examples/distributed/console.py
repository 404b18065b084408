"""Metrics: on the console by rich, and as JSON lines in a file, written by the first process only."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from remat_jax.errors import ArgumentError
from remat_jax.report.tables import format_bytes

ROW = "{:>8}  {:>10}  {:>10}  {:>10}"


class Metrics:
    """The training's output; every process has one, but only the first process's writes.

    Args:
      first, last: the steps to come are those from `first` up to `last`, which is excluded.
      every: the number of steps per row.
      tokens: the number of tokens in one step.
      path: a file to which a line is added for every step, `{"step": 3, "loss": 5.1, "tokens_per_second": 120000.0}`. A step
        that was lost with a killed run has two lines; the later line counts.
    """

    def __init__(self, first: int, last: int, every: int, tokens: int, path: Path | None) -> None:
        self._is_first = jax.process_index() == 0
        self._every, self._last, self._tokens, self._path = every, last, tokens, path
        self._console = Console(quiet=not self._is_first, highlight=False)
        self._bar = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=last, completed=first)
        self._pending: list[tuple[int, jax.Array]] = []
        self._since = time.perf_counter()

    def __enter__(self) -> Metrics:
        self._bar.start()
        self._console.print(ROW.format("step", "loss", "tokens/s", "memory"), style="bold")
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, step: int, loss: jax.Array) -> float | None:
        """Note the loss of a step. If a row is due, write it and return the loss.

        Reading a loss waits for the devices. Between rows no loss is read, so the host runs ahead of the devices.
        """
        self._pending.append((step, loss))
        return self.flush() if (step + 1) % self._every == 0 or step + 1 == self._last else None

    def flush(self) -> float | None:
        """Write the pending row; returns the last loss, or None if nothing was pending."""
        if not self._pending:
            return None
        losses = [(step, float(loss)) for step, loss in self._pending]
        now = time.perf_counter()
        rate = len(losses) * self._tokens / (now - self._since)
        self._since, self._pending = now, []
        step, loss = losses[-1]
        if self._is_first:
            if self._path is not None:
                lines = [json.dumps({"step": one, "loss": value, "tokens_per_second": rate}) for one, value in losses]
                with self._path.open("a") as file:
                    file.write("".join(f"{line}\n" for line in lines))
            self._bar.update(self._task, completed=step + 1)
            self._console.print(ROW.format(step, f"{loss:.5f}", f"{rate:,.0f}", _in_use()))
        return loss


def _in_use() -> str:
    """The peak of the first device's allocator, if it reports one; a CPU does not."""
    return format_bytes((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"))


def tell(facts: Mapping[str, Any]) -> None:
    """Print the properties of the run, one per line."""
    console = Console(quiet=jax.process_index() != 0, highlight=False)
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"[bold]{name:<{width}}[/bold]  ", end="")
        console.print(str(value), markup=False, soft_wrap=True)


def warn(sentence: str) -> None:
    """Print a warning on standard error."""
    console = Console(stderr=True, quiet=jax.process_index() != 0, highlight=False)
    console.print(f"warning: {sentence}", style="yellow", markup=False, soft_wrap=True)


def check_file(path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything else is done.

    Raises:
      ArgumentError: the message names the file.
    """
    if path is not None and jax.process_index() == 0:
        try:
            path.open("a").close()
        except OSError as error:
            raise ArgumentError(f"--metrics {path}: {error.strerror}; give a file that can be written to") from error
