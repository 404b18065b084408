"""Step times, taken in turn so that whatever else the machine does falls on all modes alike."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol

from .cases import Batch

# XLA takes the barriers of `jax.checkpoint` away on the CPU, and then merges what is computed again with what was computed
# before: an unrolled form would run no longer than plain, and save nothing. Without this pass it runs what it says.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
MOST_ROUNDS = 100
ENOUGH_SECONDS = 1.0


class Trainer(Protocol):
    """Something that makes a training step."""

    def step(self, batch: Batch) -> tuple[float, float]: ...


def relative_times(trainers: Mapping[str, Trainer], batches: Sequence[Batch], rounds: int) -> dict[str, float]:
    """The median step time of each mode, relative to that of `off`.

    Every round makes one step in every mode; the first round is not counted. Short steps, which scatter more, get more
    than `rounds`.
    """
    seconds: dict[str, list[float]] = {mode: [] for mode in trainers}
    for number in range(MOST_ROUNDS + 1):
        for mode, trainer in trainers.items():
            _, taken = trainer.step(batches[number % len(batches)])
            if number:
                seconds[mode].append(taken)
        if number >= rounds and sum(map(sum, seconds.values())) > ENOUGH_SECONDS:
            break
    plain = statistics.median(seconds["off"])
    return {mode: statistics.median(taken) / plain for mode, taken in seconds.items()}
