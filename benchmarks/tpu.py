"""`python -m benchmarks.tpu`: plans for TPUs that are not here, each compiled again apart from the package.

    python -m benchmarks.tpu --output build/tpu.json          all chips; hours on two cores
    python -m benchmarks.tpu --chips v5e --models NNX         some
    python -m benchmarks.tpu --resume --output FILE           only the rows that FILE does not have
    python -m benchmarks.tpu --show FILE                      compile nothing: print the rows of FILE

For each chip and each model of `benchmarks.tpu_models`, the policies `full` and `dots_with_no_batch_dims` are measured, and a
plan is made for each of three budgets between their bytes. The plan's step is compiled again by a script that knows nothing of
`measure`; XLA's own report of its memory must state the plan's bytes. A plan must not be slower than a policy, or than the plan
of another budget, that fits too. Every row is written when it is known, so a run may be stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import remat_jax as rj
from benchmarks.figures import markdown
from benchmarks.record import ROOT, git_commit, provenance, write_json
from benchmarks.tpu_models import MODELS
from remat_jax.errors import RematError
from remat_jax.hardware import target
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.measure import measure_many
from remat_jax.report import format_bytes

CHIPS = ("v5e", "v6e", "v5p", "v4", "tpu7x")
LEAST, MOST = "full", "dots_with_no_batch_dims"
SHARES = {"middle": 0.5, "low": 0.2, "high": 0.8}
"""Where the budgets are between the bytes of `LEAST` and `MOST`; a run that is stopped has the first for all chips and
models."""
SLOWER = 0.005
"""A plan may be this much slower than another step that fits."""

COMPILE = """
import json, pathlib, re, sys
import jax
from jax import export
from jax.experimental import topologies

path, folder = sys.argv[1:3]
topology, donated, options = map(json.loads, sys.argv[3:])
exported = export.deserialize(bytearray(pathlib.Path(path).read_bytes()))
device = topologies.get_topology_desc(**topology).devices[0]
place = jax.sharding.SingleDeviceSharding(device)
structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place) for aval in exported.in_avals]
lowered = jax.jit(exported.call, donate_argnums=tuple(donated)).lower(*structs)
compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **options})
analysis = compiled.memory_analysis()
(report,) = pathlib.Path(folder).glob("*memory-usage-report.txt")
spaces = dict(re.findall(r"Memory Space: \\S+ \\(color=(\\d+)\\)\\nTotal bytes: (\\d+)", report.read_text()))
print(json.dumps({
    "device": int(spaces["0"]), "host": int(spaces.get("5", 0)),
    "argument": analysis.argument_size_in_bytes, "output": analysis.output_size_in_bytes,
    "alias": analysis.alias_size_in_bytes, "whole": getattr(analysis, "total_allocation_bytes", None),
}))
"""


def compiled_apart(
    workload: rj.Workload, policy: Any, name: str, folder: Path, options: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """The sizes that XLA itself reports for a step on the TPU `name`, compiled without the package's compile process.

    `options` are options of the compiler. The keys are `device`, `host`, `argument`, `output`, `alias`, in bytes, and `whole`,
    which older compilers do not state.
    """
    described = target(name)
    program = export_step("step", workload.step(policy), described)
    (folder / "program").write_bytes(program.blob)
    backend = backend_of(described)
    values = map(json.dumps, (backend.topology(described), program.donated, dict(options or {})))
    command = [sys.executable, "-c", COMPILE, str(folder / "program"), str(folder / "dump"), *values]
    run = subprocess.run(command, capture_output=True, text=True, env=backend.environment(described), check=True)
    sizes: dict[str, int] = json.loads(run.stdout)
    return sizes


def planned(
    chips: Sequence[str], models: Sequence[str], timeout: float, known: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A row for each chip, model and budget, except the rows in `known`."""
    done = {(row["chip"], row["model"], row["share"]) for row in known}
    workloads = {model: MODELS[model]() for model in models}
    for share, chip, model in itertools.product(SHARES, chips, models):
        if (chip, model, share) in done:
            continue
        workload = workloads[model]
        reports = measure_many(workload, [LEAST, MOST], chip)
        assert all(report.seconds for report in reports), f"{chip}, {model}: not compiled in time"
        steps = [{"bytes": report.device_bytes, "seconds": report.seconds} for report in reports]
        policies = dict(zip((LEAST, MOST), steps, strict=True))
        low, high = sorted(report.device_bytes for report in reports)
        budget = low + round(SHARES[share] * (high - low))
        row = {"chip": chip, "model": model, "share": share, "budget": budget, "policies": policies}
        yield row | plan_row(workload, budget, chip, timeout) | {"commit": git_commit()}


