"""The estimated time of one layer of experts: with one sequence per GPU it must not grow with the number of hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.clusters.cases import on_gpus
from benchmarks.record import text_table
from examples import moe_235b
from examples.models.moe import MoeConfig
from remat_jax.planning.problem import describe

HOSTS = (2, 8, 32, 64)
APART = 0.05
"""By which share the slowest may take longer than the fastest: the work of each GPU is the same."""
LAYERS = 2
"""Of the step that is traced and compiled for its shardings; all layers are alike."""

Times = Mapping[int, tuple[float, float]]


def layer_seconds(hosts: int, gpu: str, config: MoeConfig, length: int = moe_235b.LENGTH) -> tuple[float, float]:
    """The planner's estimates of the forward and the backward pass of one layer on a device."""
    work = moe_235b.job_on(hosts, replace(config, num_layers=LAYERS), length)
    (block,) = describe(work, on_gpus(gpu, hosts), timeout=3600).stack.blocks
    return block.forward_seconds, block.backward_seconds


def table(times: Times) -> str:
    """A table of milliseconds by the number of hosts."""
    rows = [(f"{hosts}", *(f"{1e3 * seconds:.2f}" for seconds in (*one, sum(one)))) for hosts, one in sorted(times.items())]
    return text_table(("hosts", "forward ms", "backward ms", "layer ms"), rows)


def apart(times: Times) -> float:
    """How much longer the slowest layer takes than the fastest, as a share.

    >>> round(apart({2: (1.0, 2.0), 64: (1.0, 2.3)}), 3)
    0.1
    """
    totals = [sum(one) for one in times.values()]
    return max(totals) / min(totals) - 1


def say(times: Times) -> int:
    """Print the table and whether the claim holds; 1 if it fails."""
    print("One layer of Qwen 3 235B A22B, one sequence on each GPU, as estimated for plans:")
    print(table(times))
    holds = apart(times) <= APART
    print(f"The slowest takes {100 * apart(times):.1f} % longer than the fastest; {100 * APART:.0f} % are allowed.")
    return 0 if holds else 1
