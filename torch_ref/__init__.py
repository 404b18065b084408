"""The PyTorch reference: correct gradient checkpointing and host offload, and measurements of their cost.

`gradient_checkpoint_forward` runs a block in one of three modes: off, checkpoint, offload. `selective_checkpoint` runs
a block under any policy of `remat_jax`, `checkpoint_blocks` applies policies to a finished model, and `shard_blocks` adds
FSDP2. `faithful` has DiffSynth-Studio's version of `gradient_checkpoint_forward`. `doctor` reports known mistakes.

Other functions measure. `receipt` counts the bytes that an offload moved, and `saved_for_backward` the bytes that the graph
keeps after the forward pass. `count_matmuls` and `count_calls` count executed matmuls and block calls. `peak_bytes` predicts
the peak memory of a training step on fake tensors; `allocated_bytes` measures it on a GPU.
"""

from __future__ import annotations

from torch_ref import faithful
from torch_ref.allocated import AllocatedBytes, allocated_bytes
from torch_ref.blocks import AppliedPolicies, checkpoint_blocks
from torch_ref.checkpoint import gradient_checkpoint_forward
from torch_ref.diagnosis import Diagnosis, Finding, doctor
from torch_ref.errors import (
    ChangedRecomputationError,
    FakeTensorStepError,
    InvalidArgumentError,
    MutatedTensorError,
    NoEffectError,
    NothingToOffloadError,
    PolicyError,
    ReboundVariableError,
    TorchRefError,
)
from torch_ref.executions import CallCount, Matmul, MatmulCount, count_calls, count_matmuls
from torch_ref.modes import MODES, mode_flags, mode_of
from torch_ref.offload import OffloadFunction
from torch_ref.peak import PeakBytes, TrainingStep, peak_bytes
from torch_ref.policy import Policy
from torch_ref.receipts import CallEntry, Receipt, receipt
from torch_ref.saved import SavedBytes, SavedEntry, saved_for_backward
from torch_ref.selective import selective_checkpoint
from torch_ref.sharded import ShardedModel, shard_blocks
from torch_ref.switch import gradient_checkpointing_disable, gradient_checkpointing_enable, is_gradient_checkpointing

__all__ = [
    "MODES",
    "AppliedPolicies",
    "CallCount",
    "CallEntry",
    "ChangedRecomputationError",
    "Diagnosis",
    "FakeTensorStepError",
    "Finding",
    "InvalidArgumentError",
    "Matmul",
    "MatmulCount",
    "MutatedTensorError",
    "NoEffectError",
    "NothingToOffloadError",
    "OffloadFunction",
    "PeakBytes",
    "Policy",
    "PolicyError",
    "ReboundVariableError",
    "Receipt",
    "SavedBytes",
    "SavedEntry",
    "ShardedModel",
    "TorchRefError",
    "TrainingStep",
    "checkpoint_blocks",
    "count_calls",
    "count_matmuls",
    "doctor",
    "faithful",
    "gradient_checkpoint_forward",
    "gradient_checkpointing_disable",
    "gradient_checkpointing_enable",
    "is_gradient_checkpointing",
    "mode_flags",
    "mode_of",
    "peak_bytes",
    "AllocatedBytes",
    "allocated_bytes",
    "receipt",
    "saved_for_backward",
    "selective_checkpoint",
    "shard_blocks",
]
