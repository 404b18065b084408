"""Changes beyond the blocks that a plan may make: one file each, with a function from a workload to the changed workload.

A change keeps what the step computes. To add one, write a file with a function `changed` that raises a `RematError` if the
workload cannot have the change, and with the name of the advice that proposes it, and add both to `CHANGES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from remat_jax.errors import ArgumentError
from remat_jax.planning.changes import head_in_chunks, micro_batches, optimizer_on_host
from remat_jax.workload import Workload


@dataclass(frozen=True)
class Change:
    """A change.

    Attributes:
      changed: the function that makes it.
      advice: the advice (`memory.advice`) that says what it frees; None if it is not proposed.
      most: how often it can be made.
      in_blocks: whether it frees memory inside the blocks too. Then the estimate of what it frees outside is the difference of
        the two planning problems, not the advice.
    """

    changed: Callable[[Workload], Workload]
    advice: str | None
    most: int = 1
    in_blocks: bool = False


CHANGES = {
    "head_in_chunks": Change(head_in_chunks.changed, head_in_chunks.ADVICE),
    "micro_batches": Change(micro_batches.changed, micro_batches.ADVICE, most=3, in_blocks=True),
    **{
        f"micro_batches={word}": Change(functools.partial(micro_batches.changed, declared=word), None, most=3)
        for word in ("sum", "mean")
    },
    "optimizer_on_host": Change(optimizer_on_host.changed, optimizer_on_host.ADVICE),
}


def checked(allow: Iterable[str]) -> tuple[str, ...]:
    """The words of `allow`, each once.

    Raises:
      ArgumentError: a word is not a change, or two words say different things of micro-batches.

    >>> checked(["head_in_chunks"])
    ('head_in_chunks',)
    """
    words = (allow,) if isinstance(allow, str) else tuple(allow)
    unknown = [word for word in words if word not in CHANGES]
    if unknown:
        raise ArgumentError(f"allow={allow!r}: {unknown[0]!r} is not a change; expected some of {', '.join(CHANGES)}")
    words = tuple(dict.fromkeys(words))
    if len(forms := [word for word in words if word.startswith("micro_batches")]) > 1:
        raise ArgumentError(
            f"allow={allow!r}: expected one of {' and '.join(forms)}: the loss is a sum, or a mean, or is shown to be one"
        )
    return words
