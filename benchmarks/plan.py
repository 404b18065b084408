"""`python -m benchmarks.plan`: plans against every named policy that fits, by the estimate, at several budgets."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from benchmarks.predict_memory import deep_mlp
from benchmarks.record import ROOT, provenance, text_table, write_json
from examples.models import linen
from remat_jax import compat
from remat_jax.hardware import target as target_named
from remat_jax.planning.make import leanest
from remat_jax.report.tables import format_bytes

WIDTH, HEADS, BATCH, LENGTH = 512, 8, 4, 512
SHARES = (0.2, 0.4, 0.6, 0.8)


def decoder(scan: bool, layers: int) -> rj.Workload:
    """The byte-level decoder of the examples, Adam included; nothing is allocated."""
    sizes: dict[str, Any] = {"d_model": WIDTH, "nhead": HEADS, "num_layers": layers, "max_len": LENGTH}
    model = linen.ByteDecoder(**sizes, scan=scan, param_dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        found: jax.Array = model.apply({"params": params}, tokens, targets, method="loss")
        return found

    name = f"decoder, {'scanned' if scan else 'unrolled'}"
    return rj.Workload(loss, params, (tokens, tokens), linen.DecoderLayer, optimizer=optax.adam(1e-4), name=name)


WORKLOADS: dict[str, Callable[[int], rj.Workload]] = {
    "scanned": functools.partial(decoder, True),
    "unrolled": functools.partial(decoder, False),
    "mlp": deep_mlp,
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for plan.json")
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="one of the workloads; may be given again")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of what lies between full and off")
    options = parser.parse_args(arguments)
    if options.layers < 2 or not all(0 < share <= 1 for share in options.shares):
        parser.error("--layers must be 2 or more, --shares above 0 and at most 1")
    return options


def budgets(workload: rj.Workload, target: str, shares: Sequence[float]) -> list[int]:
    """So much of the way from the leanest step that is reached to the one without checkpointing."""
    least, _ = leanest(workload, 2**62, target_named(target), None)
    most = rj.measure(workload, "off", target).device_bytes
    assert least is not None, "any step fits in that"
    return [least + round(share * (most - least)) for share in shares]


def row(workload: rj.Workload, budget: int, target: str) -> dict[str, Any]:
    """One plan, and the best named policy beside it; `fits` and `not worse` are what the plan promises."""
    begin = time.perf_counter()
    found = rj.plan(workload, budget, target, timeout=600)
    best = found.best_named
    return {
        "workload": workload.name,
        "budget": budget,
        "device_bytes": found.device_bytes,
        "predicted_bytes": found.predicted_bytes,
        "host_bytes": found.host_bytes,
        "base_seconds": found.base_seconds,
        "seconds": found.seconds,
        "best_named": best.name if best else None,
        "best_named_seconds": best.seconds if best else None,
        "named": {one.name: [one.device_bytes, one.seconds, one.compiled] for one in found.named},
        "policies": found.texts,
        "compiled": len(found.tried),
        "wall_seconds": time.perf_counter() - begin,
        "fits": found.device_bytes <= budget,
        "not worse": best is None or best.seconds is None or found.seconds <= best.seconds * (1 + 1e-9),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in plain text; extra time is over a step that keeps everything."""
    lines = []
    for one in rows:
        extra, other = one["seconds"] - one["base_seconds"], one["best_named_seconds"]
        named = "none fits" if other is None else f"{1e3 * (other - one['base_seconds']):.2f}"
        ratio = "" if other is None else f"{other / one['seconds']:.3f}"
        lines.append(
            (
                one["workload"],
                format_bytes(one["budget"]),
                format_bytes(one["device_bytes"]),
                f"{1e3 * one['seconds']:.2f}",
                f"{1e3 * extra:.2f}",
                one["best_named"] or "",
                named,
                ratio,
                str(one["compiled"]),
                f"{one['wall_seconds']:.0f}",
                "yes" if one["fits"] and one["not worse"] else "NO",
            )
        )
    columns = (
        "workload",
        "budget",
        "compiled",
        "step ms",
        "extra ms",
        "best named",
        "its extra",
        "ratio",
        "steps",
        "s",
        "holds",
    )
    return text_table(columns, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print the table; 1 where a plan does not fit or a named policy that fits is faster."""
    options = parse(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    compat.keep_to_cpu_without_gpu()
    rows: list[dict[str, Any]] = []
    for name in options.only or WORKLOADS:
        workload = WORKLOADS[name](options.layers)
        for budget in budgets(workload, options.target, options.shares):
            rows.append(row(workload, budget, options.target))
            print(f"{workload.name}, {format_bytes(budget)}: {rows[-1]['wall_seconds']:.0f} s", file=sys.stderr, flush=True)
            settings = vars(options) | {"output": str(options.output)}
            write_json(options.output / "plan.json", {"provenance": provenance(), "options": settings, "rows": rows})
    print(f"Plans for {options.target}, {options.layers} layers, estimated times, JAX {jax.__version__}:")
    print(table(rows))
    return 0 if all(one["fits"] and one["not worse"] for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
