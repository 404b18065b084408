"""What the examples need in PyTorch: the twins of the Flax models, parts of a training loop, and segments of layers.

All dtypes of the models follow the parameters: after `.double()` a model computes in float64 throughout. `faithful` has
other projects' code with its faults. Nothing here imports JAX.
"""

from __future__ import annotations

from ..pi0_sizes import Observation, Pi0Config
from .accumulate import accumulate_gradients, accumulated_step, micro_batches
from .decoder import ByteDecoder, DecoderLayer, DecoderStack, ExplicitMultiheadAttention, ToyModel
from .deep_mlp import DeepMLP, MlpLayer
from .hybrid import HybridOptimizer
from .joint import JointDecoder, JointLayer
from .pi0 import Pi0, Pi0Layer
from .segment_costs import SegmentCost, deep_mlp_cost
from .segments import (
    checkpoint_segments,
    decreasing_boundaries,
    kept_activations,
    most_activations,
    optimal_segments,
    recomputed_layers,
    sqrt_segments,
    uniform_boundaries,
)
from .siglip import SiglipLayer, SiglipTower

__all__ = [
    "ByteDecoder",
    "DecoderLayer",
    "DecoderStack",
    "DeepMLP",
    "ExplicitMultiheadAttention",
    "HybridOptimizer",
    "JointDecoder",
    "JointLayer",
    "MlpLayer",
    "Observation",
    "Pi0",
    "Pi0Config",
    "Pi0Layer",
    "SegmentCost",
    "SiglipLayer",
    "SiglipTower",
    "ToyModel",
    "accumulate_gradients",
    "accumulated_step",
    "checkpoint_segments",
    "decreasing_boundaries",
    "deep_mlp_cost",
    "kept_activations",
    "micro_batches",
    "most_activations",
    "optimal_segments",
    "recomputed_layers",
    "sqrt_segments",
    "uniform_boundaries",
]
