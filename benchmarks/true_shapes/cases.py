"""The models at their published sizes, as they are trained on one card; shapes only, nothing is allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import remat_jax as rj
from examples import pi0_true, qwen_image, wan
from remat_jax import compat

NO_TRITON = "--xla_gpu_enable_triton_gemm=false"
NO_SLICE_ANNOTATOR = "--xla_disable_hlo_passes=dynamic-slice-annotator"
"""Without this pass JAX 0.10.2 and 0.11.0 compile offload in a scan correctly (openxla/xla#46231), so a plan may offload."""


@dataclass(frozen=True)
class Case:
    """A training step.

    Attributes:
      make: returns the workload.
      trained: which parameters have gradients and optimizer state, `all` or `adapters`.
      flags: flags for XLA with which the step is compiled.
    """

    make: Callable[[], rj.Workload]
    trained: str
    flags: str = ""


CASES = {
    "pi0": Case(pi0_true.job, "all", NO_TRITON),
    "qwen_image": Case(qwen_image.lora_job, "adapters"),
    "wan_480p": Case(wan.lora_job, "adapters"),
    "wan_720p": Case(wan.lora_job_720p, "adapters"),
    "qwen_image_edit": Case(qwen_image.edit_lora_job, "adapters"),
}


@contextmanager
def compiling(flags: str) -> Iterator[str]:
    """A context in which compilers get `flags`, and `NO_SLICE_ANNOTATOR` if scanned offload needs it; yields all flags."""
    before = os.environ.get("XLA_FLAGS")
    wanted = [before or "", flags, NO_SLICE_ANNOTATOR if compat.miscompiles_scanned_offload() else ""]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, wanted))
    try:
        yield os.environ["XLA_FLAGS"]
    finally:
        del os.environ["XLA_FLAGS"]
        if before is not None:
            os.environ["XLA_FLAGS"] = before
