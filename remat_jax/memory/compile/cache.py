"""Caches compiled results in memory and, for GPU and TPU targets, on disk. The key hashes everything that a result depends on.

The folder is `remat_jax` in the user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`). The environment variable
`REMAT_JAX_CACHE` names another folder; `off` disables the cache on disk. CPU results depend on the machine, so they are not on
disk. A checksum detects damaged files but not forged files, so a folder that other users may write to causes a `RematWarning`
and is not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from remat_jax import compat
from remat_jax.hardware import Target
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.process import ENVIRONMENT
from remat_jax.reading import from_plain, read_limited
from remat_jax.warning import warn

VARIABLE = "REMAT_JAX_CACHE"
MOST_FILES = 1000
"""The largest number of files; the oldest are removed first. A file has 10 kB, or 1 MB for the largest unrolled models."""

MOST_BYTES = 256 * 2**20
"""Files with more bytes are not read, because they cannot be from this cache."""

_OFF = ("off", "0", "no", "false", "none", "disable", "disabled")
_REMEDY = f"Name another folder in {VARIABLE}, or 'off'"
_PACKAGES = ("jax", "nvidia", "libtpu")
_memory: dict[str, Any] = {}
Kept = TypeVar("Kept")


def digest(program: ExportedProgram, target: Target, options: dict[str, Any], child: Path) -> str:
    """A hash of everything that the compiled result depends on."""
    content = {
        "donated": program.donated,
        "arguments": program.arguments,
        "kernels": program.kernels,
        "mesh": program.mesh,
        "options": options,
        "target": target.to_dict() | {"name": "", "attached": False, "host_memory_bytes": None},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)},
        "flags": compat.xla_flags(),  # XLA_FLAGS may name a file of flags
        "packages": _packages(),
        "sources": _sources(child),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode() + program.blob).hexdigest()


def read(key: str, target: Target, kind: type[Kept]) -> Kept | None:
    """The value of type `kind` cached under `key`; None if there is none, or if its file is damaged."""
    if key not in _memory and (folder := _folder(target)) is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            checksum, text = read_limited(folder / f"{key}.json", MOST_BYTES).decode("utf-8").split("\n", 1)
            if checksum == hashlib.sha256(text.encode()).hexdigest():
                _memory[key] = from_plain(kind, json.loads(text))
    return _memory.get(key)


def write(key: str, target: Target, value: Any) -> None:
    """Cache a dataclass or plain data; warn if the folder cannot be written."""
    _memory[key] = value
    folder = _folder(target)
    if folder is None:
        return
    text = json.dumps(value, default=dataclasses.asdict)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            new = Path(temporary, "new")
            new.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}", encoding="utf-8")
            os.replace(new, folder / f"{key}.json")  # atomic: a reader sees the whole file or none
        files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for oldest in files[:-MOST_FILES]:
            oldest.unlink(missing_ok=True)
    except OSError as error:
        warn(
            f"{VARIABLE}: the folder {str(folder)!r} cannot be written ({error.strerror}): nothing is cached on disk. {_REMEDY}"
        )


def forget() -> None:
    """Clear the cache in memory, not the files on disk."""
    _memory.clear()


def _folder(target: Target) -> Path | None:
    asked = os.environ.get(VARIABLE, "").strip()
    if not backend_of(target).same_everywhere or asked.lower() in _OFF:
        return None
    try:
        folder = Path(asked or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "remat_jax")).expanduser()
    except RuntimeError:  # a user without a home folder, as in a container
        warn(f"{VARIABLE}={asked!r}: there is no such home folder: nothing is cached on disk. {_REMEDY}" if asked else None)
        return None
    if others := _of_others(folder):
        warn(f"{VARIABLE}: other users may write to the folder {str(others)!r}, so {str(folder)!r} is not used. {_REMEDY}")
        return None
    return folder


def _of_others(folder: Path) -> Path | None:
    """The first of `folder` and its parents in which other users could replace files; None if there is none."""
    if os.name != "posix":
        return None
    paths = dict.fromkeys([folder, *folder.absolute().parents, *folder.resolve().parents])
    return next((path for path in paths if _is_others(path, sticky=path != folder)), None)


def _is_others(folder: Path, *, sticky: bool) -> bool:
    """Whether another user owns or may write a folder.

    With `sticky`, a folder with the sticky bit (`/tmp`) counts as not writable: users can replace only their own files in it.
    """
    try:
        status = folder.stat()
    except OSError:
        return False
    writers = 0o002 if _is_private(status.st_gid) else 0o022
    open_to_others = bool(status.st_mode & writers) and not (sticky and status.st_mode & stat.S_ISVTX)
    return status.st_uid not in (0, os.getuid()) or open_to_others


def _is_private(group: int) -> bool:
    """Whether a group has this user as its only member: it has the user's name and lists nobody else."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group)
    except KeyError:  # in a container, the user or the group may have no name
        return group == os.getgid() == os.getuid()
    return entry.gr_name == user and set(entry.gr_mem) <= {user}


@functools.cache
def _packages() -> dict[str, str]:
    """The versions of JAX, of its plugins and of the libraries of NVIDIA and of TPUs."""
    versions = {str(package.metadata["Name"]): package.version for package in importlib.metadata.distributions()}
    return {name: version for name, version in sorted(versions.items()) if name.lower().startswith(_PACKAGES)}


@functools.cache
def _sources(child: Path) -> str:
    """A hash of the code that computes results from the compiler's output: the child's script, and two packages."""
    package = Path(__file__).parents[2]
    paths = [child, *sorted([*(package / "memory").rglob("*.py"), *(package / "hardware").rglob("*.py")])]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
