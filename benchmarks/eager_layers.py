"""`python -m benchmarks.eager_layers`: the cost of a policy for each layer in calls without `jit`.

Eight small layers under `4 × full | 4 × dots`, scanned and unrolled: the processor time of a gradient's first call and of later
calls, and what a later call adds to the memory of the process. There are three variants, each in its own process: eager calls
with the cache of identical programs (`remat_jax/apply/per_layer/kept_programs.py`), eager calls without it, and calls under
`jit`.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

import remat_jax as rj
from benchmarks.figures import markdown
from remat_jax.apply.per_layer import kept_programs, layered

WAYS = {"with": "eager, with the cache", "without": "eager, without it", "jit": "under `jit`"}
CALLS = 12


@rj.block
def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jnp.tanh(x @ w[0]) @ w[1] + x


def scanned(ws: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)


def unrolled(ws: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    for w in zip(*ws, strict=True):
        x = layer(x, w)
    return jnp.sum(x**2)


def cells(way: str, form: str) -> list[str]:
    """The first call, the median of later calls, and the memory that a later call adds."""
    if way == "without":
        kept_programs.evaluate = layered.evaluate
    key, x = jax.random.key(0), jnp.ones((16, 64))
    ws = jax.random.normal(key, (8, 64, 256)) / 20, jax.random.normal(key, (8, 256, 64)) / 20
    loss = {"scanned": scanned, "unrolled": unrolled}[form]
    step = jax.value_and_grad(rj.checkpoint_blocks(loss, {layer: "4 × full | 4 × dots"}))
    step = jax.jit(step) if way == "jit" else step
    times, peaks = [], []
    for _ in range(CALLS):
        start = time.process_time()
        jax.block_until_ready(step(ws, x))
        times.append(1e3 * (time.process_time() - start))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
    added = (peaks[-1] - peaks[1]) / (CALLS - 2)
    return [f"{times[0]:.0f} ms", f"{statistics.median(times[1:]):.1f} ms", f"{added:.1f} MiB"]


def main() -> None:
    """Print the table, or the cells of one variant if a variant and a form are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", nargs="*", help="a variant and a form; prints only their cells")
    options = parser.parse_args()
    if options.one:
        print(*cells(*options.one), sep="|")
        return
    rows = []
    for form in ("scanned", "unrolled"):
        for way, name in WAYS.items():
            command = [sys.executable, "-m", "benchmarks.eager_layers", way, form]
            printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            rows.append((f"{form}, {name}", *printed.strip().split("|")))
    print(markdown(["eight layers", "first call", "later calls", "memory of a later call"], rows))


if __name__ == "__main__":
    main()
