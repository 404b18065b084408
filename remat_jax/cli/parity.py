"""`remat-jax parity`: whether a Flax model and its PyTorch original compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from remat_jax import compat
from remat_jax.cli.output import FAILED, Json, answering, progress
from remat_jax.cli.workloads import load_named
from remat_jax.errors import ArgumentError
from remat_jax.parity.case import require_torch
from remat_jax.parity.comparison import compare
from remat_jax.parity.report import ParityReport

_EXPECTED = "a dictionary of the arguments of remat_jax.parity.compare, or the report that it gave"


def parity(
    case: Annotated[str, typer.Argument(metavar="FILE:FUNCTION", help="path/to/file.py:function or package.module:function.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one self-contained page.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a PyTorch model with its Flax port: outputs, gradients, training, and what both keep in memory.

    FILE:FUNCTION names a function without arguments that returns a dictionary of the arguments of remat_jax.parity.compare
    (torch_module, flax_module, inputs, and optional ones). Exits 1 if the models differ, or if a planted fault is not found.
    """
    with answering(as_json) as answer:
        require_torch()
        _check_page(html)
        compat.keep_to_cpu_without_gpu()
        with progress() as steps:
            report = parity_report(case, steps.tell)
        answer.show(report)
        if html is not None:
            answer.show(f"Page: {_written(report, html)}")
        answer.data({**report.to_dict(), **({"page": str(html)} if html else {})})
    if not report.passed:
        raise typer.Exit(FAILED)


def parity_report(case: str, tell: Any) -> ParityReport:
    """The report of the case `case`: the result of a comparison, or the report that the user's function returned."""
    given = load_named(case, "case", (Mapping, ParityReport), _EXPECTED)
    return given if isinstance(given, ParityReport) else compare(**_arguments(case, given, tell))


def _arguments(case: str, given: Mapping[str, Any], tell: Any) -> dict[str, Any]:
    needed = ("torch_module", "flax_module", "inputs")
    missing = [name for name in needed if name not in given]
    # `__annotations__` has the parameters' names and "return".
    unknown = [name for name in given if name not in compare.__annotations__ or name == "return"]
    if missing or unknown:
        faults = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(map(repr, unknown))}"] * bool(unknown)
        raise ArgumentError(f"case={case!r} gave a dictionary that {' and '.join(faults)}: expected {_EXPECTED}")
    return {"progress": tell, **given}


def _check_page(html: Path | None) -> None:
    """Check that the page can be written, before minutes of comparing."""
    if html is not None and not html.absolute().parent.is_dir():
        raise ArgumentError(f"html={str(html)!r}: there is no folder {html.absolute().parent}; create it, or give another file")


def _written(report: ParityReport, html: Path) -> Path:
    try:
        return report.to_html(html)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"html={str(html)!r} cannot be written ({error}); give another file") from None
