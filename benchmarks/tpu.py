"""`python -m benchmarks.tpu`: plans for TPUs that are not here, each compiled again apart from the package.

    python -m benchmarks.tpu --output build/tpu.json          all chips; on two cores two hours
    python -m benchmarks.tpu --chips v5e v5p                  some
    python -m benchmarks.tpu --show FILE                      compile nothing: print the rows of FILE

For each chip and model the policies `full` and `dots_with_no_batch_dims` are measured, and a plan is made for the memory in
the middle between them. The plan's step is compiled again by a script that knows nothing of `measure`; XLA's own report of its
memory must state the plan's bytes.
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
from benchmarks.plan.workloads import decoder_scanned, deep_mlp, vision
from benchmarks.record import ROOT, provenance, write_json
from remat_jax.hardware import target
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.exporting import export_step
from remat_jax.report import format_bytes

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
MODELS = {"deep MLP": (deep_mlp, 8), "ViT": (vision, 2), "decoder, scanned": (decoder_scanned, 4)}
LEAST, MOST = "full", "dots_with_no_batch_dims"
TIMEOUT = 300.0

COMPILE = """
import json, pathlib, re, sys
import jax
from jax import export
from jax.experimental import topologies

path, folder, topology, donated = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
exported = export.deserialize(bytearray(pathlib.Path(path).read_bytes()))
device = topologies.get_topology_desc(**topology).devices[0]
place = jax.sharding.SingleDeviceSharding(device)
structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place) for aval in exported.in_avals]
lowered = jax.jit(exported.call, donate_argnums=tuple(donated)).lower(*structs)
compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
analysis = compiled.memory_analysis()
(report,) = pathlib.Path(folder).glob("*memory-usage-report.txt")
spaces = dict(re.findall(r"Memory Space: \\S+ \\(color=(\\d+)\\)\\nTotal bytes: (\\d+)", report.read_text()))
print(json.dumps({
    "device": int(spaces["0"]), "host": int(spaces.get("5", 0)),
    "argument": analysis.argument_size_in_bytes, "output": analysis.output_size_in_bytes,
    "alias": analysis.alias_size_in_bytes, "whole": getattr(analysis, "total_allocation_bytes", None),
}))
"""


def compiled_apart(workload: rj.Workload, policy: Any, name: str, folder: Path) -> dict[str, int]:
    """The sizes that XLA itself reports for a step on the TPU `name`, compiled without the package's compile process.

    The keys are `device`, `host`, `argument`, `output`, `alias`, in bytes, and `whole`, which older compilers do not state.
    """
    described = target(name)
    program = export_step("step", workload.step(policy), described)
    (folder / "program").write_bytes(program.blob)
    backend = backend_of(described)
    topology, donated = json.dumps(backend.topology(described)), json.dumps(program.donated)
    command = [sys.executable, "-c", COMPILE, str(folder / "program"), str(folder / "dump"), topology, donated]
    run = subprocess.run(command, capture_output=True, text=True, env=backend.environment(described), check=True)
    sizes: dict[str, int] = json.loads(run.stdout)
    return sizes


def planned(chips: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each model on each chip."""
    for model, chip in itertools.product(MODELS, chips):
        case, layers = MODELS[model]
        workload = case(layers).workload
        reports = {policy: rj.measure(workload, policy, chip, TIMEOUT) for policy in (LEAST, MOST)}
        budget = sum(report.device_bytes for report in reports.values()) // 2
        begin = time.monotonic()
        plan = rj.plan(workload, budget, chip, timeout=TIMEOUT)
        wall = time.monotonic() - begin
        with tempfile.TemporaryDirectory() as folder:
            apart = compiled_apart(workload, dict(plan.policies), chip, Path(folder))
        yield {
            "chip": chip,
            "model": model,
            "budget": budget,
            "policies": {name: {"bytes": each.device_bytes, "seconds": each.seconds} for name, each in reports.items()},
            "plan": {"bytes": plan.device_bytes, "seconds": plan.seconds, "host_bytes": plan.host_bytes},
            "apart": apart,
            "compiled": len(plan.tried),
            "wall_seconds": wall,
        }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table."""
    table = []
    for row in rows:
        cells = [
            f"{format_bytes(each['bytes'])}, {each['seconds'] * 1e3:.1f} ms"
            for each in (*row["policies"].values(), row["plan"])
        ]
        same = (
            "yes"
            if row["apart"]["device"] == row["plan"]["bytes"]
            else f"no: {row['apart']['device'] - row['plan']['bytes']:+} B"
        )
        table.append((row["chip"], row["model"], *cells[:2], format_bytes(row["budget"]), cells[2], same, str(row["compiled"])))
    print(markdown(["chip", "model", LEAST, MOST, "budget", "plan", "same bytes apart", "compiled"], table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks" / "tpu.json")
    parser.add_argument("--show", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.show:
        show(json.loads(options.show.read_text(encoding="utf-8"))["rows"])
        return
    rows: list[dict[str, Any]] = []
    for row in planned(options.chips):
        rows.append(row)
        print(f"{row['chip']}, {row['model']}: {row['wall_seconds']:.0f} s", file=sys.stderr)
        write_json(options.output, {"provenance": provenance(), "rows": rows})
    show(rows)


if __name__ == "__main__":
    main()
