"""`python -m benchmarks.plan_torch`: plans against PyTorch's `activation_memory_budget`, at the bytes that PyTorch saves.

PyTorch's automatic checkpointing solves a knapsack over the whole graph, embedding and head included. So the whole loss is one
block here too, and the planner is asked for the plan with the fewest FLOPs computed again that keeps no more. The same with the
layers as blocks stands beside it: then a layer's input and what is kept outside of the layers are always kept.
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
from remat_jax.planning.problem import describe, policy_of
from remat_jax.planning.problem import kept_bytes as modelled_bytes
from remat_jax.report.tables import format_bytes

BUDGETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
IN_FLOPS = Rates({"tensorfloat32": 1e9, "float32": 1e15}, 1e30)
"""Only matrix products take time, a nanosecond for each operation; the rest next to nothing, as for PyTorch's own solver."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a decoder and its batch, in float32."""

    layers: int
    d_model: int
    heads: int
    length: int
    batch: int


_DEMO = Setting()
SETTINGS = {
    "demo": Sizes(_DEMO.num_layers, _DEMO.d_model, _DEMO.nhead, _DEMO.length, _DEMO.batch),
    # Attention's weights are the most of what is kept.
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
    """The decoder's loss; `blocks` is `Training`, all of it, or its layers."""
    model, tokens = Training(sizes), jax.ShapeDtypeStruct((sizes.batch, sizes.length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)["params"]
    return rj.Workload(lambda params, *batch: model.apply({"params": params}, *batch), params, (tokens, tokens), blocks)


class Plans:
    """The plans of one workload with the fewest FLOPs computed again.

    What a plan keeps and computes again is not taken from the model that it was solved in: the bytes are those of JAX's own
    linearisation (`rj.residuals`), the FLOPs those of the traced step.
    """

    def __init__(self, sizes: Sizes, blocks: type) -> None:
        self.job = workload(sizes, blocks)
        self.described = describe(self.job, "cpu", rates=IN_FLOPS, working=0.0)
        outside = rj.residuals(self.job, "full").device_bytes - modelled_bytes(self.described, "full")[0]
        # All that counts here is what is kept between the passes: not what comes and goes while a block runs again.
        still = [dataclasses.replace(one, recomputed_share=0.0) for one in self.described.stack.blocks]
        self.stack = dataclasses.replace(
            self.described.stack, blocks=tuple(still), fixed_bytes=float(max(0, outside)), link=None
        )
        self.step_flops = self._flops("everything")
        self._seen: dict[Any, tuple[int, int]] = {}

    def within(self, saved_bytes: int) -> tuple[int, int] | None:
        """Bytes kept and FLOPs computed again of the best plan that keeps no more; None where there is no such plan."""
        try:
            # A budget is positive; no residual is as small as a byte.
            plan = solver.solve(self.stack, max(1.0, float(saved_bytes)))
        except rj.errors.InfeasibleBudget:
            return None
        policy = self._policy(plan)
        if policy not in self._seen:
            self._seen[policy] = rj.residuals(self.job, policy).device_bytes, self._flops(policy) - self.step_flops
        return self._seen[policy]

    def _policy(self, plan: solver.StackPlan) -> Any:
        chosen = iter(plan.policies)
        found = []
        for kind, block in zip(self.described.kinds, self.described.stack.blocks, strict=True):
            found += [policy_of(kind, dataclasses.replace(next(chosen), block=block)) for _ in kind.layers]
        return found[0] if len(found) == 1 else rj.LayerPolicies.of(found)

    def _flops(self, policy: Any) -> int:
        step = self.job.step(policy)
        return flops(step.function, *step.arguments)


def of_torch(sizes: Sizes, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """PyTorch's rows, made in a process of its own.

    Raises:
        RuntimeError: it failed; the message is what it said last.
    """
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.torch_budgets", json.dumps(dataclasses.asdict(sizes))]
    done = subprocess.run([*command, *map(str, budgets)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"benchmarks.torch_budgets failed:\n{done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(name: str, sizes: Sizes, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """One row for each budget, of both frameworks."""
    theirs = of_torch(sizes, budgets)
    print(f"{name}: PyTorch is cut", file=sys.stderr, flush=True)
    whole, layers = Plans(sizes, Training), Plans(sizes, linen.DecoderLayer)
    found = []
    for one in theirs:
        row = {"setting": name, **one, "step_flops_jax": whole.step_flops}
        for form, plans in (("whole", whole), ("layers", layers)):
            kept = plans.within(one["saved_bytes"])
            row |= {form: None if kept is None else {"kept_bytes": kept[0], "again_flops": kept[1]}}
        found.append(row)
        print(f"{name}: budget {one['budget']}", file=sys.stderr, flush=True)
    return found


def holds(row: dict[str, Any]) -> bool:
    """Whether the plan of the whole loss keeps no more than PyTorch and computes no more again, in steps of equal FLOPs."""
    ours = row["whole"]
    equal = row["step_flops"] == row["step_flops_jax"]
    return equal and ours is not None and ours["kept_bytes"] <= row["saved_bytes"] and ours["again_flops"] <= row["again_flops"]


def table(found: Sequence[dict[str, Any]]) -> str:
    """The rows in plain text; FLOPs are shares of the step's."""
    lines = []
    for row in found:
        cells = [f"{row['setting']} {row['budget']:g}", format_bytes(row["saved_bytes"]), _share(row, row)]
        for form in ("whole", "layers"):
            ours = row[form]
            cells += ["none fits", ""] if ours is None else [format_bytes(ours["kept_bytes"]), _share(ours, row)]
        lines.append((*cells, "yes" if holds(row) else "NO"))
    return text_table(("budget", "saved", "again %", "plan keeps", "again %", "by layer", "again %", "holds"), lines)


def _share(one: dict[str, Any], row: dict[str, Any]) -> str:
    return f"{100 * one['again_flops'] / row['step_flops']:.2f}"


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
    """Cut, plan, print the table; 1 where a plan of the whole loss keeps more or computes more again."""
    options = parse(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    compat.keep_to_cpu_without_gpu()
    found: list[dict[str, Any]] = []
    for name in options.only or SETTINGS:
        found += rows(name, SETTINGS[name], options.budgets)
        write_json(options.output / "plan_torch.json", {"provenance": provenance(), "rows": found})
    print("FLOPs computed again, of the step's, at no more bytes than PyTorch saves for its budget:")
    print(table(found))
    lost = [row for row in found if not holds(row)]
    print(
        f"{len(lost)} of {len(found)} rows are lost." if lost else "At every budget no more is computed again than by PyTorch."
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
