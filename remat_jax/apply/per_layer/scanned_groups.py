"""Groups of layers under a scan: finding the iterations of each group, and a scan over groups, each a scan in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from remat_jax.apply.per_layer.groups import Groups, run_group, torn
from remat_jax.apply.per_layer.positions import Positions
from remat_jax.core.marks import Block, name_of
from remat_jax.errors import UnsupportedError
from remat_jax.policy import LayerPolicies

_CROSSED = (
    "block={block}: rounds {start} to {last} of a scan are one group of layers, but the policies or groups of another block "
    "change between these rounds. Give both blocks groups of the same rounds."
)


class RoundGroups:
    """The groups of layers in a scan, by its iterations.

    Attributes:
      whole: iteration → the first iteration of its group and the iteration after the last, for groups of several iterations.
      parts: iteration → the groups inside it, as positions in the iteration.
      groups: the groups of several iterations, by first iteration and iteration after the last.

    Raises:
      UnsupportedError: a group begins or ends inside an iteration, or groups of several blocks have different iterations.
    """

    def __init__(
        self, rounds: int, at: Positions, each: Mapping[Block, int], policies: Mapping[Block, Any], outer: Groups
    ) -> None:
        self.whole: dict[int, tuple[int, int]] = {}
        self.parts: dict[int, list[tuple[str, int, int]]] = {}
        self.groups: dict[tuple[int, int], set[tuple[Block, range]]] = {}
        for block, policy in policies.items():
            number, first = each.get(block, 0), at.get(block, 0)
            for group in policy.groups if number and isinstance(policy, LayerPolicies) else ():
                low, high = group[0] - first, group[1] - first
                if (block, range(*group)) in outer or high <= 0 or low >= rounds * number:
                    continue
                if low < 0 or high > rounds * number:
                    raise torn(block, range(*group))
                self._add(block, range(*group), low, high, number)

    def _add(self, block: Block, group: range, low: int, high: int, number: int) -> None:
        start, end = low // number, -(-high // number)
        if end - start == 1:
            self.parts.setdefault(start, []).append((name_of(block), low - start * number, high - start * number))
            return
        if low % number or high % number:
            raise torn(block, group)
        if any(self.whole.get(index, (start, end)) != (start, end) for index in range(start, end)):
            raise UnsupportedError(_CROSSED.format(block=name_of(block), start=start, last=end - 1))
        self.whole |= dict.fromkeys(range(start, end), (start, end))
        self.groups.setdefault((start, end), set()).add((block, group))

    def like(self, index: int) -> Any:
        """A key, equal for iterations that are in groups of the same length and have the same groups inside."""
        start, end = self.whole.get(index, (0, 0))
        return end - start, sorted(self.parts.get(index, ()))

    def of(self, first: int, end: int) -> tuple[int | None, Groups]:
        """How many iterations each group of a segment has (None without groups), and the groups.

        Raises:
          UnsupportedError: the segment begins or ends inside a group, because another block's policy changes there.
        """
        if first not in self.whole:
            return None, frozenset()
        starts = {self.whole[index] for index in range(first, end)}
        if min(starts)[0] != first or max(starts)[1] != end:
            raise UnsupportedError(
                _CROSSED.format(block="of the scan", start=self.whole[first][0], last=self.whole[first][1] - 1)
            )
        length = self.whole[first][1] - self.whole[first][0]
        return length, frozenset(group for span in starts for group in self.groups[span])


def scan_of_groups(
    one_round: Any, carry: list[Any], stacks: list[Any], length: int, apart: bool, options: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """A scan over groups of `length` iterations, each a scan in a checkpoint: the final carry, and the stacked outputs.

    Args:
      stacks: the scanned operands, with the indices first.
      apart: whether each pass has its own loop around the scan.
    """
    number, size = stacks[0].shape[0] // length, len(carry)

    def rounds(*values: Any) -> list[Any]:
        index, *slices = values[size:]
        carried, out = jax.lax.scan(one_round, list(values[:size]), (index, slices), length=length, **options)
        return [*carried, *out]

    def one_group(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = run_group(rounds, [*carry, *rows], looped=True, apart=apart or number > 1)
        return outputs[:size], outputs[size:]

    if number == 1:
        return one_group(carry, stacks)
    divided = [stack.reshape(number, length, *stack.shape[1:]) for stack in stacks]
    carry, out = jax.lax.scan(one_group, carry, divided, length=number, reverse=options["reverse"])
    return carry, [one.reshape(number * length, *one.shape[2:]) for one in out]
