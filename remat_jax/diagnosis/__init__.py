"""`doctor`: traces a training step, compiles it where a GPU is named, and says which known mistakes are in it.

`watch` sees what there is; the other modules judge it, one function for each trap. `environment` says what the machine and its
packages are, which no trap of a step is about.
"""

from __future__ import annotations

from remat_jax.diagnosis.doctor import doctor
from remat_jax.diagnosis.environment import Environment, environment
from remat_jax.diagnosis.findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Environment", "Finding", "doctor", "environment"]
