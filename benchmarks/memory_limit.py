"""`python -m benchmarks.memory_limit`: what a step needs and takes when XLA is given less memory than the device has.

Compiles each workload for a target without a limit, then with shares of what it needed, and prints device memory and the
modelled time. `--json` prints the same as data.
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
from benchmarks.plan.workloads import decoder_scanned, decoder_unrolled
from remat_jax import compat
from remat_jax.report import format_bytes, table
from remat_jax.report.tables import render

SHARES = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Of what a step needs without a limit."""

TIMEOUT = 1800.0
ROWS, WIDTH, HIDDEN, LAYERS = 16384, 1024, 4096, 12
POLICIES = ("off", "full", "dots_with_no_batch_dims", "offload_inputs")


class MlpBlock(nn.Module):
    """Two products in bfloat16 beside a residual connection."""

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
    """Each policy of a workload, without a limit and with each share of what it needed."""
    make, policies = WORKLOADS[name]
    job, found = make(), []
    for policy in policies:
        free = rj.measure(job, policy, target, TIMEOUT)
        for share in (None, *SHARES):
            limit = None if share is None else int(share * free.device_bytes)
            one = rj.measure(job, policy, target, TIMEOUT, memory_limit=limit)
            print(f"{job.name}, {policy}, limit {format_bytes(limit)}", file=sys.stderr)
            found.append(
                {"workload": job.name, "policy": policy, "target": target, "memory_limit": limit}
                | {"compiler_options": one.compiler_options, "device_bytes": one.device_bytes, "temp_bytes": one.temp_bytes}
                | {"host_bytes": one.host_bytes, "step_seconds": one.seconds, "jax_version": one.jax_version}
            )
    return found


def shown(found: list[dict[str, Any]]) -> Any:
    """The rows as a table."""
    columns = ("workload", "policy", "limit", "factor", "device", "host", "modelled step")
    cells = [
        (
            one["workload"],
            one["policy"],
            format_bytes(one["memory_limit"]) if one["memory_limit"] is not None else "XLA's own",
            "".join(map(str, one["compiler_options"].values())),
            format_bytes(one["device_bytes"]),
            format_bytes(one["host_bytes"]),
            f"{1e3 * one['step_seconds']:.1f} ms",
        )
        for one in found
    ]
    return table(f"Memory limits on {found[0]['target']} (JAX {found[0]['jax_version']})", columns, cells)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit status is 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_limit", description=__doc__.split(":")[0])
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help=f"{', '.join(WORKLOADS)}; all unless given")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    compat.keep_to_cpu_without_gpu()
    found = [one for name in options.workloads or WORKLOADS for one in rows(name, options.target)]
    print(json.dumps(found, indent=1) if options.json else render(shown(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
