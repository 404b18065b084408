"""`doctor` runs a model once, records its checkpointed regions, and reports known mistakes in them.

`watch` records the regions, and `traps` has a function for each known mistake.
`Finding` repeats the fields of `remat_jax`'s class on purpose: `torch_ref` imports nothing of `remat_jax`.
"""

from __future__ import annotations

from torch_ref.diagnosis.doctor import Diagnosis, doctor
from torch_ref.diagnosis.traps import Finding

__all__ = ["Diagnosis", "Finding", "doctor"]
