"""`remat-jax parity`: whether a Flax model and its PyTorch original compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from remat_jax import compat
from remat_jax.cli.output import FAILED, Json, answering, check_files, progress, writing
from remat_jax.cli.workloads import WorkloadArgument, load_named
from remat_jax.errors import ArgumentError
from remat_jax.parity.case import require_torch
from remat_jax.parity.comparison import compare
from remat_jax.parity.report import ParityReport

_EXPECTED = "a dictionary of the arguments of remat_jax.parity.compare, or the report that it returned"


def parity(
    case: WorkloadArgument,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one self-contained page.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a PyTorch model with its Flax port: outputs, gradients, training, and the memory of both.

    FILE:FUNCTION names a function without arguments that returns a dictionary of the arguments of remat_jax.parity.compare
    (torch_module, flax_module, inputs, and optional ones). Exits 1 if the models differ, or if a planted fault is not found.
    """
    with answering(as_json) as answer:
        require_torch()
        check_files(html=html)
        compat.keep_to_cpu_without_gpu()
        with progress() as show_step:
            report = parity_report(case, show_step)
        answer.show(report)
        if html is not None:
            with writing("html", html):
                page = report.to_html(html)
            answer.show(f"Page: {page}")
        answer.data({**report.to_dict(), **({"page": str(html)} if html else {})})
    if not report.passed:
        raise typer.Exit(FAILED)


def parity_report(case: str, show_step: Any) -> ParityReport:
    """The report that `case` names or returns. If `case` returns the arguments of `compare`, this function compares."""
    result = load_named(case, "case", (Mapping, ParityReport), _EXPECTED)
    if isinstance(result, ParityReport):
        return result
    needed = ("torch_module", "flax_module", "inputs")
    missing = [name for name in needed if name not in result]
    # `__annotations__` has the parameters' names and "return".
    unknown = [name for name in result if name not in compare.__annotations__ or name == "return"]
    if missing or unknown:
        faults = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(map(repr, unknown))}"] * bool(unknown)
        raise ArgumentError(f"case={case!r} gave a dictionary that {' and '.join(faults)}: expected {_EXPECTED}")
    return compare(**{"progress": show_step, **result})
