"""Other projects' code as it behaves, including its faults, to compare a port with.

`openpi`: OpenPI's switch. `pi0`: OpenPI's whole π0 under that switch. `offload_function`: the `OffloadFunction` of
tutorials. `deep_mlp`: a tutorial's experiment on a deep perceptron. `accumulate`: a tutorial's accumulation loop.
DiffSynth-Studio's `gradient_checkpoint_forward` is `torch_ref.faithful`.
"""

from __future__ import annotations

from . import accumulate, deep_mlp
from .offload_function import OffloadDecoder, OffloadFunction
from .openpi import Pi0, prepare_for_training
from .pi0 import PI0Pytorch

__all__ = [
    "OffloadDecoder",
    "OffloadFunction",
    "PI0Pytorch",
    "Pi0",
    "accumulate",
    "deep_mlp",
    "prepare_for_training",
]
