"""Folders for a compilation's files: removed with the compilation, or, after a kill, when the next one starts."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from remat_jax.errors import CompileError

try:
    import fcntl
except ImportError:  # on Windows nothing is swept
    fcntl = None  # type: ignore[assignment]

_PREFIX, _LOCK = "remat_jax_compile_", "held"
_NEW, _OLD = 2.0, 24 * 3600.0
"""Seconds in which a folder may not be locked yet, and seconds after which a folder without a lock is a leftover."""
_FULL = {one: os.strerror(one) for one in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)}


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A new folder in the temporary folder.

    Raises:
      CompileError: the temporary folder is full.
    """
    _sweep(tempfile.gettempdir())
    try:
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, open(Path(folder, _LOCK), "w") as held:
            if fcntl:
                fcntl.flock(held, fcntl.LOCK_EX)
            yield Path(folder)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CompileError(f"the program to compile cannot be written ({error}){full_disk(str(error))}") from error


def full_disk(output: str) -> str:
    """The remedy for a full disk, as the end of a message; empty if `said` reports another error."""
    if not any(word in output for word in _FULL.values()):
        return ""
    where = tempfile.gettempdir()
    return (
        f". The temporary folder {where!r} is full, or its files may not be this large (ulimit -f): name another folder in "
        "TMPDIR"
    )


@functools.cache
def _sweep(parent: str) -> None:
    """Remove the folders of ended processes, whose locks nobody holds."""
    for folder in Path(parent).glob(f"{_PREFIX}*") if fcntl else ():
        with contextlib.suppress(OSError):
            # The owner was killed before it made the lock, or while it removed the folder.
            if not (folder / _LOCK).exists() and time.time() - folder.stat().st_mtime > _OLD:
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError), open(folder / _LOCK, "r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - folder.stat().st_mtime > _NEW:
                shutil.rmtree(folder, ignore_errors=True)
