"""`python -m benchmarks.offload_scans`: what the device gives back where a model of several scans offloads its blocks' inputs.

Compiles each workload under `full` and under `offload_inputs`, and prints device and host memory, the share of the host's bytes
that the device gives back, and the modelled time. `--json` prints the same as data.
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
from examples import pi0_true
from remat_jax import compat
from remat_jax.report import format_bytes, table
from remat_jax.report.tables import render

TIMEOUT = 1800.0
POLICIES = ("full", "offload_inputs")
LAYERS, ROWS, LENGTH, WIDTH, HIDDEN, WORDS = 12, 16, 512, 512, 2048, 50000


def encoder_and_decoder(policy: str) -> rj.Workload:
    """Two scans of `jax.checkpoint` around plain functions, replanned; the decoder's rounds read the encoder's output."""

    def mix(weights: Any, x: Any) -> Any:
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]

    def attend(weights: Any, x: Any, context: Any, bias: Any) -> Any:
        scores = jnp.einsum("btd,bsd->bts", x @ weights["query"], context @ weights["key"]) / WIDTH**0.5
        read = jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores + bias), context @ weights["value"])
        return mix(weights, x + read @ weights["out"])

    def loss(params: Any, tokens: Any, visible: Any) -> Any:
        bias, start = jnp.where(visible, 0.0, -1e9), params["words"][tokens]
        seen, _ = jax.lax.scan(lambda x, one: (jax.checkpoint(mix)(one, x), None), start, params["encoder"])
        last, _ = jax.lax.scan(lambda x, one: (jax.checkpoint(attend)(one, x, seen, bias), None), start, params["decoder"])
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
    found = []
    for policy in POLICIES:
        one = WORKLOADS[name](policy)
        print(f"{one.workload}, {policy}: {format_bytes(one.device_bytes)}", file=sys.stderr)
        full = found[0]["device_bytes"] if found else None
        found.append(
            {"workload": one.workload, "policy": policy, "target": one.target, "device_bytes": one.device_bytes}
            | {"host_bytes": one.host_bytes, "returned": (full - one.device_bytes) / one.host_bytes if full else None}
            | {"back_bytes": one.overlap.back.bytes if one.overlap else 0}
            | {"compute_seconds": one.overlap.compute_seconds if one.overlap else one.seconds}
            | {"step_seconds": one.seconds, "jax_version": one.jax_version}
        )
    return found


def shown(found: list[dict[str, Any]]) -> Any:
    """The rows as a table."""
    columns = ("workload", "policy", "device", "host", "freed", "copied back", "compute", "modelled step")
    cells = [
        (
            one["workload"],
            one["policy"],
            format_bytes(one["device_bytes"]),
            format_bytes(one["host_bytes"]),
            "" if one["returned"] is None else f"{one['returned']:.3f}",
            format_bytes(one["back_bytes"]),
            f"{1e3 * one['compute_seconds']:.1f} ms",
            f"{1e3 * one['step_seconds']:.1f} ms",
        )
        for one in found
    ]
    return table(f"Offload in several scans on {found[0]['target']} (JAX {found[0]['jax_version']})", columns, cells)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 where a workload gives back less than 0.9 of what is on the host."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload_scans", description=__doc__.split(":")[0])
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help=f"{', '.join(WORKLOADS)}; all unless given")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    compat.keep_to_cpu_without_gpu()
    found = [one for name in options.workloads or WORKLOADS for one in rows(name)]
    print(json.dumps(found, indent=1) if options.json else render(shown(found)))
    return int(any(one["returned"] is not None and one["returned"] < 0.9 for one in found))


if __name__ == "__main__":
    sys.exit(main())
