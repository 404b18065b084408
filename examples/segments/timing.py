"""Step times, measured alternately, so that other work on the machine affects all modes alike."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

MOST_ROUNDS = 100
ENOUGH_SECONDS = 1.0


class Trainer(Protocol):
    """An object that runs a training step."""

    def step(self, batch: tuple[Any, ...]) -> tuple[float, float]: ...


def relative_times(trainers: Mapping[str, Trainer], batches: Sequence[tuple[Any, ...]], rounds: int) -> dict[str, float]:
    """The median step time of each mode, relative to that of `off`.

    Every round makes one step in every mode; the first round is not counted. Short steps vary more, so they get
    more than `rounds` rounds.
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
