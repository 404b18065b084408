"""`doctor`: runs a model once, watches its checkpointed regions, and says what is wrong with them.

`watch` sees what happens, `traps` judges it, one function for each known mistake.
"""

from __future__ import annotations

from torch_ref.diagnosis.doctor import Diagnosis, doctor
from torch_ref.diagnosis.traps import Finding

__all__ = ["Diagnosis", "Finding", "doctor"]