def plan_row(workload: rj.Workload, budget: int, chip: str, timeout: float) -> dict[str, Any]:
    """The plan within `budget`, and the sizes of its step apart from the package; or the error."""
    begin = time.monotonic()
    try:
        plan = rj.plan(workload, budget, chip, timeout=timeout)
        wall = time.monotonic() - begin
        with tempfile.TemporaryDirectory() as folder:
            apart = compiled_apart(workload, dict(plan.policies), chip, Path(folder), plan.compiler_options)
    except (RematError, subprocess.CalledProcessError) as error:
        shown = getattr(error, "stderr", None) or str(error)
        return {"error": f"{type(error).__name__}: {shown[-2000:]}", "wall_seconds": time.monotonic() - begin}
    points = [point for point in plan.named if point.compiled and point.timed and not point.remark]
    return {
        "plan": {"bytes": plan.device_bytes, "seconds": plan.seconds, "host_bytes": plan.host_bytes},
        "options": dict(plan.compiler_options),
        "parts": [[part.where, part.policy] for part in plan.parts],
        "named": {point.name: {"bytes": point.device_bytes, "seconds": point.seconds} for point in points},
        "apart": apart,
        "tried": plan.tried,
        "cut_short": plan.cut_short,
        "notes": plan.notes,
        "wall_seconds": wall,
    }


def fastest(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The seconds of the fastest policy, or plan of another budget, that fits within the budget of `row`; None if none fits."""
    same = [other for other in rows if (other["chip"], other["model"]) == (row["chip"], row["model"])]
    steps = [*row["policies"].values(), *row.get("named", {}).values()]
    steps += [other["plan"] for other in same if other is not row and "plan" in other]
    return min((step["seconds"] for step in steps if step["seconds"] and step["bytes"] <= row["budget"]), default=None)


def cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The cells of a row of the table."""
    sizes = [amounts(row["policies"][policy]) for policy in (LEAST, MOST)]
    start = (row["chip"], row["model"], *sizes, format_bytes(row["budget"]))
    if "error" in row:
        return (*start, row["error"].partition("\n")[0], "", "", "")
    plan, other = row["plan"], fastest(row, rows)
    beside = "" if other is None else f"{plan['seconds'] / other - 1:+.1%}"
    more = row["apart"]["device"] - plan["bytes"]
    return (*start, amounts(plan), beside, "yes" if not more else f"no: {more:+} B", str(len(row["tried"])))


def amounts(step: Mapping[str, Any]) -> str:
    """The bytes and the time of a step."""
    return f"{format_bytes(step['bytes'])}, {step['seconds'] * 1e3:.1f} ms"


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table."""
    columns = ["chip", "model", LEAST, MOST, "budget", "plan", "beside the fastest other", "same bytes apart", "compiled"]
    # The rows of a model side by side, with rising budgets.
    models = list(dict.fromkeys((row["chip"], row["model"]) for row in rows))
    ordered = sorted(rows, key=lambda row: (models.index((row["chip"], row["model"])), row["budget"]))
    print(markdown(columns, [cells(row, rows) for row in ordered]))


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows that break a promise: an error, a step over the budget, other bytes apart, a faster step that fits."""
    found = []
    for row in rows:
        name = f"{row['chip']}, {row['model']}, {row['share']}"
        if "error" in row:
            found.append(f"{name}: {row['error']}")
            continue
        plan, other = row["plan"], fastest(row, rows)
        if plan["bytes"] > row["budget"]:
            found.append(f"{name}: {plan['bytes'] - row['budget']} bytes over the budget")
        if (row["apart"]["device"], row["apart"]["host"]) != (plan["bytes"], plan["host_bytes"]):
            found.append(f"{name}: {plan} and apart {row['apart']}")
        if other is not None and plan["seconds"] > (1 + SLOWER) * other:
            found.append(f"{name}: {plan['seconds'] / other - 1:.1%} slower than a step that fits")
    return found


def main() -> int:
    """Print the rows; returns 1 if one breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks" / "tpu.json")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each plan; default: %(default)s")
    parser.add_argument("--show", type=Path, metavar="FILE")
    options = parser.parse_args()
    kept = options.show or (options.output if options.resume and options.output.exists() else None)
    rows: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))["rows"] if kept else []
    for row in () if options.show else planned(options.chips, options.models, options.timeout, list(rows)):
        rows.append(row)
        print(f"{row['chip']}, {row['model']}, {row['share']}: {row['wall_seconds']:.0f} s", file=sys.stderr)
        write_json(options.output, {"provenance": provenance(), "rows": rows})
    show(rows)
    print(*faults(rows), sep="\n", end="", file=sys.stderr)
    return int(bool(faults(rows)))


if __name__ == "__main__":
    sys.exit(main())
