"""Where candidates come from: one file per source, each with a function from what is known to proposals.

To add a way to save memory, write a file with a `propose` function and add the function to `GENERATORS`. The loop
(`planning/loop.py`) compiles a proposal if it may fit and may be faster than the best step so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remat_jax.planning.candidate import StepCandidate
from remat_jax.planning.generators import as_written, groups, last_alone, memory_limit, mix, more, named, without_host
from remat_jax.planning.known import Known

Generator = Callable[[Known], Iterable[StepCandidate]]
"""Proposes candidates; those that are compiled already are passed over."""

# Of equal proposals the first is taken: a variant of a compiled step knows that step's pace.
GENERATORS: dict[str, Generator] = {
    "named": named.propose,
    "as_written": as_written.propose,
    "more": more.propose,
    "without_host": without_host.propose,
    "last_alone": last_alone.propose,
    "mix": mix.propose,
    "groups": groups.propose,
    "memory_limit": memory_limit.propose,
}
