"""The behaviour of other projects' code, including its quirks, to compare a port with.

`diffsynth`: DiffSynth-Studio's `gradient_checkpoint_forward`. `openpi`: OpenPI's switch. `pi0`: OpenPI's whole π0 under
that switch. `offload_function`: the `OffloadFunction` of tutorials. `deep_mlp`: a tutorial's experiment on a deep
perceptron. `accumulate`: a tutorial's accumulation loop.
"""

from __future__ import annotations

from torch_ref.faithful import accumulate, deep_mlp
from torch_ref.faithful.diffsynth import gradient_checkpoint_forward
from torch_ref.faithful.offload_function import OffloadDecoder, OffloadFunction
from torch_ref.faithful.openpi import Pi0, prepare_for_training
from torch_ref.faithful.pi0 import PI0Pytorch

__all__ = [
    "OffloadDecoder",
    "OffloadFunction",
    "PI0Pytorch",
    "Pi0",
    "accumulate",
    "deep_mlp",
    "gradient_checkpoint_forward",
    "prepare_for_training",
]
