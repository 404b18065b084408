"""Measurements in JAX: gradients, training, executions, residuals and compiled memory under a policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from remat_jax import residuals
from remat_jax.cost.count import count
from remat_jax.parity.compiling import compile_options

from .cases import Batch, Case
from .outcome import Evidence
from .setting import Asked, Form

# On the CPU XLA removes the barriers of `jax.checkpoint` and merges the recomputation with the forward pass: an unrolled form
# would save nothing. With this compiler pass disabled, the step runs as written.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


class JaxTrainer:
    """The training of a case under one policy: the workload's own step, compiled once, its arguments donated."""

    def __init__(self, case: Case, form: Form, policy: str) -> None:
        self.job = case.jax_job(form, "float32")
        step = self.job.workload.step(policy)
        self.traced = jax.jit(step.function, donate_argnums=step.donate_argnums).trace(*step.arguments)
        self.compiled = self.traced.lower().compile(compiler_options=KEEP_BARRIERS)
        # Copies, because the step may overwrite its arguments.
        self.params = jax.tree.map(jnp.array, self.job.params)
        self.state = case.optimizer().init(self.params)

    def step(self, batch: Batch) -> float:
        """The loss before the update."""
        arrays = jax.tree.map(jnp.asarray, (*self.job.extra, *batch))
        self.params, self.state, loss = self.compiled(self.params, self.state, {}, *arrays)
        return float(loss)

    def cpu_bytes(self) -> int:
        """The memory of the step that trains: arguments + outputs − aliased + temp."""
        sizes = self.compiled.memory_analysis()
        held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return int(held + sizes.temp_size_in_bytes)


def measure(case: Case, form: Form, asked: Asked, trainer: JaxTrainer) -> Evidence:
    """Train with `trainer` and measure everything except the memory on the target."""
    kept = residuals(trainer.job.workload, asked.policy)
    return Evidence(
        framework=form.framework,
        model=case.name,
        mode=asked.mode,
        losses=tuple(trainer.step(batch) for batch in case.batches()),
        gradients64=gradients(case, form, asked.policy, "float64"),
        gradients32=gradients(case, form, asked.policy, "float32"),
        block_executions=count(trainer.traced.jaxpr, case.begins_block),
        expected_executions=asked.block_runs * case.layers,
        offloads=asked.offloads,
        residual_device_bytes=kept.device_bytes,
        residual_host_bytes=kept.host_bytes,
        # For unrolled layers the memory on a CPU has no meaning, because XLA's CPU scheduler ignores memory.
        peak_bytes={"torch": None, "cpu": trainer.cpu_bytes() if form.scan else None, "h200": None},
    )


def gradients(case: Case, form: Form, policy: str, dtype: str) -> dict[str, np.ndarray]:
    """The gradients of the first batch at the initial weights, the whole computation in `dtype`, under PyTorch's names."""
    with jax.enable_x64(dtype == "float64"):
        job = case.jax_job(form, dtype)
        loss = job.workload.with_policy(job.workload.loss, policy)
        batch = tuple(x if x.dtype.kind == "i" else x.astype(dtype) for x in case.batches()[0])
        gradient = jax.jit(jax.grad(loss), compiler_options=compile_options(dtype))(job.params, *job.extra, *batch)
        return job.to_torch(gradient)
