"""`python -m benchmarks.measured FILE:FUNCTION`: the memory of a workload under several policies, as the table of a page.

    python -m benchmarks.measured examples/byte_decoder.py:job --target h200 --policy off full
    TRAIN_ANYWHERE="--layers 16" python -m benchmarks.measured examples/train_anywhere.py:job --target 8xh100 --policy full

Nothing is run; the steps are compiled for the target. The figures are those of `remat-jax measure`.
"""

from __future__ import annotations

import argparse

from benchmarks.figures import markdown
from remat_jax import compat
from remat_jax.cli.workloads import load_workload
from remat_jax.memory import MemoryReport
from remat_jax.memory.measure import measure_many
from remat_jax.report import format_bytes

COLUMNS = ["policy", "device", "arguments", "temp", "host", "kept: device", "kept: host", "offload freed"]


def row(report: MemoryReport) -> tuple[str, ...]:
    receipt = report.receipt
    back = "" if receipt is None or receipt.returned_bytes is None else format_bytes(receipt.returned_bytes)
    sizes = (report.device_bytes, report.argument_bytes, report.temp_bytes, report.host_bytes)
    kept = (report.residual_device_bytes, report.residual_host_bytes)
    return f"`{report.policy}`", *map(format_bytes, (*sizes, *kept)), back


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--policy", nargs="+", default=["off", "full"])
    options = parser.parse_args()
    compat.keep_to_cpu_without_gpu()
    reports = measure_many(load_workload(options.workload), options.policy, options.target)
    print(markdown(COLUMNS, [row(report) for report in reports]))


if __name__ == "__main__":
    main()
