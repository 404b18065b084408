"""The two tables of `chain.solve_chain`: the least memory for a part of a chain, and the least time.

A part runs from stage ``first`` to stage ``last``; the loss is the stage behind the last. Its input is counted by whoever asks
for the part, and of what comes from behind only the cotangent of its output is there. A part is either cut (run forward to a
checkpoint, do what is behind it, then what is before it) or its first stage is kept under one of its options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tests.solver_oracles.chain_problem import Chain, Option

State = tuple[int, int]
"""Slots of host memory and of device memory that a part may use; `Least` ignores the second."""


@dataclass(frozen=True)
class Cut:
    """Keep the input of stage ``at``."""

    at: int


@dataclass(frozen=True)
class Keep:
    """Keep the first stage under the option of this index."""

    option: int


class Sizes:
    """The numbers of a chain, stages counted from 1, with the input before and the loss after them."""

    def __init__(self, chain: Chain) -> None:
        self.stages = len(chain.stages)
        self.output = [chain.input_bytes, *(stage.output_bytes for stage in chain.stages), 0.0]
        self.forward = [0.0, *(stage.forward_seconds for stage in chain.stages), 0.0]
        self.options: list[tuple[Option, ...]] = [(), *(stage.options for stage in chain.stages)]
        self.host = [[option.host_bytes for option in options] for options in self.options]
        self._link = chain.link

    def cost(self, option: Option) -> float:
        """The seconds of both passes under an option, with the copies that its own compute does not hide."""
        seconds = option.forward_seconds + option.backward_seconds
        if self._link is None or not option.host_bytes:
            return seconds
        out = self._link.exposed_out(option.host_bytes, option.forward_seconds)
        return seconds + out + self._link.exposed_in(option.host_bytes, option.backward_seconds)

    def all_sizes(self) -> list[float]:
        """All sizes of device memory except the input's."""
        sizes = self.output[1:]
        for options in self.options:
            sizes += [size for option in options for size in (option.kept_bytes, option.forward_bytes, option.backward_bytes)]
        return sizes

    def everything(self) -> float:
        """The most memory that any part can use besides its input."""
        kept = sum(max(option.kept_bytes for option in options) for options in self.options[1:])
        beside = max(max(option.forward_bytes, option.backward_bytes) for options in self.options[1:] for option in options)
        return kept + beside + 2 * max(self.output[1:])


class Least:
    """The least device memory of every part, by its available host memory; exact sizes."""

    def __init__(self, sizes: Sizes, host_slots: list[list[int]], rows: int) -> None:
        import numpy as np

        self.sizes, self.host_slots, self.rows = sizes, host_slots, rows
        end = sizes.stages + 1
        self.table = np.full((end + 2, end + 2, rows), np.inf)
        self.table[end, end] = 0.0
        for number in range(1, end + 1):
            self.table[number, number - 1] = 0.0
        for length in range(end):
            for first in range(1, end - length + 1):
                last = first + length
                if first < end:
                    ways = [way for _, way in self._ways(first, last)]
                    self.table[first, last] = np.min(ways, axis=0)

    def need(self) -> float:
        """The least device memory of the whole chain."""
        return float(self.table[1, self.sizes.stages + 1, self.rows - 1])

    def _ways(self, first: int, last: int) -> list[tuple[Cut | Keep, Any]]:
        import numpy as np

        output, ways, passing = self.sizes.output, list[tuple[Cut | Keep, Any]](), 0.0
        for at in range(first + 1, last + 1):
            passing = max(passing, output[last] + output[at - 1] + (output[at - 2] if at - 2 >= first else 0.0))
            behind, before = output[at - 1] + self.table[at, last], self.table[first, at - 1]
            ways.append((Cut(at), np.maximum(np.maximum(passing, behind), before)))
        for index, option in enumerate(self.sizes.options[first]):
            itself = max(output[last] + option.forward_bytes, output[first] + option.backward_bytes)
            behind = shifted(
                self.table[first + 1, last] if first < last else np.zeros(self.rows), self.host_slots[first][index]
            )
            ways.append((Keep(index), option.kept_bytes + np.maximum(itself, behind)))
        return ways

    def decide(self, first: int, last: int, state: State) -> tuple[Cut | Keep, Any]:
        """The choice with the least memory, and the states of its parts."""
        step, _ = min(self._ways(first, last), key=lambda way: way[1][state[0]])
        if isinstance(step, Cut):
            return step, (state, state)
        return step, (state[0] - self.host_slots[first][step.option], 0)


