"""`remat-jax demo`: plan a model that does not fit; then train a small one in both frameworks, in every mode, and compare."""

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
    output: Annotated[
        Path, typer.Option(help="The folder for the plan and the pictures; created if it does not exist.")
    ] = Path("build/demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps. Default: 10, 20 with --full, or 6 with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compare a small model with few steps.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Also compare unrolled layers, a stack and a toy model; takes some minutes.")
    ] = False,
    target: Annotated[
        Literal["h200", "none"], typer.Option(help="Plan and compile for this GPU; none skips the plan, and all compiling.")
    ] = "h200",
    as_json: Json = False,
) -> None:
    """Plan a model that does not fit on a GPU; then train a small one in PyTorch and Flax, and show that both agree.

    The first part takes a decoder with 632 million parameters and finds the fastest plan for 40 GiB of an H200, in about a
    minute. In the second part both frameworks train a byte-level language model on real text, from the same initial weights and
    with the same batches, in every mode. No GPU is needed; the second part needs PyTorch. Exits with 1 if a check fails.
    """
    with answering(as_json) as answer:
        has_torch = importlib.util.find_spec("torch") is not None
        if not has_torch and target == "none":
            raise UnsupportedError(_NO_TORCH)
        # Create the folder before minutes of compiling, so that an error comes early.
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"output={str(output)!r} cannot be created as a folder ({error}); give another one") from None
        compat.keep_to_cpu_without_gpu()
        data = {} if target == "none" else _fit(output, answer)
        if not has_torch:
            answer.remark(_NO_TORCH)
            answer.data(data)
            return
        outcome = _compare(output, steps, quick, full, target, answer, data)
        if not outcome.passed:
            raise typer.Exit(FAILED)


_NO_TORCH = (
    "the demo compares with PyTorch, which is not installed: pip install 'remat_jax[torch]'; on a machine without a GPU take "
    "PyTorch's CPU build, which is far smaller"
)


def _fit(output: Path, answer: Answer) -> dict[str, Any]:
    """Show the plan of a model that does not fit. Without XLA's GPU compiler, say how to get it."""
    try:
        compat.require_gpu_compiler()
    except UnsupportedError as error:
        answer.remark(f"Nothing was planned. {error}")
        return {}
    fitting = _example("fitting")
    with progress() as show_step:
        found = fitting.fit(show_step)
    answer.show(fitting.fitting_table(found), *map(_point, fitting.fitting_sentences(found)))
    files = found.save(output)
    answer.show(f"In {output}: {', '.join(Path(path).name for path in files)}", "")
    return {"fitting": found.to_dict(), "files": files}


def _compare(
    output: Path, steps: int | None, quick: bool, full: bool, target: str, answer: Answer, data: dict[str, Any]
) -> Any:
    driver = _example("demo")
    setting = driver.FULL if full else driver.Setting()
    changes: dict[str, Any] = dict(driver.QUICK) if quick else {}
    changes |= {"target": None} if target == "none" else {}
    changes |= {"steps": steps} if steps is not None else {}
    with progress() as show_step:
        outcome = driver.run(dataclasses.replace(setting, **changes), show_step)
    main_model = outcome.rows[0].model
    drawn = driver.memory_picture([row for row in outcome.rows if row.model == main_model]).save(output / "memory.svg")
    _show(driver, outcome, drawn, answer)
    answer.data({**outcome.to_dict(), **data, "pictures": [drawn]})
    return outcome


def _example(name: str) -> ModuleType:
    """A module of the examples. In a wheel they are inside the package; in a checkout they are next to it."""
    inside = importlib.util.find_spec("remat_jax.examples")
    if inside is not None:
        return importlib.import_module(f"remat_jax.examples.{name}")
    beside = importlib.util.find_spec("examples")
    root = Path(remat_jax.__file__).parent.parent
    if beside is None or beside.origin is None or Path(beside.origin).parent.parent != root:
        raise UnsupportedError(f"the examples are missing: expected the folder examples in {root}; install remat_jax again")
    return importlib.import_module(f"examples.{name}")


def _show(driver: ModuleType, outcome: Any, picture: str, answer: Answer) -> None:
    *models, checks = driver.tables(outcome)
    for model_table in models:
        answer.show(model_table)
    answer.show(driver.LEGEND, "")
    for sentence in driver.reading(outcome):
        answer.show(_point(sentence))
    for note in outcome.notes:
        answer.remark(_point(f"Note: {note}"))
    answer.show("", checks)
    answer.show(f"Picture: {picture}")
    answer.show("PASSED" if outcome.passed else "NOT PASSED")


def _point(text: str) -> Table:
    """`text` after a bullet, with further lines indented."""
    point = Table.grid(padding=(0, 1))
    point.add_row("•", Text(text))
    return point
