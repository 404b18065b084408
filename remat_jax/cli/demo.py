"""`remat-jax demo`: train a model in both frameworks and in every mode, compare, and draw."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

import remat_jax
from remat_jax import compat
from remat_jax.cli.output import FAILED, Answer, Json, answering, progress
from remat_jax.errors import ArgumentError, UnsupportedError


def demo(
    output: Annotated[Path, typer.Option(help="The folder for the pictures; created if it does not exist.")] = Path(
        "build/demo"
    ),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps. Default: 10, 20 with --full, or 6 with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small model and few steps.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Also run unrolled layers, a stack and a toy model; takes some minutes.")
    ] = False,
    target: Annotated[
        Literal["h200", "none"], typer.Option(help="Also compile the JAX steps for this GPU; none skips this.")
    ] = "h200",
    as_json: Json = False,
) -> None:
    """Train a byte-level language model in PyTorch and Flax in every mode; show that they agree, and what each mode costs.

    Both frameworks train on real text (the source of the Python standard library), from the same initial weights and with the
    same batches. No GPU is needed; the demo takes two minutes on two cores. Exits with 1 if a check fails.
    """
    with answering(as_json) as answer:
        driver = _driver()
        setting = driver.FULL if full else driver.Setting()
        changes: dict[str, Any] = dict(driver.QUICK) if quick else {}
        if target == "none":
            changes["target"] = None
        if steps is not None:
            changes["steps"] = steps
        # Create the folder before minutes of training, so that an error comes early.
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"output={str(output)!r} cannot be created as a folder ({error}); give another one") from None
        compat.keep_to_cpu_without_gpu()
        with progress() as show_step:
            outcome = driver.run(dataclasses.replace(setting, **changes), show_step)
        main_model = outcome.rows[0].model
        pictures = driver.demo_pictures([row for row in outcome.rows if row.model == main_model], output)
        _show(driver, outcome, pictures, answer)
        answer.data({**outcome.to_dict(), "pictures": pictures})
        if not outcome.passed:
            raise typer.Exit(FAILED)


def _driver() -> ModuleType:
    """The demo's module. In a wheel the examples are inside the package; in a checkout they are next to it."""
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            "the demo compares with PyTorch, which is not installed: pip install 'remat_jax[torch]'; "
            "on a machine without a GPU take PyTorch's CPU build, which is far smaller"
        )
    inside = importlib.util.find_spec("remat_jax.examples")
    if inside is not None:
        return importlib.import_module("remat_jax.examples.demo")
    beside = importlib.util.find_spec("examples")
    root = Path(remat_jax.__file__).parent.parent
    if beside is None or beside.origin is None or Path(beside.origin).parent.parent != root:
        raise UnsupportedError(f"the examples are missing: expected the folder examples in {root}; install remat_jax again")
    return importlib.import_module("examples.demo")


def _show(driver: ModuleType, outcome: Any, pictures: list[str], answer: Answer) -> None:
    *models, checks = driver.tables(outcome)
    for model_table in models:
        answer.show(model_table)
    answer.show(driver.LEGEND, "")
    for sentence in driver.reading(outcome):
        answer.show(_point(sentence))
    for note in outcome.notes:
        answer.remark(_point(f"Note: {note}"))
    answer.show("", checks)
    answer.show(f"Pictures in {Path(pictures[0]).parent}: {', '.join(Path(path).name for path in pictures)}")
    answer.show("PASSED" if outcome.passed else "NOT PASSED")


def _point(text: str) -> Table:
    """`text` after a bullet, with further lines indented."""
    point = Table.grid(padding=(0, 1))
    point.add_row("•", Text(text))
    return point
