"""Compile published training steps for their GPUs or TPUs, and compare the estimated times with the published times.

    python -m benchmarks.published                    all steps on GPUs; exits with 1 if more than a sixth exceed a bound
    python -m benchmarks.published --tpu              all steps on TPUs
    python -m benchmarks.published GPT-2 v5e          the steps whose names contain one of these, on GPUs and TPUs
    python -m benchmarks.published --markdown         also prints the figures of the note, for `make figures`
    python -m benchmarks.published --output FILE      also writes the rows to FILE, and keeps its rows of other steps
    python -m benchmarks.published --show FILE        compiles nothing: the tables of the rows in FILE

No GPU and no TPU is needed, and nothing is run. Rates are those of `remat_jax/hardware/targets.toml`; none was fitted to these
steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures import markdown
from benchmarks.published import tensor
from benchmarks.published.cases import ABSOLUTE, CASES, MISSED_SHARE, RATIO, Case
from benchmarks.published.model import workload
from benchmarks.published.tpu_cases import TPU_CASES
from benchmarks.record import git_commit, provenance, write_json
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
    """A case and its estimate.

    Attributes:
      seconds, compute: the time of the step, and its part without waits for collectives and copies.
      device_bytes: the compiled device memory of one device; of a layer if the case is one layer. None if unknown.
    """

    case: Case
    seconds: float
    compute: float
    device_bytes: int | None = None

    @property
    def off(self) -> float | None:
        """The estimated time divided by the published time, minus 1; None if no time is published."""
        return None if self.case.seconds is None else self.seconds / self.case.seconds - 1


def row(case: Case) -> Row:
    """Compile a step and estimate its time, or with `case.tensor` one layer's time. Many unrolled layers are extrapolated."""
    if not case.shape.unrolled or case.shape.layers <= max(COMPILED_DEPTHS) and not case.tensor:
        return _row(case, *_compiled(case, case.shape.layers))
    few, more = (_compiled(case, layers) for layers in COMPILED_DEPTHS)
    each = [(second - first) / (COMPILED_DEPTHS[1] - COMPILED_DEPTHS[0]) for first, second in zip(few, more, strict=True)]
    if case.tensor:
        return _row(case, *each)
    rest = case.shape.layers - COMPILED_DEPTHS[1]
    return _row(case, *(figure + rest * of_layer for figure, of_layer in zip(more, each, strict=True)))


def _row(case: Case, seconds: float, compute: float, device_bytes: float) -> Row:
    return Row(case, seconds, compute, round(device_bytes))


def _compiled(case: Case, layers: int) -> tuple[float, float, float]:
    """The seconds of a step with this number of layers, its seconds of compute, and its bytes of device memory."""
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
    device_bytes = sizes.temp + sizes.argument + sizes.output - sizes.alias
    return sizes.time.seconds, sizes.time.compute_seconds, device_bytes


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


class Record:
    """The rows of a file, written after every row.

    Rows that the same versions of other packages wrote are kept; each has the commit of its own. A step's new row replaces its
    old row.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.provenance, self.rows = path, provenance(), dict[str, dict[str, Any]]()
        if path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            ours, theirs = (each["versions"] | {"remat_jax": ""} for each in (self.provenance, old["provenance"]))
            if ours == theirs:
                self.rows = {saved["step"]: saved for saved in old["rows"]}

    def add(self, row: Row, wall_seconds: float) -> None:
        """Add a row, with the seconds that its compilation took and the commit of the sources."""
        case = row.case
        self.rows[case.name] = {
            "step": case.name,
            "target": case.target,
            "policy": case.policy,
            "flags": case.flags,
            "published_seconds": case.seconds,
            "estimated_seconds": row.seconds,
            "compute_seconds": row.compute,
            "device_bytes": row.device_bytes,
            "wall_seconds": wall_seconds,
            "commit": git_commit(),
        }
        write_json(self.path, {"provenance": self.provenance, "rows": list(self.rows.values())})


def recorded(path: Path) -> list[Row]:
    """The rows of a file that `Record` wrote, in the order of the cases.

    Raises:
      SystemExit: if the file has a step that is no case, or another published time than the case.
    """
    saved = {each["step"]: each for each in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    cases = [case for case in (*CASES, *TPU_CASES) if case.name in saved]
    unknown = [*saved.keys() - {case.name for case in cases}]
    unknown += [case.name for case in cases if case.seconds != saved[case.name]["published_seconds"]]
    if unknown:
        raise SystemExit(f"{path.name}: these steps are not cases, or not with this published time: {unknown}")
    keys = ("estimated_seconds", "compute_seconds", "device_bytes")
    return [Row(case, *(saved[case.name][key] for key in keys)) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts of the steps' names")
    parser.add_argument("--tpu", action="store_true", help="the steps on TPUs instead of those on GPUs")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--show", type=Path, metavar="FILE")
    options = parser.parse_args()
    cases = TPU_CASES if options.tpu else (*CASES, *TPU_CASES) if options.parts else CASES
    chosen = [case for case in cases if not options.parts or any(part in case.name for part in options.parts)]
    if not chosen:
        parser.error(f"parts={options.parts!r}: no step's name contains these; the steps are {[case.name for case in cases]}")
    console = Console(width=150, stderr=options.markdown)
    rows = recorded(options.show) if options.show else _compile(chosen, console, options.output)
    console.print(table("Published steps, and their estimate", COLUMNS, [cells(each) for each in rows]))
    for case, published, estimated in ratios(rows):
        console.print(f"{case.name}: {estimated:.3f} times {case.beside!r}, published {published:.3f}")
    for name, text in missed(rows).items():
        console.print(f"exceeds a bound: {name}: {text}")
    console.print(said(rows))
    if options.markdown:
        print(figures(rows))
    sys.exit(len(missed(rows)) > allowed(rows))


def _compile(cases: list[Case], console: Console, output: Path | None) -> list[Row]:
    record, rows = Record(output) if output else None, []
    for case in cases:
        began = time.monotonic()
        rows.append(row(case))
        console.print(*cells(rows[-1]), sep="  ")
        if record:
            record.add(rows[-1], time.monotonic() - began)
    return rows


if __name__ == "__main__":
    main()
