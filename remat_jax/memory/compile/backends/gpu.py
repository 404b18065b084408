"""NVIDIA GPUs, which need not be present: XLA:GPU compiles for a described GPU (`Target.compiler_description`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.core.nested_offload import refuse_nested_offload
from remat_jax.errors import CompileError, TargetError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile.backends.backend import (
    NESTED_OFFLOAD,
    Answers,
    Backend,
    LimitOption,
    RefusedOffload,
    without_accelerator,
)
from remat_jax.memory.compile.backends.xla_files import XlaFiles, modelled_time
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.options import (
    GRAPHS,
    NEVER_RUN,
    OPTION,
    Kernels,
    is_about_kernels,
    kernel_options,
    limit_options,
    toolkit_options,
)
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.hlo.copies import starts_slice_copies
from remat_jax.memory.hlo.slots import scanned_offload_is_miscompiled
from remat_jax.memory.step_time.collectives import read_collectives


class GpuBackend(Backend):
    """XLA:GPU, from JAX's CUDA plugin."""

    platform = "cuda"
    has_gpu_flags = True
    limit_option = LimitOption(OPTION, 100)
    chooses_kernels_on_device = True

    def require(self, target: Target) -> None:
        """The CUDA plugin and the target's compiler description are required."""
        if target.compiler_description is None:
            raise TargetError(
                f"target={target.name!r} has no compiler description, so XLA cannot compile for it: add a table "
                f"[{target.name}.compiler] to its file, and its source under [{target.name}.source]; targets.toml of remat_jax "
                "shows the form"
            )
        compat.require_gpu_compiler()

    def environment(self, target: Target) -> dict[str, str]:
        """The plugin loads without cuDNN, and no kernel is timed."""
        return without_accelerator(**compat.GPU_COMPILER_ENVIRONMENT, XLA_FLAGS=compat.xla_flags(compat.GPU_COMPILER_FLAGS))

    def topology(self, target: Target) -> dict[str, Any] | None:
        """Hosts of described GPUs."""
        topology = f"1x{target.hosts}x{target.devices // target.hosts}"
        return {"platform": "cuda", "target_config": target.compiler_description, "topology": topology}

    def check_program(self, jaxpr: ClosedJaxpr) -> None:
        """XLA:GPU cannot compile offload in a scan inside another scan."""
        refuse_nested_offload(jaxpr)

    def refused_offload(self, *, scanned: bool, nested: bool, devices: int) -> RefusedOffload | None:
        """Offload in a scan inside another scan, and with some versions of JAX in any scan."""
        if scanned and compat.miscompiles_scanned_offload():
            reason = f"JAX {jax.__version__} miscompiles offload inside scan"
            return RefusedOffload(
                reason,
                f"{reason} for GPUs (openxla/xla#46231), so scanned layers offload nothing here; use "
                f"{compat.SCANNED_OFFLOAD_REMEDY}",
            )
        return NESTED_OFFLOAD if nested else None

    def attention_kernel(self, *, needs: str = "", cudnn_refuses: str = "") -> str:
        """cuDNN's kernel, which takes only some dtypes and sizes, or JAX's in Pallas."""
        if not needs and not cudnn_refuses:
            cudnn = 'jax.nn.dot_product_attention(q, k, v, implementation="cudnn")'
            return f"{cudnn}, or another kernel that never stores the scores"
        kernel = super().attention_kernel(needs=needs)
        if needs:
            return f"{kernel}; cuDNN's does not"
        mha = "jax.experimental.pallas.ops.gpu.attention.mha (with causal masks and segment ids only"
        return f"{kernel}, such as {mha}; pad lengths above 128 to a multiple of 128); cuDNN's does not take {cudnn_refuses}"

    def entry(self, folder: Path) -> dict[str, Any]:
        """XLA's dump, and the final text of a program that uses host memory."""
        files = XlaFiles(folder)
        return {"compiler_options": NEVER_RUN | files.options, "host_text": str(files.compiled_text)}

    def call_options(self, folder: Path) -> dict[str, Any]:
        """A substitute for the CUDA toolkit."""
        return toolkit_options(folder / "toolkit")

    def ask(self, asked: Callable[[Mapping[str, Any]], Answers], kernels: Kernels) -> Answers:
        """Compile with the kernels of earlier programs; without them if XLA refuses their file."""
        file = kernels.take()
        try:
            answers = asked(kernel_options(file))
        except CompileError as error:
            if not is_about_kernels(error):
                raise
            return asked({})
        kernels.give_back(file)
        return answers

    def limit_options(self, limit: int | None, target: Target, held_bytes: int) -> dict[str, int]:
        """A share of the memory that XLA:GPU takes as available (`options.py`)."""
        return limit_options(limit, target, held_bytes)

    def read(self, answer: Mapping[str, Any], folder: Path, program: ExportedProgram, target: Target) -> Sizes:
        """The sizes of `memory_analysis`; buffers and time from XLA's dump, or from the final text if there are host copies.

        Buffers and time are unknown if their files cannot be read. The time is also unknown if the target lacks a needed rate.
        """
        files = XlaFiles(folder)
        module, final = files.optimised("gpu_after_optimizations.txt"), files.compiled()
        copies = files.compiled_text.exists()
        played, miscompiled = (final, None) if copies else (module, False)
        if final is not None:
            with contextlib.suppress(UnsupportedError):
                miscompiled = scanned_offload_is_miscompiled(final)
        time, no_time = modelled_time(played, target, program)
        # If XLA_FLAGS has the option `GRAPHS`, the user's choice is kept.
        slices = final is not None and GRAPHS not in compat.xla_flags() and starts_slice_copies(final)
        live, timeline = files.live(module, program)
        return Sizes(
            **answer["sizes"],
            live=live,
            timeline=timeline,
            time=time,
            no_time=no_time,
            miscompiled=miscompiled,
            collectives=read_collectives(module) if module is not None and program.mesh else None,
            untiled=answer["untiled"],
            starts_slice_copies=slices,
        )