class Fastest:
    """The least time of every part, by its slots of host and device memory."""

    def __init__(self, sizes: Sizes, host_slots: list[list[int]], rows: int, unit: float, most: int) -> None:
        import numpy as np

        self.sizes, self.host_slots, self.rows = sizes, host_slots, rows
        self.output = [math.ceil(size / unit) for size in sizes.output]
        self.options = [
            [
                tuple(math.ceil(size / unit) for size in (option.kept_bytes, option.forward_bytes, option.backward_bytes))
                for option in options
            ]
            for options in sizes.options
        ]
        self.ladder = np.arange(most + 1)
        end = sizes.stages + 1
        self.table = np.full((end + 2, end + 2, rows, most + 1), np.inf)
        # The same by last and first stage, shifted by the input of the first stage: a cut pays for the part after it.
        self.behind = np.full_like(self.table, np.inf)
        self.table[end, end] = 0.0
        self._finish(end, end)
        for length in range(end):
            for first in range(1, end - length + 1):
                if first < end:
                    self._fill(first, first + length)

    def seconds(self, slots: int) -> float:
        """The least time of the whole chain; infinite if it does not fit."""
        return float(self.table[1, self.sizes.stages + 1, self.rows - 1, slots]) if slots >= 0 else math.inf

    def _finish(self, first: int, last: int) -> None:
        self.behind[last, first] = shifted(self.table[first, last], self.output[first - 1])

    def _fill(self, first: int, last: int) -> None:
        import numpy as np

        ways = [self._keep(first, last, index) for index in range(len(self.options[first]))]
        if first < last:
            ways.append(self._cuts(first, last).min(axis=0))
        self.table[first, last] = np.min(ways, axis=0)
        self._finish(first, last)

    def _cuts(self, first: int, last: int) -> Any:
        """The time of each cut, the first at stage ``first`` + 1."""
        import numpy as np

        output = np.asarray(self.output)
        sources = np.concatenate(([0], output[first : last - 1]))
        passing = output[last] + np.maximum.accumulate(output[first:last] + sources)
        seconds = np.cumsum(self.sizes.forward[first:last])
        total = seconds[:, None, None] + self.behind[last, first + 1 : last + 1] + self.table[first, first:last]
        return np.where(self.ladder >= passing[:, None, None], total, np.inf)

    def _keep(self, first: int, last: int, index: int) -> Any:
        import numpy as np

        kept, forward, backward = self.options[first][index]
        inside = self.table[first + 1, last] if first < last else np.zeros((self.rows, self.ladder.size))
        moved = shifted(np.swapaxes(shifted(inside, kept), 0, 1), self.host_slots[first][index]).swapaxes(0, 1)
        need = kept + max(self.output[last] + forward, self.output[first] + backward)
        return np.where(self.ladder >= need, moved + self.sizes.cost(self.sizes.options[first][index]), np.inf)

    def decide(self, first: int, last: int, state: State) -> tuple[Cut | Keep, Any]:
        """The choice with the least time, and the states of its parts."""
        host, room = state
        kept = [float(self._keep(first, last, index)[host, room]) for index in range(len(self.options[first]))]
        best = min(range(len(kept)), key=kept.__getitem__)
        if first < last:
            cuts = self._cuts(first, last)[:, host, room]
            at = int(cuts.argmin())
            if cuts[at] < kept[best]:
                return Cut(first + 1 + at), ((host, room - self.output[first + at]), state)
        return Keep(best), (host - self.host_slots[first][best], room - self.options[first][best][0])


def shifted(table: Any, by: int) -> Any:
    """An array shifted up its last axis by ``by`` places; the new lowest places are infinite.

    >>> import numpy as np
    >>> shifted(np.array([3.0, 2.0, 1.0]), 1)
    array([inf,  3.,  2.])
    """
    import numpy as np

    moved = np.full_like(table, np.inf)
    if by < table.shape[-1]:
        moved[..., by:] = table[..., : table.shape[-1] - by]
    return moved
