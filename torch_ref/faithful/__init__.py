"""What other projects' code does, quirks included: one module for each of them, to compare a port with.

`diffsynth`: DiffSynth-Studio's `gradient_checkpoint_forward`.
"""

from __future__ import annotations

from torch_ref.faithful.diffsynth import gradient_checkpoint_forward

__all__ = ["gradient_checkpoint_forward"]
