"""How many checkpoints of a model's own give way to the policies of a workload's blocks."""

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
"""What tables call the step under the checkpoints of the model's own, where it has some around the blocks."""


def replaced_text(replaced: int) -> str:
    """The sentence of a report that says how many checkpoints of the model's own gave way.

    >>> replaced_text(1)
    "The policy takes the place of 1 checkpoint of the model's own around the blocks (a scanned one counts once)"
    """
    which = f"{replaced} {'checkpoint' if replaced == 1 else 'checkpoints'} of the model's own around the blocks"
    return f"The policy takes the place of {which} (a scanned one counts once)"


class OwnCheckpoints:
    """What becomes of a model's own checkpoints around its blocks, and how many there are.

    Attributes:
      choice: `"replace"` or `"keep"`, as for `checkpoint_blocks`.
    """

    def __init__(self, choice: str) -> None:
        self.keeps, self.choice = check_choice(choice), choice
        # None until it is counted.
        self._count: int | None = 0 if self.keeps else None

    def policies(self, policies: dict[Any, Any]) -> BlockPolicies:
        """Checked `policies` of blocks, with this choice."""
        return BlockPolicies.of(policies, keeps=self.keeps)

    def note(self, found: Record) -> None:
        """Remember whether checkpoints gave way in a call."""
        if found.replaced == 0 and self._count is None:
            self._count = 0
        elif found.replaced and not self._count:
            # A body that is traced twice is one checkpoint: they are counted when somebody asks.
            self._count = None

    def count(self, function: Callable[..., Any], blocks: Iterable[Block], arguments: tuple[Any, ...]) -> int:
        """How many give way when `function` runs its `blocks` under a policy; traced once, where it has to be."""
        if self._count is None:
            records: list[Record] = []
            kept = under_policies(function, BlockPolicies.of(dict.fromkeys(blocks, "full"), keeps=True), records.append)
            try:
                with silenced():
                    around = checkpoints_around_blocks(jax.make_jaxpr(kept)(*arguments))
                # Regions that are blocks themselves give way whatever stays around blocks.
                self._count = around + records[-1].replaced
            except RematError:
                # A block that is never called: whoever asks for a policy is told.
                self._count = 0
        return self._count
