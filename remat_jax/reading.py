"""Reading a file that somebody else may have made."""

from __future__ import annotations

import os
from pathlib import Path


def read_limited(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file of at most `most` bytes: a pipe could go on for ever, and a large file fill the memory.

    Raises:
      ValueError: it is no regular file, or has more bytes; or `path` cannot be one, as with a null byte.
      OSError: there is none, or it cannot be read.
      TypeError: `path` is none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_text("four")
    ...     read_limited(f"{folder}/a", 4)
    b'four'
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError("it is no regular file")
    with Path(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content
