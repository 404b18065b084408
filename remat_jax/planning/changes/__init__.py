"""Changes beyond the blocks that a plan may make: one file each, with a `Change`.

To add one, write a file with a subclass of `Change`, and add it to `CHANGES`. `head_in_chunks.py` is an example.
"""

from __future__ import annotations

from collections.abc import Iterable

from remat_jax.errors import ArgumentError
from remat_jax.planning.changes import head_in_chunks, micro_batches, optimizer_on_host
from remat_jax.planning.changes.change import Change

CHANGES: dict[str, Change] = {
    "head_in_chunks": head_in_chunks.CHANGE,
    "micro_batches": micro_batches.CHANGE,
    **{f"micro_batches={word}": change for word, change in micro_batches.DECLARED.items()},
    "optimizer_on_host": optimizer_on_host.CHANGE,
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
