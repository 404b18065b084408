"""`remat-jax calibrate`: measure the rates of this machine's device, and write them as a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat_jax import compat
from remat_jax.cli.output import Json, answering, check_files, progress
from remat_jax.cost.calibrate import Calibration
from remat_jax.cost.calibrate import calibrate as measure
from remat_jax.errors import TargetError
from remat_jax.report import table


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.toml", help="Where to write the target.")] = Path(
        "calibrated.toml"
    ),
    name: Annotated[str, typer.Option(help="The target's name: lower-case letters, digits, - and _.")] = "measured",
    seconds: Annotated[float, typer.Option(help="Approximate seconds of measuring; compiling takes extra time.")] = 20.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE.toml if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Measure the rates of the attached GPU, or of this machine's CPU, and write them as a target for time estimates.

    It measures the rates of large and small matmuls in each dtype and of memory, and the time to start a kernel. On a GPU it
    also measures the link to host memory in each direction, and the share of compute that can hide copies. Run nothing else at
    the same time. Afterwards, give FILE.toml:NAME wherever a target is expected.
    """
    with answering(as_json) as answer:
        check_files(output=output)
        if output.exists() and not overwrite:
            raise TargetError(f"output={str(output)!r} exists already; give another name, or --overwrite")
        compat.keep_to_cpu_without_gpu()
        with progress() as show_step:
            calibration = measure(name, seconds=seconds, on_done=show_step)
        target = calibration.save(output, overwrite=overwrite)
        answer.show(
            table(
                f"{calibration.device_kind}: measured rates", ("what", "rate"), _cells(calibration), caption=calibration.source
            )
        )
        if calibration.out_bytes_per_s is None:
            answer.remark("A CPU has one memory: there is no link to the host, and nothing to offload to.")
        answer.show(f"Target: {target}")
        answer.data({**calibration.to_dict(), "target": target})


def _cells(calibration: Calibration) -> list[tuple[str, str]]:
    rows = [(f"products in {dtype}", f"{rate / 1e12:,.3f} TFLOP/s") for dtype, rate in calibration.flops.items()]
    if calibration.launch_seconds is not None:
        rows.append(("starting a kernel", f"{calibration.launch_seconds * 1e6:,.1f} µs"))
    rows.append(("memory, read and written", f"{calibration.hbm_bytes_per_s / 1e9:,.1f} GB/s"))
    for direction, rate in (("to the host", calibration.out_bytes_per_s), ("from the host", calibration.in_bytes_per_s)):
        if rate is not None:
            rows.append((direction, f"{rate / 1e9:,.1f} GB/s"))
    if calibration.hidden_share is not None:
        rows.append(("share of compute that can hide copies", f"{calibration.hidden_share:.2f}"))
    return rows
