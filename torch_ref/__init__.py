"""The PyTorch reference: gradient checkpointing and host offload as a port should do them, and what they cost.

`gradient_checkpoint_forward` runs a block in one of three modes: off, checkpoint, offload. `faithful` holds the same
function as DiffSynth-Studio has it. The rest measures: `receipt` what an offload moved, `saved_for_backward` what the
graph holds after the forward pass, `count_matmuls` and `count_calls` what is executed, `peak_bytes` the memory of a
training step, on fake tensors.
"""

from __future__ import annotations

from torch_ref import faithful
from torch_ref.checkpoint import gradient_checkpoint_forward
from torch_ref.errors import (
    FakeTensorStepError,
    InvalidArgumentError,
    MutatedTensorError,
    NothingToOffloadError,
    ReboundVariableError,
    TorchRefError,
)
from torch_ref.executions import CallCount, Matmul, MatmulCount, count_calls, count_matmuls
from torch_ref.models import ByteDecoder, DecoderLayer, DecoderStack, ExplicitMultiheadAttention, ToyModel
from torch_ref.modes import MODES, mode_flags, mode_of
from torch_ref.peak import PeakBytes, TrainingStep, peak_bytes
from torch_ref.receipts import CallEntry, Receipt, receipt
from torch_ref.saved import SavedBytes, SavedEntry, saved_for_backward

__all__ = [
    "MODES",
    "ByteDecoder",
    "CallCount",
    "CallEntry",
    "DecoderLayer",
    "DecoderStack",
    "ExplicitMultiheadAttention",
    "FakeTensorStepError",
    "InvalidArgumentError",
    "Matmul",
    "MatmulCount",
    "MutatedTensorError",
    "NothingToOffloadError",
    "PeakBytes",
    "Receipt",
    "ReboundVariableError",
    "SavedBytes",
    "SavedEntry",
    "ToyModel",
    "TorchRefError",
    "TrainingStep",
    "count_calls",
    "count_matmuls",
    "faithful",
    "gradient_checkpoint_forward",
    "mode_flags",
    "mode_of",
    "peak_bytes",
    "receipt",
    "saved_for_backward",
]
