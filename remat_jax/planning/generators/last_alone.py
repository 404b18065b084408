"""The best step with the last layer of its scans alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from remat_jax.planning.candidate import StepCandidate
from remat_jax.planning.known import Known

_SAVED_SHARE = 0.25
"""How much of a layer's time a scan of its own may save. XLA inlines a loop of one iteration: nothing of the layer is stacked,
and its backward pass follows its forward pass at once. In compiled steps of eight layers this saved 1 to 29 % of a layer's time
(`docs/notes/cutting_a_scan.md`)."""


def propose(known: Known) -> Iterable[StepCandidate]:
    """If layers are scanned, the best step with the last layer of each kind cut from its scan; the policies stay the same."""
    best = known.best
    if not known.scanned or best is None or best.candidate.choices is None or not best.candidate.is_plain:
        return []
    blocks = known.fit.guess.blocks
    last = dict(zip((stop - 1 for stop in accumulate(block.repeats for block in blocks)), blocks, strict=True))
    alone = known.recut(known.solved.make(best.candidate.choices), tuple(sorted({*best.candidate.cuts, *last})))
    inlined = [last[cut] for cut in alone.cuts if cut in last and cut not in best.candidate.cuts]
    saved = _SAVED_SHARE * sum(block.forward_seconds + block.backward_seconds for block in inlined)
    return [replace(alone, source="last_alone", near=best.candidate, doubt=saved)]
