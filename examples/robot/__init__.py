"""Trains π0 on photographs; `examples/pi0.py` runs it."""

from __future__ import annotations
