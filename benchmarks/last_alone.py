"""`python -m benchmarks.last_alone`: what the last of eight scanned layers gains from a scan of its own.

The models of `benchmarks.tpu_models` under two policies: device memory and modelled time of the compiled step, in one scan and
with the last layer alone. `--target v5e` compiles for another target, `--models` some of the models.
"""

from __future__ import annotations

import argparse

from benchmarks.figures import markdown
from benchmarks.tpu_models import MODELS, SCANNED
from remat_jax import compat
from remat_jax.memory.measure import measure_many

SCANS = [model for model in MODELS if model != "Linen, unrolled"]
POLICIES = ("full", "dots")


def cells(model: str, policy: str, target: str) -> tuple[str, ...]:
    """The cells of a row of the table."""
    cut = f"{SCANNED - 1} × {policy} || 1 × {policy}"
    whole, alone = measure_many(MODELS[model](), [policy, cut], target)
    assert whole.seconds and alone.seconds, f"{target}: the compiled schedule of {model} has no time"
    sizes = [f"{report.device_bytes / 2**20:,.1f} MiB" for report in (whole, alone)]
    times = [f"{report.seconds * 1e3:.2f} ms" for report in (whole, alone) if report.seconds]
    # A layer's share of the step is at most this, as the step has an embedding, a head and an optimizer too.
    share = (whole.seconds - alone.seconds) / (whole.seconds / SCANNED)
    return (model, f"`{policy}`", *sizes, *times, f"{1 - alone.seconds / whole.seconds:.1%}", f"{share:.0%}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--models", nargs="+", choices=SCANS, default=SCANS)
    options = parser.parse_args()
    compat.keep_to_cpu_without_gpu()
    rows = [cells(model, policy, options.target) for model in options.models for policy in POLICIES]
    titles = ["model", "policy", "one scan", "last alone", "one scan", "last alone", "faster by", "of a layer's time"]
    print(markdown(titles, rows))


if __name__ == "__main__":
    main()
