"""Activation checkpointing and host offload for Flax models: applied, measured, planned, and proven against PyTorch."""

from __future__ import annotations

from remat_jax import parity, porting
from remat_jax.apply.blocks import checkpoint_blocks
from remat_jax.apply.jax_policies import jax_policy
from remat_jax.apply.pytorch_style import checkpoint_sequential, gradient_checkpoint_forward
from remat_jax.apply.remat import remat
from remat_jax.apply.replan import replan
from remat_jax.apply.switch import disable_gradient_checkpointing, enable_gradient_checkpointing
from remat_jax.diagnosis import doctor
from remat_jax.errors import InfeasibleBudget, RematError
from remat_jax.memory import MemoryReport, measure, residuals
from remat_jax.overview import save_report
from remat_jax.planning import Plan, largest_batch, plan
from remat_jax.policy import LayerPolicies, Policy
from remat_jax.train import accumulate_gradients, offload_optimizer
from remat_jax.workload import Workload

__all__ = [
    "InfeasibleBudget",
    "LayerPolicies",
    "MemoryReport",
    "Plan",
    "Policy",
    "RematError",
    "Workload",
    "accumulate_gradients",
    "checkpoint_blocks",
    "checkpoint_sequential",
    "disable_gradient_checkpointing",
    "doctor",
    "enable_gradient_checkpointing",
    "gradient_checkpoint_forward",
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
