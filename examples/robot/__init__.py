"""π0 trained on photographs: what `examples/pi0.py` runs."""

from __future__ import annotations
