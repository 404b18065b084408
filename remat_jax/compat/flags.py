"""XLA's flags: the flags that a process reads from its environment when it starts, and options for quick compilation."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import jax

from remat_jax.errors import CompileError
from remat_jax.reading import read_limited

MOST_BYTES = 2**16
"""The largest flag file to read; an environment variable cannot be much longer."""

_DISABLED_PASSES = re.compile(r"(?<!\S)--xla_disable_hlo_passes=(\S*)")


def xla_flags(*more: str) -> str:
    """`XLA_FLAGS` for a process that starts now, followed by `more`.

    XLA takes a value that does not begin with `-` for the name of a file with flags, which is read here, since nothing can be
    appended to a name. Raises CompileError if the file cannot be read.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if given and not given.lstrip(" \t\r\n").startswith("-"):
        given = _content(given)
    return " ".join(filter(None, (given.strip(), *more)))


def disabled_passes() -> tuple[str, ...]:
    """The passes that XLA omits in a process that starts now; two flags add up. Raises CompileError as `xla_flags`."""
    lists = _DISABLED_PASSES.findall(xla_flags())
    return tuple(name for names in lists for name in names.strip("'\"").split(",") if name)


_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


@functools.cache
def quick_compile_options() -> dict[str, Any]:
    """Compiler options for programs that run a few times on a CPU, about five times quicker to compile; else none.

    Options that this XLA does not know are omitted.
    """
    options: dict[str, Any] = {}
    for name, value in _QUICK.items() if jax.default_backend() == "cpu" else ():
        try:
            jax.jit(lambda: 1).lower().compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
        else:
            options[name] = value
    return options


def _content(path: str) -> str:
    try:
        content = read_limited(path, MOST_BYTES)
        if b"\0" in content:
            raise ValueError("it has a null byte")
    except (OSError, ValueError) as error:
        raise CompileError(
            f"XLA_FLAGS={path[:200]!r} does not begin with '-', so XLA reads it as the name of a file with flags, and this "
            f"file cannot be read ({error}): name an existing file, give flags that begin with '-', or unset it"
        ) from None
    return os.fsdecode(content)
