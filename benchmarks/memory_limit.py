"""`python -m benchmarks.memory_limit mlp`: memory and modelled time of a step if XLA may use less memory.

Compiles a workload for a target without a limit, then with limits that are shares of the memory needed without one. Prints
device memory and modelled time: the tables of docs/notes/memory_limit.md. `--json` prints the same as data.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from benchmarks.figures import markdown
from benchmarks.plan.workloads import decoder_scanned, decoder_unrolled
from remat_jax import compat
from remat_jax.report import format_bytes

SHARES = (1.0, 0.8, 0.6, 0.4, 0.2)
"""The limits, as shares of what a step needs without a limit."""

TIMEOUT = 1800.0
ROWS, WIDTH, HIDDEN, LAYERS = 16384, 1024, 4096, 12
POLICIES = ("off", "full", "dots_with_no_batch_dims", "offload_inputs")


class MlpBlock(nn.Module):
    """Two matrix products in bfloat16, whose result is added to the input."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH, dtype=x.dtype)(nn.gelu(nn.Dense(HIDDEN, dtype=x.dtype)(x)))


class Mlp(nn.Module):
    """Unrolled blocks."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = MlpBlock()(x)
        return x


def mlp() -> rj.Workload:
    """Twelve unrolled blocks with Adam; nothing is allocated."""
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    params = jax.eval_shape(Mlp().init, jax.random.key(0), x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(Mlp().apply(params, x).astype(jnp.float32) ** 2)  # type: ignore[union-attr]

    return rj.Workload(loss, params, (x,), MlpBlock, optimizer=optax.adam(1e-4), name="MLP, unrolled")


WORKLOADS: dict[str, tuple[Callable[[], rj.Workload], tuple[str, ...]]] = {
    "mlp": (mlp, ("off", "full")),
    "decoder": (lambda: decoder_unrolled(LAYERS).workload, POLICIES),
    "scanned": (lambda: decoder_scanned(LAYERS).workload, ("off", "dots_with_no_batch_dims")),
}


def rows(name: str, target: str) -> list[dict[str, Any]]:
    """One row for each policy of a workload and each limit; the first row of a policy has no limit."""
    make, policies = WORKLOADS[name]
    job, measured = make(), []
    for policy in policies:
        free = rj.measure(job, policy, target, TIMEOUT)
        for share in (None, *SHARES):
            limit = None if share is None else int(share * free.device_bytes)
            report = rj.measure(job, policy, target, TIMEOUT, memory_limit=limit)
            print(f"{job.name}, {policy}, limit {format_bytes(limit)}", file=sys.stderr)
            measured.append(
                {"workload": job.name, "policy": policy, "target": target, "memory_limit": limit}
                | {"compiler_options": report.compiler_options, "device_bytes": report.device_bytes}
                | {"temp_bytes": report.temp_bytes, "host_bytes": report.host_bytes}
                | {"step_seconds": report.seconds, "jax_version": report.jax_version}
            )
    return measured


def table(measured: list[dict[str, Any]]) -> str:
    """The rows as a table of the note."""
    columns = ["policy", "limit", "factor", "device", "modelled step"]
    return markdown(columns, [_cells(row) for row in measured])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    host = f", {row['host_bytes'] / 1e9:.1f} on the host" if row["host_bytes"] else ""
    return (
        f"`{row['policy']}`",
        "XLA's own" if row["memory_limit"] is None else f"{row['memory_limit'] / 1e9:.2f} GB",
        "".join(map(str, row["compiler_options"].values())),
        f"{row['device_bytes'] / 1e9:.2f} GB{host}",
        f"{1e3 * row['step_seconds']:.1f} ms",
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit status is 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_limit", description=__doc__.split(":")[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    compat.keep_to_cpu_without_gpu()
    measured = rows(options.workload, options.target)
    print(json.dumps(measured, indent=1) if options.json else table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
