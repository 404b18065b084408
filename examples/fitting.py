"""A model that does not fit on a GPU, and the fastest plan that fits a budget; `remat-jax demo` begins with it.

The model is that of `examples/byte_decoder.py`. Its steps are compiled for an H200 that need not be there, and do not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

import remat_jax as rj
from remat_jax.hardware import target as target_named
from remat_jax.memory.measure import measure_many
from remat_jax.planning.page import picture
from remat_jax.report import format_bytes, table
from remat_jax.report.tables import format_estimate

from . import byte_decoder

TARGET, BUDGET = "h200", "40GiB"
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Fitting:
    """A training step as written (`off`), with a checkpoint around every layer (`full`), and under the plan for `BUDGET`."""

    off: rj.MemoryReport
    full: rj.MemoryReport
    plan: rj.Plan

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"off": self.off.to_dict(), "full": self.full.to_dict(), "plan": self.plan.to_dict()}

    def save(self, folder: Path) -> list[str]:
        """Write the plan, its page and its picture into `folder`; returns the paths."""
        return [
            str(self.plan.save(folder / "plan.json")),
            str(self.plan.to_html(folder / "plan.html")),
            picture(self.plan).save(folder / "plan.svg"),
        ]


def fit(tell: Tell) -> Fitting:
    """Measure the step with and without checkpoints, and plan it; nothing is allocated."""
    job = byte_decoder.job()
    tell(f"{job.name}: compiling off and full for {TARGET}", 0, 2)
    off, full = measure_many(job, ("off", "full"), TARGET)
    return Fitting(off, full, rj.plan(job, BUDGET, TARGET, progress=tell))


def fitting_table(found: Fitting) -> Table:
    """Memory and time of the three steps."""
    made, memory = found.plan, target_named(TARGET).memory_bytes
    assumed = bool(made.assumed_rates)
    steps = (
        ("off: no checkpoints", found.off.device_bytes, found.off.seconds),
        ("full: every layer checkpointed", found.full.device_bytes, found.full.seconds),
        (f"the plan for {BUDGET}", made.device_bytes, made.seconds),
    )
    cells = [
        (name, format_bytes(size), format_estimate(seconds, assumed), "yes")
        if size <= memory
        else (name, format_bytes(size), "", "NO")
        for name, size, seconds in steps
    ]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(byte_decoder.job().params))
    title = f"One training step of a decoder with {parameters // 10**6} million parameters"
    caption = "Memory is that of the compiled step, time is estimated from its schedule. Nothing ran, and no GPU is needed."
    return table(title, ("", "device", "step", f"fits the {TARGET}"), cells, caption=caption)


def fitting_sentences(found: Fitting) -> list[str]:
    """What the table says, and how to go on."""
    made, full, memory = found.plan, found.full, target_named(TARGET).memory_bytes
    sentences = [
        f"As written the step needs {format_bytes(found.off.device_bytes)}; the {TARGET} has {format_bytes(memory)}.",
        f"The plan saves what is worth its memory and recomputes the rest, {made.recompute_flops / 1e12:.3g} TFLOP in a step. "
        f"It needs {format_bytes(made.device_bytes)}.",
    ]
    if full.seconds and made.seconds < full.seconds:
        sentences[-1] += f" Its step is {100 * (1 - made.seconds / full.seconds):.1f} % faster than full, by the estimate."
    example = f"{byte_decoder.__name__}:job"
    sentences.append(f"The same on the command line: remat-jax plan {example} --target {TARGET} --budget {BUDGET}")
    return sentences
