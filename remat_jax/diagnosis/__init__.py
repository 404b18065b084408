"""`doctor`: traces a training step, compiles it where a GPU is named, and says which known mistakes are in it.

`watch` sees what there is; the other modules judge it, one function for each trap.
"""

from __future__ import annotations

from remat_jax.diagnosis.doctor import doctor
from remat_jax.diagnosis.findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "doctor"]
