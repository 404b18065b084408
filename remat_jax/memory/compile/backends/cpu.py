"""The CPU of this machine: sizes only, because XLA:CPU's schedule has no modelled time, and a CPU has one memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat_jax import compat
from remat_jax.hardware import Target
from remat_jax.memory.compile.backends.backend import Backend, without_accelerator
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.options import NEVER_RUN
from remat_jax.memory.compile.sizes import Sizes


class CpuBackend(Backend):
    """XLA:CPU, for as many virtual devices as the target has."""

    platform = "cpu"
    separate_host_memory = models_time = same_everywhere = False

    def require(self, target: Target) -> None:
        """Nothing is required: JAX always has its compiler for CPUs."""

    def environment(self, target: Target) -> dict[str, str]:
        """The number of virtual devices, if there are several."""
        if target.devices == 1:
            return without_accelerator()
        return without_accelerator(XLA_FLAGS=compat.xla_flags(f"--xla_force_host_platform_device_count={target.devices}"))

    def topology(self, target: Target) -> dict[str, Any] | None:
        """None: the devices are those of the compile process."""
        return None

    def entry(self, folder: Path) -> dict[str, Any]:
        """No code is optimised, because the program never runs."""
        return {"compiler_options": NEVER_RUN}

    def read(self, answer: Mapping[str, Any], folder: Path, program: ExportedProgram, target: Target) -> Sizes:
        """The sizes alone."""
        return Sizes(**answer["sizes"], no_time="not modelled for a CPU")
