"""`doctor`: trace a training step, compile it if a GPU is named, and report its known mistakes.

`watch` observes the step; the other modules judge it with a function for each trap. `environment` describes the machine and
its packages.
"""

from __future__ import annotations

from remat_jax.diagnosis.doctor import doctor
from remat_jax.diagnosis.environment import Environment, environment
from remat_jax.diagnosis.findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Environment", "Finding", "doctor", "environment"]
