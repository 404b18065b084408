"""Groups of layers compared with `full`, compiled for a described GPU: device memory, kept bytes and matmul FLOPs of a step.

python docs/notes/groups_of_layers.py scanned|inside|unrolled [--target h200]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from examples.models.linen import ByteDecoder, DecoderLayer
from remat_jax.cost.count import flops

WIDTH, LENGTH = 1280, 2048
# Layers, batch and policies of each table.
TABLES = {
    "scanned": (32, 64, ("full", "offload_inputs", *(f"32 × full in groups of {size}" for size in (2, 4, 6, 8, 16, 32)))),
    "inside": (32, 16, ("full", "32 × full in groups of 2", "32 × dots in groups of 2", "32 × off in groups of 2")),
    "unrolled": (8, 64, ("full", *(f"8 × full in groups of {size}" for size in (2, 3, 4)))),
}


def job(layers: int, batch: int, *, scan: bool) -> rj.Workload:
    """Return a decoder of width 1280 in bfloat16 with Adam, `batch` sequences of 2048 bytes."""
    model = ByteDecoder(d_model=WIDTH, nhead=20, num_layers=layers, max_len=LENGTH, scan=scan, param_dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((batch, LENGTH), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return rj.Workload(
        lambda p, x, y: model.apply(p, x, y, method="loss"), params, (tokens, tokens), DecoderLayer, optimizer=optax.adam(1e-4)
    )


def rows(target: str, layers: int, batch: int, policies: tuple[str, ...], *, scan: bool) -> Iterator[str]:
    """Yield one table row per policy: sizes in GiB, and matmul FLOPs relative to the first policy."""
    workload, first = job(layers, batch, scan=scan), 0
    for policy in policies:
        report = rj.measure(workload, policy, target)
        loss, params, rest = workload.split_loss(policy)
        operations = flops(jax.grad(loss), params, rest, *workload.batch)
        first = first or operations
        sizes = report.device_bytes, report.temp_bytes, report.residual_device_bytes or 0, report.host_bytes
        yield " | ".join([policy, *(f"{size / 2**30:.2f}" for size in sizes), f"{operations / first:.3f}"])


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES, help="unrolled layers take minutes to compile")
    parser.add_argument("--target", default="h200")
    options = parser.parse_args()
    layers, batch, policies = TABLES[options.table]
    print("| policy | device GiB | temp | kept | host | operations |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows(options.target, layers, batch, policies, scan=options.table != "unrolled"):
        print("|", row, "|", flush=True)


if __name__ == "__main__":
    main()
