"""XLA's flags: those that a process gets from its environment as it starts, and those by which it compiles quickly."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import jax

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


_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


@functools.cache
def quick_compile_options() -> dict[str, Any]:
    """Compiler options for what runs a few times on a processor: about five times quicker to compile, and slower code.

    Only those that this XLA knows; none where JAX runs on something else.
    """
    found: dict[str, Any] = {}
    for name, value in _QUICK.items() if jax.default_backend() == "cpu" else ():
        try:
            jax.jit(lambda: 1).lower().compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
        else:
            found[name] = value
    return found


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
