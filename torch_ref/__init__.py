"""The PyTorch reference: correct gradient checkpointing and host offload, and measurements of their cost.

`gradient_checkpoint_forward` runs a block in one of three modes: off, checkpoint, offload. `selective_checkpoint` runs
a block under any policy of `remat_jax`, `checkpoint_blocks` applies policies to a finished model, and `shard_blocks` adds
FSDP2. `faithful` holds DiffSynth-Studio's version of `gradient_checkpoint_forward`. The other functions measure: `receipt`
the bytes that an offload moved, `saved_for_backward` the bytes that the graph holds after the forward pass,
`count_matmuls` and `count_calls` the executions, and `peak_bytes` the memory of a training step on fake tensors.
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
from torch_ref.models import (
    ByteDecoder,
    DecoderLayer,
    DecoderStack,
    DeepMLP,
    ExplicitMultiheadAttention,
    JointDecoder,
    JointLayer,
    MlpLayer,
    Observation,
    Pi0,
    Pi0Config,
    Pi0Layer,
    SiglipLayer,
    SiglipTower,
    ToyModel,
)
from torch_ref.modes import MODES, mode_flags, mode_of
from torch_ref.offload import OffloadFunction
from torch_ref.peak import PeakBytes, TrainingStep, peak_bytes
from torch_ref.policy import Policy
from torch_ref.receipts import CallEntry, Receipt, receipt
from torch_ref.saved import SavedBytes, SavedEntry, saved_for_backward
from torch_ref.segment_costs import SegmentCost, deep_mlp_cost
from torch_ref.segments import (
    checkpoint_segments,
    decreasing_boundaries,
    kept_activations,
    most_activations,
    optimal_segments,
    recomputed_layers,
    sqrt_segments,
    uniform_boundaries,
)
from torch_ref.selective import selective_checkpoint
from torch_ref.sharded import ShardedModel, shard_blocks
from torch_ref.switch import gradient_checkpointing_disable, gradient_checkpointing_enable, is_gradient_checkpointing
from torch_ref.train import HybridOptimizer, accumulate_gradients, accumulated_step, micro_batches

__all__ = [
    "MODES",
    "AppliedPolicies",
    "ByteDecoder",
    "CallCount",
    "CallEntry",
    "ChangedRecomputationError",
    "DecoderLayer",
    "DecoderStack",
    "DeepMLP",
    "Diagnosis",
    "ExplicitMultiheadAttention",
    "FakeTensorStepError",
    "Finding",
    "HybridOptimizer",
    "InvalidArgumentError",
    "JointDecoder",
    "JointLayer",
    "Matmul",
    "MatmulCount",
    "MlpLayer",
    "MutatedTensorError",
    "NoEffectError",
    "NothingToOffloadError",
    "Observation",
    "OffloadFunction",
    "PeakBytes",
    "Pi0",
    "Pi0Config",
    "Pi0Layer",
    "Policy",
    "PolicyError",
    "ReboundVariableError",
    "Receipt",
    "SavedBytes",
    "SavedEntry",
    "SegmentCost",
    "ShardedModel",
    "SiglipLayer",
    "SiglipTower",
    "TorchRefError",
    "ToyModel",
    "TrainingStep",
    "accumulate_gradients",
    "accumulated_step",
    "checkpoint_blocks",
    "checkpoint_segments",
    "count_calls",
    "count_matmuls",
    "decreasing_boundaries",
    "deep_mlp_cost",
    "doctor",
    "faithful",
    "gradient_checkpoint_forward",
    "gradient_checkpointing_disable",
    "gradient_checkpointing_enable",
    "is_gradient_checkpointing",
    "kept_activations",
    "micro_batches",
    "mode_flags",
    "mode_of",
    "most_activations",
    "optimal_segments",
    "peak_bytes",
    "AllocatedBytes",
    "allocated_bytes",
    "receipt",
    "recomputed_layers",
    "saved_for_backward",
    "selective_checkpoint",
    "shard_blocks",
    "sqrt_segments",
    "uniform_boundaries",
]
