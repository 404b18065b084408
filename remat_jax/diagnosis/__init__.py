"""`doctor` traces a training step, compiles it if a GPU or TPU is named, and reports known traps in it.

`watch` records the step's checkpointed regions; `policies`, `structure` and `compiled` have a function for each trap.
`environment` describes the machine and its packages.
"""

from __future__ import annotations

from remat_jax.diagnosis.doctor import doctor
from remat_jax.diagnosis.environment import Environment, environment
from remat_jax.diagnosis.findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Environment", "Finding", "doctor", "environment"]
