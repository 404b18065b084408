"""`python -m benchmarks.clusters`: decoders on hosts of eight GPUs, compiled without a GPU.

Llama 3 8B and 70B, Llama 3.1 405B and Qwen 3 235B A22B: the memory of each device and host, and the bytes that devices send
each other, under each policy and under the plan for 90 % of a device's memory. The exit status is 1 if a plan does not fit, if
another step that fits is faster as compiled by more than the estimate's error, or if recomputing gathers weights again.
Without `--all` it measures only 8B on one host. With `--layer` it prints only the time of a layer of experts, and the exit
status is 1 if this time grows with the number of hosts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.clusters import layer, table
from benchmarks.clusters.cases import CASES, on_gpus
from benchmarks.clusters.rows import PLAN, STATE, row
from benchmarks.record import ROOT, provenance, write_json
from examples.models.moe import MoeConfig
from remat_jax import compat
from remat_jax.hardware import target as target_named
from remat_jax.planning.check_budget import budget_bytes

POLICIES = ("off", "full", "offload_inputs", "dots_with_no_batch_dims", STATE, PLAN)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clusters", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for clusters.json")
    parser.add_argument("--all", action="store_true", help="all models on all their numbers of hosts")
    parser.add_argument("--only", choices=CASES, action="append", help="one of the models; may be given again")
    parser.add_argument("--hosts", type=int, nargs="+", help="numbers of hosts, of eight GPUs each")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--budget", default="90%", help="of a device, for the plan")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument(
        "--layer", action="store_true", help="only the estimated time of a layer of experts, by the number of hosts"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows of clusters.json, if of the same commit")
    parser.add_argument(
        "--show",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: print the rows of these files, of repeated rows the last",
    )
    options = parser.parse_args(arguments)
    options.only = options.only or list(CASES if options.all else ("8b",))
    if not (options.all or options.hosts or options.layer):
        options.hosts = [1]
    return options


class Record:
    """The measured rows, written to a file after every row."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path, self.data = path, {"provenance": provenance(), "rows": []}
        if resume and path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            if all(old["provenance"][key] == self.data["provenance"][key] for key in ("commit", "versions")):
                self.data["rows"] = old["rows"]

    def has(self, case: str, target: str, policy: str, budget: int) -> bool:
        """Whether this row was measured."""
        wanted = (case, target, policy, budget)
        return any((row["case"], row["target"], row["policy"], row["budget"]) == wanted for row in self.data["rows"])

    def add(self, measured: dict[str, Any]) -> None:
        """Add a row."""
        self.data["rows"].append(measured)
        write_json(self.path, self.data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and the failed claims; 1 if a claim fails."""
    options = parse(arguments)
    compat.keep_to_cpu_without_gpu()
    if options.show:
        rows = [saved for path in options.show for saved in json.loads(path.read_text(encoding="utf-8"))["rows"]]
        return say(table.ordered(rows, list(CASES), POLICIES))
    if options.layer:
        config, numbers = MoeConfig.qwen3_235b(), options.hosts or layer.HOST_COUNTS
        return layer.say({hosts: layer.layer_seconds(hosts, options.gpu, config) for hosts in numbers})
    record, budget = (
        Record(options.output / "clusters.json", resume=options.resume),
        budget_bytes(options.budget, target_named(options.gpu)),
    )
    for case in options.only:
        for hosts in options.hosts or CASES[case].hosts:
            for policy in options.policies:
                if record.has(case, on_gpus(options.gpu, hosts), policy, budget):
                    continue
                measured = row(case, hosts, policy, options.gpu, budget)
                record.add(measured)
                print(f"{measured['workload']}, {policy}: {table.summary(measured)}", file=sys.stderr, flush=True)
    return say(record.data["rows"])


def say(rows: Sequence[dict[str, Any]]) -> int:
    """Print the rows in one table, and the failed claims."""
    print("One training step, gigabytes (10⁹): memory of a device, the part of it that collectives read or write at the peak,")
    print("memory of a host, and what a device sends or receives, as arrays and gigabytes by kind:")
    print(table.table(rows))
    for line in [*table.gathered_again(rows), *table.compiled_seconds(rows)]:
        print(line)
    failures = table.failures(rows)
    print("\n".join(["Does not hold:", *failures]) if failures else "All claims hold.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
