"""Counts the model's own checkpoints that the policies of a workload's blocks replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from remat_jax.apply.blocks import under_policies
from remat_jax.apply.own_checkpoints import check_choice
from remat_jax.apply.scope import BlockPolicies, Record
from remat_jax.core.marks import Block
from remat_jax.core.walk import checkpoints_around_blocks
from remat_jax.errors import RematError
from remat_jax.warning import silenced

AS_WRITTEN = "as written"
"""The name of the table row for the step under the model's own checkpoints around the blocks."""


def replaced_text(replaced: int) -> str:
    """The sentence of a report about the model's own checkpoints that were replaced.

    >>> replaced_text(1)
    "The policy replaces 1 of the model's own checkpoints around the blocks (a scanned checkpoint counts once)"
    """
    return f"The policy replaces {replaced} of the model's own checkpoints around the blocks (a scanned checkpoint counts once)"


class OwnCheckpoints:
    """Counts a model's own checkpoints around its blocks. `choice` is the `own_checkpoints` of `checkpoint_blocks`."""

    def __init__(self, choice: str) -> None:
        self.keeps, self.choice = check_choice(choice), choice
        # None: not counted yet.
        self._count: int | None = 0 if self.keeps else None

    def policies(self, policies: dict[Any, Any]) -> BlockPolicies:
        """`policies` (block → policy), checked, with the choice about the model's own checkpoints."""
        return BlockPolicies.of(policies, keeps=self.keeps)

    def note(self, record: Record) -> None:
        """Remember whether checkpoints were replaced in a call."""
        if record.replaced == 0 and self._count is None:
            self._count = 0
        elif record.replaced and not self._count:
            # `record.replaced` counts a body twice if it is traced twice. So `count` has to count the regions.
            self._count = None

    def count(self, function: Callable[..., Any], blocks: Iterable[Block], arguments: tuple[Any, ...]) -> int:
        """How many checkpoints a policy on the `blocks` of `function` replaces. `function` is traced at most once."""
        if self._count is None:
            records: list[Record] = []
            kept = under_policies(function, BlockPolicies.of(dict.fromkeys(blocks, "full"), keeps=True), records.append)
            try:
                with silenced():
                    around = checkpoints_around_blocks(jax.make_jaxpr(kept)(*arguments))
                # Regions that are blocks themselves are replaced even under "keep".
                self._count = around + records[-1].replaced
            except RematError:
                # A block is never called. Applying a policy raises this error later.
                self._count = 0
        return self._count
