"""The comparison: one model trained in both frameworks, in every mode, from the same weights on real text.

`run` trains, measures and judges; `tables` and `reading` show the results. `remat-jax demo` is its command line.
"""

from __future__ import annotations

from ..pictures import memory_picture
from .driver import run
from .outcome import Check, Outcome, Row
from .setting import FULL, QUICK, Setting
from .show import LEGEND, reading, tables

__all__ = ["FULL", "LEGEND", "QUICK", "Check", "Outcome", "Row", "Setting", "memory_picture", "reading", "run", "tables"]
