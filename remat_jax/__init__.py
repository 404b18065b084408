"""Applies, measures and plans activation checkpointing and host offload for Flax models, and proves parity with PyTorch.

Eight names do most of it:

    plan                the fastest step that fits a memory budget, a `Plan`
    measure             the memory and the time of a step under a `Policy`, compiled for a GPU or TPU
    doctor              what a step really keeps, recomputes and offloads, and what is wrong
    checkpoint_blocks   a loss or a step whose blocks are under a policy
    remat               one function under a policy
    Workload            a loss, its parameters and its batch: what the first three ask for
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

from remat_jax.hardware import find_attached_with, quiet_without_gpu, quiet_without_tpu

if TYPE_CHECKING:
    # Import each name from its own module: where a function and a module share a name, a type checker may see the module.
    from remat_jax import parity, porting
    from remat_jax.apply.blocks import checkpoint_blocks
    from remat_jax.apply.jax_policies import jax_policy
    from remat_jax.apply.pytorch_style import checkpoint_sequential, gradient_checkpoint_forward
    from remat_jax.apply.pytrees import block
    from remat_jax.apply.remat import remat
    from remat_jax.apply.replan import replan
    from remat_jax.apply.switch import disable_gradient_checkpointing, enable_gradient_checkpointing
    from remat_jax.diagnosis.doctor import doctor
    from remat_jax.errors import InfeasibleBudget, RematError
    from remat_jax.memory.measure import measure
    from remat_jax.memory.report import MemoryReport
    from remat_jax.memory.residuals import residuals
    from remat_jax.overview import save_report
    from remat_jax.planning.batch import largest_batch
    from remat_jax.planning.batches import batches
    from remat_jax.planning.make_plan import plan
    from remat_jax.planning.plan import Plan
    from remat_jax.policy import LayerPolicies, Policy
    from remat_jax.train import accumulate_gradients, in_chunks, offload_optimizer
    from remat_jax.warning import RematWarning
    from remat_jax.workload import Workload

    __version__: str

__all__ = [
    "InfeasibleBudget",
    "LayerPolicies",
    "MemoryReport",
    "Plan",
    "Policy",
    "RematError",
    "RematWarning",
    "Workload",
    "accumulate_gradients",
    "batches",
    "block",
    "checkpoint_blocks",
    "checkpoint_sequential",
    "disable_gradient_checkpointing",
    "doctor",
    "enable_gradient_checkpointing",
    "gradient_checkpoint_forward",
    "in_chunks",
    "jax_policy",
    "largest_batch",
    "measure",
    "offload_optimizer",
    "parity",
    "plan",
    "porting",
    "remat",
    "replan",
    "residuals",
    "save_report",
]

# The module of each name. It is imported when the name is first used: all modules together import slower than JAX itself.
_HOMES = {
    "apply.blocks": ("checkpoint_blocks",),
    "apply.jax_policies": ("jax_policy",),
    "apply.pytrees": ("block",),
    "apply.pytorch_style": ("checkpoint_sequential", "gradient_checkpoint_forward"),
    "apply.remat": ("remat",),
    "apply.replan": ("replan",),
    "apply.switch": ("disable_gradient_checkpointing", "enable_gradient_checkpointing"),
    "diagnosis.doctor": ("doctor",),
    "errors": ("InfeasibleBudget", "RematError"),
    "memory.measure": ("measure",),
    "memory.report": ("MemoryReport",),
    "memory.residuals": ("residuals",),
    "overview": ("save_report",),
    "planning.batch": ("largest_batch",),
    "planning.batches": ("batches",),
    "planning.make_plan": ("plan",),
    "planning.plan": ("Plan",),
    "policy": ("LayerPolicies", "Policy"),
    "warning": ("RematWarning",),
    "train": ("accumulate_gradients", "in_chunks", "offload_optimizer"),
    "workload": ("Workload",),
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        value = _version()
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _version() -> str:
    """The installed version, or a placeholder if the package is not installed."""
    try:
        return importlib.metadata.version(__name__)
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def _attached_device_kind() -> str:
    from remat_jax.memory.compile.devices import device_kind

    return device_kind()


# `hardware` does not import JAX, so it gets the function that asks JAX for the attached GPU.
find_attached_with(_attached_device_kind)

# Importing this package does not start JAX's backends, so this setting still takes effect.
quiet_without_gpu()
quiet_without_tpu()
