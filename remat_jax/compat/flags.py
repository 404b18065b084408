"""The flags that a process of XLA's gets from its environment, as XLA reads them: once, when it starts."""

from __future__ import annotations

import os
import re

from remat_jax.errors import CompileError
from remat_jax.reading import read_limited

MOST_BYTES = 2**16
"""An environment variable may hold little more."""

_DISABLED_PASSES = re.compile(r"(?<!\S)--xla_disable_hlo_passes=(\S*)")


def xla_flags(*more: str) -> str:
    """What `XLA_FLAGS` says to a process that starts now, with `more` behind it.

    A value that does not begin with `-` is to XLA the name of a file with the flags. Nothing can be joined to that, so it is
    read here.

    Raises:
      CompileError: there is no such file, or it cannot be read.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if given and not given.lstrip(" \t\r\n").startswith("-"):
        given = _content(given)
    return " ".join(one for one in (given.strip(), *more) if one)


def disabled_passes() -> tuple[str, ...]:
    """The passes that XLA leaves out in a process that starts now; where the flag is given twice, those of both.

    Raises:
      CompileError: as `xla_flags` raises it.
    """
    given = _DISABLED_PASSES.findall(xla_flags())
    return tuple(one for names in given for one in names.strip("'\"").split(",") if one)


def _content(path: str) -> str:
    try:
        content = read_limited(path, MOST_BYTES)
        if b"\0" in content:
            raise ValueError("it has a null byte")
    except (OSError, ValueError) as error:
        raise CompileError(
            f"XLA_FLAGS={path[:200]!r} does not begin with '-', so that XLA takes it for the name of a file with flags, which "
            f"cannot be read ({error}): name a file that is there, give flags that begin with '-', or unset it"
        ) from None
    return os.fsdecode(content)
