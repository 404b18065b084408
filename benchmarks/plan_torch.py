"""`python -m benchmarks.plan_torch`: compares plans with PyTorch's `activation_memory_budget`, at the bytes that PyTorch saves.

PyTorch's automatic checkpointing solves a knapsack over the whole graph, embedding and head included. So here, too, the whole
loss is one block, and the planner looks for the plan that recomputes the fewest FLOPs and saves no more bytes than PyTorch. For
the columns "by layer" each layer is a block: then the layers' inputs, and all residuals outside the layers, are always saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import remat_jax as rj
from benchmarks.record import ROOT, provenance, text_table, write_json
from examples.demo.setting import Setting
from examples.models import linen
from remat_jax import compat, solver
from remat_jax.cost.count import flops
from remat_jax.hardware.rates import Rates
from remat_jax.planning.problem import describe
from remat_jax.planning.problem import kept_bytes as modelled_bytes
from remat_jax.planning.translate import policy_of
from remat_jax.report.tables import format_bytes

BUDGETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
IN_FLOPS = Rates({"tensorfloat32": 1e9, "float32": 1e15}, 1e30)
"""Only matrix products take time, a nanosecond per operation; everything else takes almost none, as in PyTorch's solver."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder and its batch, in float32."""

    layers: int
    d_model: int
    heads: int
    length: int
    batch: int


_DEMO = Setting()
SETTINGS = {
    "demo": Sizes(_DEMO.num_layers, _DEMO.d_model, _DEMO.nhead, _DEMO.length, _DEMO.batch),
    # Here most saved bytes are attention weights.
    "long": Sizes(3, 128, 4, 512, 2),
}


