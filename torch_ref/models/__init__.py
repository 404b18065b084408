"""The PyTorch versions of the models on which the frameworks are compared.

All dtypes follow the parameters: after `.double()` a model computes in float64 throughout.
"""

from __future__ import annotations

from torch_ref.models.decoder import ByteDecoder, DecoderLayer, DecoderStack, ExplicitMultiheadAttention
from torch_ref.models.deep_mlp import DeepMLP, MlpLayer
from torch_ref.models.joint import JointDecoder, JointLayer
from torch_ref.models.pi0 import Pi0, Pi0Layer
from torch_ref.models.pi0_config import Observation, Pi0Config
from torch_ref.models.siglip import SiglipLayer, SiglipTower
from torch_ref.models.toy import ToyModel

__all__ = [
    "ByteDecoder",
    "DecoderLayer",
    "DecoderStack",
    "DeepMLP",
    "ExplicitMultiheadAttention",
    "JointDecoder",
    "JointLayer",
    "MlpLayer",
    "Observation",
    "Pi0",
    "Pi0Config",
    "Pi0Layer",
    "SiglipLayer",
    "SiglipTower",
    "ToyModel",
]
