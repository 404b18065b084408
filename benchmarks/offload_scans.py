"""`python -m benchmarks.offload_scans`: how much device memory an offload of inputs frees in a model with several scans.

Compiles each workload under `full` and under `offload_inputs`, and prints device and host memory, the freed device bytes per
offloaded byte, and the modelled time: the table of docs/notes/offload_in_scans.md. `--json` prints the same as data.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from benchmarks.figures import markdown
from examples import pi0_true
from remat_jax import compat
from remat_jax.report import format_bytes

TIMEOUT = 1800.0
POLICIES = ("full", "offload_inputs")
LAYERS, ROWS, LENGTH, WIDTH, HIDDEN, WORDS = 12, 16, 512, 512, 2048, 50000


def encoder_and_decoder(policy: str) -> rj.Workload:
    """An encoder and a decoder, both scans over a checkpointed function. Each decoder iteration reads the encoder's output."""

    def mix(weights: Any, x: Any) -> Any:
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]

    def attend(weights: Any, x: Any, context: Any, bias: Any) -> Any:
        scores = jnp.einsum("btd,bsd->bts", x @ weights["query"], context @ weights["key"]) / WIDTH**0.5
        read = jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores + bias), context @ weights["value"])
        return mix(weights, x + read @ weights["out"])

    def loss(params: Any, tokens: Any, visible: Any) -> Any:
        bias, start = jnp.where(visible, 0.0, -1e9), params["words"][tokens]
        seen, _ = jax.lax.scan(lambda x, weights: (jax.checkpoint(mix)(weights, x), None), start, params["encoder"])
        last, _ = jax.lax.scan(
            lambda x, weights: (jax.checkpoint(attend)(weights, x, seen, bias), None), start, params["decoder"]
        )
        return jnp.mean(last**2)

    def stack(**shapes: tuple[int, int]) -> dict[str, Any]:
        return {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in shapes.items()}

    square = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    both = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    words = jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32)
    params = {"words": words, "encoder": stack(**both), "decoder": stack(**both, **square)}
    batch = (jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32), jax.ShapeDtypeStruct((ROWS, LENGTH, LENGTH), jnp.bool_))
    name = "encoder and decoder"
    return rj.Workload(rj.replan(loss, policy), params, batch, "*", optimizer=optax.adam(1e-3), name=name)


def pi0(policy: str) -> rj.MemoryReport:
    """π0 at its published size."""
    return rj.measure(pi0_true.job(), policy, "h200", TIMEOUT)


WORKLOADS: dict[str, Callable[[str], rj.MemoryReport]] = {
    "encoder": lambda policy: rj.measure(encoder_and_decoder(policy), "off", "h200", TIMEOUT),
    "pi0": pi0,
}


def rows(name: str) -> list[dict[str, Any]]:
    """A workload under each policy."""
    measured: list[dict[str, Any]] = []
    for policy in POLICIES:
        report = WORKLOADS[name](policy)
        print(f"{report.workload}, {policy}: {format_bytes(report.device_bytes)}", file=sys.stderr)
        full = measured[0]["device_bytes"] if measured else None
        measured.append(
            {"workload": report.workload, "policy": policy, "target": report.target, "device_bytes": report.device_bytes}
            | {"host_bytes": report.host_bytes, "returned": (full - report.device_bytes) / report.host_bytes if full else None}
            | {"back_bytes": report.overlap.back.bytes if report.overlap else 0}
            | {"step_seconds": report.seconds, "jax_version": report.jax_version}
        )
    return measured


def table(measured: list[dict[str, Any]]) -> str:
    """The rows as the table of the note."""
    columns = ["workload", "policy", "device MB", "host MB", "freed", "copied back MB", "step ms"]
    cells = [
        (
            row["workload"],
            f"`{row['policy']}`",
            f"{row['device_bytes'] / 1e6:.1f}",
            f"{row['host_bytes'] / 1e6:.1f}" if row["host_bytes"] else "0",
            "" if row["returned"] is None else f"{row['returned']:.3f}",
            f"{row['back_bytes'] / 1e6:.1f}" if row["back_bytes"] else "",
            f"{1e3 * row['step_seconds']:.1f}",
        )
        for row in measured
    ]
    return markdown(columns, cells)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a workload frees less than 0.9 device bytes per offloaded byte."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload_scans", description=__doc__.split(":")[0])
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help=f"{', '.join(WORKLOADS)}; all unless given")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    compat.keep_to_cpu_without_gpu()
    measured = [row for name in options.workloads or WORKLOADS for row in rows(name)]
    print(json.dumps(measured, indent=1) if options.json else table(measured))
    return int(any(row["returned"] is not None and row["returned"] < 0.9 for row in measured))


if __name__ == "__main__":
    sys.exit(main())
