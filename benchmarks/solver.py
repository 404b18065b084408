"""The solver's time, and its plans' distance from the lower bound, on 32 layers of Llama 8B traced from a third-party model.

    python -m benchmarks.solver

Prints twenty budgets. For some, the layer's file has the exact programme's answer (`known`), which took minutes.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from remat_jax.solver import Block, ResidualCosts, Solver, Stack

LAYER = Path(__file__).parents[1] / "tests" / "vectors" / "llama8b_layer.json"
BUDGETS = (112e9, 375e9, 18)
"""The first budget in bytes, the last, and their number; the budgets of the file's `known` are added."""


def main() -> None:
    data = json.loads(LAYER.read_text())
    residuals = tuple(ResidualCosts(**{**fields, "parents": tuple(fields["parents"])}) for fields in data["residuals"])
    stack = Stack((Block("layer", residuals, repeats=data["repeats"], **data["block"]),), None, data["fixed_bytes"])
    entries = {entry["budget_bytes"]: entry for entry in data["known"]}
    begin = time.perf_counter()
    solver = Solver(stack)
    prepared = time.perf_counter() - begin
    table = Table("budget", "extra", "bound", "above the bound", "of the step", "peak", "runs", "seconds", "exact programme")
    worst = 0.0
    for budget in sorted([*entries, *np.linspace(*BUDGETS)]):
        begin = time.perf_counter()
        plan = solver.plan(budget)
        took = time.perf_counter() - begin
        bound = plan.lower_bound - stack.base_seconds
        worst = max(worst, took)
        exact = entries.get(budget, {}).get("exact_programme", "")
        table.add_row(
            f"{budget / 1e9:.1f} GB",
            f"{plan.extra_seconds * 1e3:.2f} ms",
            f"{bound * 1e3:.2f} ms",
            f"{plan.extra_seconds / bound - 1:.2%}" if bound > 0 else "",
            f"{(plan.seconds - plan.lower_bound) / plan.seconds:.3%}",
            f"{plan.peak_bytes / 1e9:.1f} GB",
            str(len(list(itertools.groupby(plan.policies, key=lambda policy: policy.choices)))),
            f"{took:.2f}",
            f"{exact['extra_seconds'] * 1e3:.2f} ms after {exact['solver_seconds']:.0f} s"
            if isinstance(exact, dict)
            else exact,
        )
    Console(width=150).print(table)
    print(f"{prepared:.2f} s to prepare, {worst:.2f} s for the slowest budget")


if __name__ == "__main__":
    main()
