"""The named policies that are applicable, `off` among them."""

from __future__ import annotations

from collections.abc import Iterable

from remat_jax.planning.candidate import StepCandidate
from remat_jax.planning.known import Known


def propose(known: Known) -> Iterable[StepCandidate]:
    """All of them, whatever is known."""
    return known.named
