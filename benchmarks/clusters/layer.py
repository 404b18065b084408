"""The estimated time of one layer of experts: with one sequence per GPU it must not grow with the number of hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.clusters.cases import on_gpus
from benchmarks.record import text_table
from examples import moe_235b
from examples.models.moe import MoeConfig
from remat_jax.planning.problem import describe

HOST_COUNTS = (2, 8, 32, 64)
LARGEST_SPREAD = 0.05
"""The share by which the slowest layer may take longer than the fastest: every GPU has the same work."""
TRACED_LAYERS = 2
"""The number of layers of the step that is traced, and compiled for its shardings; all layers are alike."""

Times = Mapping[int, tuple[float, float]]


def layer_seconds(hosts: int, gpu: str, config: MoeConfig, length: int = moe_235b.LENGTH) -> tuple[float, float]:
    """The planner's estimates of the forward and the backward pass of one layer on a device."""
    work = moe_235b.job_on(hosts, replace(config, num_layers=TRACED_LAYERS), length)
    (block,) = describe(work, on_gpus(gpu, hosts), timeout=3600).stack.blocks
    return block.forward_seconds, block.backward_seconds


def table(times: Times) -> str:
    """A table of milliseconds by the number of hosts."""
    rows = [
        (f"{hosts}", *(f"{1e3 * seconds:.2f}" for seconds in (*passes, sum(passes)))) for hosts, passes in sorted(times.items())
    ]
    return text_table(("hosts", "forward ms", "backward ms", "layer ms"), rows)


def apart(times: Times) -> float:
    """How much longer the slowest layer takes than the fastest, as a share.

    >>> round(apart({2: (1.0, 2.0), 64: (1.0, 2.3)}), 3)
    0.1
    """
    totals = [sum(passes) for passes in times.values()]
    return max(totals) / min(totals) - 1


def say(times: Times) -> int:
    """Print the table and whether the claim holds; 1 if it fails."""
    print("One layer of Qwen 3 235B A22B, one sequence on each GPU, as estimated for plans:")
    print(table(times))
    holds = apart(times) <= LARGEST_SPREAD
    print(f"The slowest takes {100 * apart(times):.1f} % longer than the fastest; {100 * LARGEST_SPREAD:.0f} % are allowed.")
    return 0 if holds else 1
