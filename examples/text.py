"""Real text to train on: the source of the Python standard library, found on every machine that has Python."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Modules that are a single source file in every Python from 3.11 on.
MODULES = (
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "difflib",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "inspect",
    "ipaddress",
    "mailbox",
    "optparse",
    "pickle",
    "random",
    "shutil",
    "statistics",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "traceback",
    "typing",
    "uuid",
)


@functools.cache
def corpus(modules: tuple[str, ...] = MODULES, folder: Path | None = None) -> np.ndarray:
    """Return the bytes of the modules' source, joined in sorted order: uint8, 1.6 MB, the same on every call.

    `folder` is the standard library unless given. Modules that the folder does not have are left out.

    Raises:
        FileNotFoundError: when the folder has none of the modules, as in a Python whose standard library is zipped.

    >>> corpus(("textwrap",))[:16].tobytes()
    b'\"\"\"Text wrapping'
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    found = [path for path in (folder / f"{name}.py" for name in sorted(modules)) if path.is_file()]
    if not found:
        raise FileNotFoundError(
            f"none of {len(modules)} modules (the first is {min(modules, default=None)!r}) has its source in {folder}: "
            "use a Python whose standard library is installed as .py files, or give `folder`"
        )
    joined = np.frombuffer(b"\n".join(path.read_bytes() for path in found), np.uint8)
    joined.flags.writeable = False
    return joined


def batches(
    seed: int | Sequence[int], batch: int, length: int, steps: int, data: Sequence[int] | np.ndarray | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `steps` batches (tokens, targets), each int32 of shape (batch, length); a target is the byte that follows.

    Windows start at random places drawn from `seed`, and may overlap. `data` defaults to `corpus()`.

    Raises:
        ValueError: when the data is not longer than `length`.

    >>> tokens, targets = batches(seed=0, batch=2, length=8, steps=3)[0]
    >>> tokens.shape, bool((tokens[:, 1:] == targets[:, :-1]).all())
    ((2, 8), True)
    """
    data = corpus() if data is None else np.asarray(data)
    if len(data) <= length:
        raise ValueError(f"data has {len(data)} bytes, expected more than length={length}: give more text or less length")
    starts = np.random.default_rng(seed).integers(0, len(data) - length, (steps, batch, 1))
    windows = data[starts + np.arange(length + 1)].astype(np.int32)
    return [(window[:, :-1].copy(), window[:, 1:].copy()) for window in windows]
