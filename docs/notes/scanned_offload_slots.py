"""Whether the installed JAX compiles offload inside `scan` right for GPUs (openxla/xla#46231); no GPU is needed.

Run: `python docs/notes/scanned_offload_slots.py`, once with each JAX (`pip install jax==0.11.0 jax-cuda13-plugin==0.11.0 …`).
"""

from __future__ import annotations

import os
from typing import Any

# Set before JAX starts. This process uses no GPU and no cached answers of the compiler.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["REMAT_JAX_CACHE"] = "off"

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from remat_jax.hardware import target
from remat_jax.memory.compile.compiler import compile_programs, export_step

LAYERS, ROWS, WIDTH = 8, 8192, 256
CURE = "--xla_disable_hlo_passes=dynamic-slice-annotator"
POLICIES = ("offload_inputs", "offload_dot_with_no_batch_dims")
ANSWERS = {True: "another slot", False: "right", None: "cannot be followed"}


class Block(nn.Module):
    """A residual MLP block."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """One block."""
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(4 * WIDTH, name="up")(x)))


class Model(nn.Module):
    """The blocks under `scan`, or one after the other."""

    scan: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """All blocks."""
        if not self.scan:
            for index in range(LAYERS):
                x = Block(name=f"block_{index}")(x)
            return x
        one = nn.scan(
            lambda block, x, _: (block(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return one(Block(name="layers"), x, None)[0]


def workload(scan: bool) -> rj.Workload:
    """A training step; its arrays are shapes only."""
    model, x = Model(scan), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return rj.Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), Block, optimizer=optax.adam(1e-3))


def main() -> None:
    """Print one row for each form, policy and state of the pass."""
    given, h200 = os.environ.get("XLA_FLAGS", ""), target("h200")
    print("| JAX | form | policy | pass | copies | device MB | host MB |\n| --- | --- | --- | --- | --- | --- | --- |")
    for switched_off in (False, True):
        os.environ["XLA_FLAGS"] = f"{given} {CURE}".strip() if switched_off else given
        jobs = {(form, policy): workload(form == "scan") for form in ("scan", "unrolled") for policy in POLICIES}
        programs = [export_step("/".join(key), job.step(key[1]), h200) for key, job in jobs.items()]
        for key, sizes in compile_programs(programs, h200, timeout=600).items():
            form, policy = key.split("/")
            cells = (jax.__version__, form, policy, "off" if switched_off else "on", ANSWERS[sizes.miscompiled])
            print("|", " | ".join(cells), f"| {sizes.device / 1e6:.1f} | {sizes.host / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