class Training(nn.Module):
    """The loss of the decoder, as one module."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        size = self.sizes
        model = linen.ByteDecoder(
            d_model=size.d_model, nhead=size.heads, num_layers=size.layers, max_len=size.length, name="model"
        )
        return model.loss(tokens, targets)


def workload(sizes: Sizes, blocks: type) -> rj.Workload:
    """The decoder's loss; `blocks` is `Training`, the whole loss, or the class of its layers."""
    model, tokens = Training(sizes), jax.ShapeDtypeStruct((sizes.batch, sizes.length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)["params"]
    return rj.Workload(lambda params, *batch: model.apply({"params": params}, *batch), params, (tokens, tokens), blocks)


class Plans:
    """The plans of one workload with the fewest recomputed FLOPs.

    The reported bytes and FLOPs do not come from the planner's model: the saved bytes are those of JAX's own linearisation
    (`rj.residuals`), the recomputed FLOPs those of the traced step.
    """

    def __init__(self, sizes: Sizes, blocks: type) -> None:
        self.job = workload(sizes, blocks)
        self.described = describe(self.job, "cpu", rates=IN_FLOPS, working=0.0)
        outside = rj.residuals(self.job, "full").device_bytes - modelled_bytes(self.described, "full")[0]
        # Only arrays kept between the passes count here, not arrays that live while a block is recomputed.
        still = [dataclasses.replace(block, recomputed_share=0.0) for block in self.described.stack.blocks]
        self.stack = dataclasses.replace(
            self.described.stack, blocks=tuple(still), fixed_bytes=float(max(0, outside)), link=None
        )
        self.step_flops = self._flops("everything")
        self._seen: dict[Any, tuple[int, int]] = {}

    def within(self, saved_bytes: int) -> tuple[int, int] | None:
        """Kept bytes and recomputed FLOPs of the best plan that keeps no more than `saved_bytes`; None if there is none."""
        try:
            # The solver needs a positive budget; no residual fits in one byte.
            plan = solver.solve(self.stack, max(1.0, float(saved_bytes)))
        except rj.errors.InfeasibleBudget:
            return None
        policy = self._policy(plan)
        if policy not in self._seen:
            self._seen[policy] = rj.residuals(self.job, policy).device_bytes, self._flops(policy) - self.step_flops
        return self._seen[policy]

    def _policy(self, plan: solver.StackPlan) -> Any:
        chosen = iter(plan.policies)
        policies = []
        for kind, block in zip(self.described.kinds, self.described.stack.blocks, strict=True):
            policies += [policy_of(kind, dataclasses.replace(next(chosen), block=block)) for _ in kind.layers]
        return policies[0] if len(policies) == 1 else rj.LayerPolicies.of(policies)

    def _flops(self, policy: Any) -> int:
        step = self.job.step(policy)
        return flops(step.function, *step.arguments)


def of_torch(sizes: Sizes, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """PyTorch's rows, computed in a separate process.

    Raises:
        RuntimeError: the process failed; the message ends with its standard error.
    """
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.torch_budgets", json.dumps(dataclasses.asdict(sizes))]
    process = subprocess.run([*command, *map(str, budgets)], capture_output=True, text=True, cwd=ROOT)
    if process.returncode:
        raise RuntimeError(f"benchmarks.torch_budgets failed:\n{process.stderr[-2000:]}")
    rows: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    return rows


def rows(name: str, sizes: Sizes, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """One row for each budget, with both frameworks."""
    torch_rows = of_torch(sizes, budgets)
    print(f"{name}: PyTorch's graphs are partitioned", file=sys.stderr, flush=True)
    whole, layers = Plans(sizes, Training), Plans(sizes, linen.DecoderLayer)
    both = []
    for torch_row in torch_rows:
        row = {"setting": name, **torch_row, "step_flops_jax": whole.step_flops}
        for form, plans in (("whole", whole), ("layers", layers)):
            kept = plans.within(torch_row["saved_bytes"])
            row |= {form: None if kept is None else {"kept_bytes": kept[0], "again_flops": kept[1]}}
        both.append(row)
        print(f"{name}: budget {torch_row['budget']}", file=sys.stderr, flush=True)
    return both


def holds(row: dict[str, Any]) -> bool:
    """Whether both steps have equal FLOPs, and the plan of the whole loss saves and recomputes no more than PyTorch."""
    ours = row["whole"]
    equal = row["step_flops"] == row["step_flops_jax"]
    return equal and ours is not None and ours["kept_bytes"] <= row["saved_bytes"] and ours["again_flops"] <= row["again_flops"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in plain text; recomputed FLOPs are printed as shares of the step's FLOPs."""
    lines = []
    for row in rows:
        cells = [f"{row['setting']} {row['budget']:g}", format_bytes(row["saved_bytes"]), _share(row, row)]
        for form in ("whole", "layers"):
            ours = row[form]
            cells += ["none fits", ""] if ours is None else [format_bytes(ours["kept_bytes"]), _share(ours, row)]
        lines.append((*cells, "yes" if holds(row) else "NO"))
    return text_table(("budget", "saved", "again %", "plan keeps", "again %", "by layer", "again %", "holds"), lines)


def _share(figures: dict[str, Any], row: dict[str, Any]) -> str:
    return f"{100 * figures['again_flops'] / row['step_flops']:.2f}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_torch", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for plan_torch.json")
    parser.add_argument("--only", choices=SETTINGS, action="append", help="one of the settings; may be given again")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, help="of PyTorch, from 0 to 1")
    options = parser.parse_args(arguments)
    if not all(0 <= budget <= 1 for budget in options.budgets):
        parser.error("--budgets must be from 0 to 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Partition, plan, print the table; 1 if a plan of the whole loss keeps or recomputes more than PyTorch."""
    options = parse(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    compat.keep_to_cpu_without_gpu()
    compared: list[dict[str, Any]] = []
    for name in options.only or SETTINGS:
        compared += rows(name, SETTINGS[name], options.budgets)
        write_json(options.output / "plan_torch.json", {"provenance": provenance(), "rows": compared})
    print("Recomputed FLOPs, as shares of the step's, at no more bytes than PyTorch saves for its budget:")
    print(table(compared))
    lost = [row for row in compared if not holds(row)]
    print(
        f"{len(lost)} of {len(compared)} rows are lost."
        if lost
        else "At every budget the plan recomputes no more than PyTorch."
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
