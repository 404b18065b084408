"""Compile published training steps for their GPUs or TPUs, and compare the estimated times with the published times.

    python -m benchmarks.published                    all steps on GPUs; exits with 1 if more than a sixth exceed a bound
    python -m benchmarks.published --tpu              all steps on TPUs
    python -m benchmarks.published GPT-2 v5e          the steps whose names contain one of these, on GPUs and TPUs
    python -m benchmarks.published --markdown         also prints the figures of the note, for `make figures`

No GPU and no TPU is needed, and nothing is run. Rates are those of `remat_jax/hardware/targets.toml`; none was fitted to these
steps.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich.console import Console

from benchmarks.figures import markdown
from benchmarks.published import tensor
from benchmarks.published.cases import ABSOLUTE, CASES, MISSED_SHARE, RATIO, Case
from benchmarks.published.model import workload
from benchmarks.published.tpu_cases import TPU_CASES
from benchmarks.true_shapes.cases import compiling
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.report.tables import format_seconds, table

LIBTPU = "LIBTPU_INIT_ARGS"
COMPILED_DEPTHS = (2, 4)
"""The numbers of layers with which an unrolled step is compiled; other numbers are extrapolated from these two."""


@dataclass(frozen=True)
class Row:
    """A case, the estimated seconds of its step, and its seconds of compute, without waits for collectives and copies."""

    case: Case
    seconds: float
    compute: float

    @property
    def off(self) -> float | None:
        """The estimated time divided by the published time, minus 1; None if no time is published."""
        return None if self.case.seconds is None else self.seconds / self.case.seconds - 1


def row(case: Case) -> Row:
    """Compile a step and estimate its time, or with `case.tensor` one layer's time. Many unrolled layers are extrapolated."""
    if not case.shape.unrolled or case.shape.layers <= max(COMPILED_DEPTHS) and not case.tensor:
        return Row(case, *_times(case, case.shape.layers))
    few, more = (_times(case, layers) for layers in COMPILED_DEPTHS)
    each = [(second - first) / (COMPILED_DEPTHS[1] - COMPILED_DEPTHS[0]) for first, second in zip(few, more, strict=True)]
    if case.tensor:
        return Row(case, *each)
    rest = case.shape.layers - COMPILED_DEPTHS[1]
    return Row(case, *(time + rest * layer_time for time, layer_time in zip(more, each, strict=True)))


def _times(case: Case, layers: int) -> tuple[float, float]:
    """The seconds of a step with this number of layers, and its seconds of compute."""
    shape, name = replace(case.shape, layers=layers), case.name
    if case.tensor:
        work = tensor.workload(shape, case.batch, case.length, gpus=case.tensor, name=name)
    else:
        mesh = dict(case.mesh) or None
        work = workload(shape, case.batch, case.length, mesh=mesh, name=name, bfloat16=case.bfloat16, chunks=case.chunks)
    blocks = {block.__name__: block for block in work.blocks}
    policy = case.policy if isinstance(case.policy, str) else {blocks[key]: text for key, text in case.policy.items()}
    target = target_named(case.target)
    # `rj.measure` has the same time, but compiles a second step to say what the policy frees.
    with compiling(case.flags) if target.kind == "gpu" else _libtpu(case.flags):
        program = export_step(name, work.step(policy), target)
        sizes = compile_programs([program], target, timeout=2400)[name]
    if sizes.time is None:
        raise SystemExit(f"{name}: {sizes.no_time} {sizes.refusal}")
    return sizes.time.seconds, sizes.time.compute_seconds


@contextmanager
def _libtpu(flags: str) -> Iterator[None]:
    """A context in which compile processes pass `flags` to libtpu, and no others."""
    before = os.environ.pop(LIBTPU, None)
    os.environ.update({LIBTPU: flags} if flags else {})
    try:
        yield
    finally:
        os.environ.pop(LIBTPU, None)
        os.environ.update({} if before is None else {LIBTPU: before})


