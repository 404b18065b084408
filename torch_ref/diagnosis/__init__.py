"""`doctor`: run a model once, observe its checkpointed regions, and report their mistakes.

`watch` observes the regions, and `traps` judges them with a function for each known mistake.
`Finding` has the fields of `remat_jax`'s, written again on purpose: `torch_ref` imports nothing of `remat_jax`.
"""

from __future__ import annotations

from torch_ref.diagnosis.doctor import Diagnosis, doctor
from torch_ref.diagnosis.traps import Finding

__all__ = ["Diagnosis", "Finding", "doctor"]