def ratios(rows: list[Row]) -> list[tuple[Case, float, float]]:
    """Each case that has a `beside`, and the published and the estimated ratio of its time to the time of `beside`."""
    by_name, compared = {row.case.name: row for row in rows}, []
    for row in rows:
        other = by_name.get(row.case.beside)
        if other is None:
            continue
        published = row.case.ratio
        if published is None:
            assert row.case.seconds is not None and other.case.seconds is not None
            published = row.case.seconds / other.case.seconds
        compared.append((row.case, published, row.seconds / other.seconds))
    return compared


def missed(rows: list[Row]) -> dict[str, str]:
    """By case name, the errors of time or ratio that exceed a bound, as text."""
    errors: dict[str, list[str]] = {}
    for row in rows:
        if row.off is not None and abs(row.off) > ABSOLUTE:
            errors.setdefault(row.case.name, []).append(f"time {100 * row.off:+.0f} %")
    for case, published, estimated in ratios(rows):
        if abs(estimated - published) > RATIO:
            errors.setdefault(case.name, []).append(f"ratio {estimated:.3f}, published {published:.3f}")
    return {name: "; ".join(texts) for name, texts in errors.items()}


def allowed(rows: list[Row]) -> int:
    """How many of the rows with a published figure may exceed a bound."""
    return math.floor(MISSED_SHARE * sum(row.case.seconds is not None or row.case.ratio is not None for row in rows))


def cells(row: Row) -> tuple[str, ...]:
    times = "" if row.case.seconds is None else format_seconds(row.case.seconds), format_seconds(row.seconds)
    off = "" if row.off is None else f"{100 * row.off:+.0f} %"
    policy = row.case.policy if isinstance(row.case.policy, str) else "every second layer full"
    return row.case.name, policy, *times, off, format_seconds(max(0.0, row.seconds - row.compute))


COLUMNS = ("step", "policy", "published", "estimated", "off", "waits for exchanges and copies")


def said(rows: list[Row]) -> str:
    """A sentence: how many rows exceed a bound, and how many may."""
    judged = sum(row.case.seconds is not None or row.case.ratio is not None for row in rows)
    return f"{len(missed(rows))} of {judged} steps exceed a bound; at most {allowed(rows)} may."


def figures(rows: list[Row]) -> str:
    """The figures of the note: both tables, the errors that exceed a bound, and the sources."""
    lines = [markdown(list(COLUMNS), [cells(row) for row in rows]), ""]
    beside = [(case.name, case.beside, f"{published:.3f}", f"{estimated:.3f}") for case, published, estimated in ratios(rows)]
    lines += [markdown(["ratio", "to", "published", "estimated"], beside), ""] if beside else []
    errors = [f"- {name}: {text}" for name, text in missed(rows).items()]
    lines += [said(rows), "", *errors, *([""] if errors else []), "Sources:", ""]
    lines += [
        f"- {row.case.name}: {row.case.told}; {row.case.source}" + (f"; {row.case.differs}" if row.case.differs else "")
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts of the steps' names")
    parser.add_argument("--tpu", action="store_true", help="the steps on TPUs instead of those on GPUs")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    cases = TPU_CASES if options.tpu else (*CASES, *TPU_CASES) if options.parts else CASES
    chosen = [case for case in cases if not options.parts or any(part in case.name for part in options.parts)]
    if not chosen:
        parser.error(f"parts={options.parts!r}: no step's name contains these; the steps are {[case.name for case in cases]}")
    console, rows = Console(width=150, stderr=options.markdown), []
    for case in chosen:
        rows.append(row(case))
        console.print(*cells(rows[-1]), sep="  ")
    console.print(table("Published steps, and their estimate", COLUMNS, [cells(each) for each in rows]))
    for case, published, estimated in ratios(rows):
        console.print(f"{case.name}: {estimated:.3f} times {case.beside!r}, published {published:.3f}")
    for name, text in missed(rows).items():
        console.print(f"exceeds a bound: {name}: {text}")
    console.print(said(rows))
    if options.markdown:
        print(figures(rows))
    sys.exit(len(missed(rows)) > allowed(rows))


if __name__ == "__main__":
    main()
