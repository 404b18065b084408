"""A training step, exported for the process that compiles it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExportedProgram:
    """A training step, exported for a platform; the caller chooses `key`.

    Attributes:
      blob: the serialised program. Its arguments are the step's arrays, flattened.
      donated: the positions of the arguments whose buffers the program may reuse.
      arguments: the name of each argument.
      mesh: the axes of the program's mesh with their sizes; empty for a single device.
      kernels: pairs (name of a Pallas kernel, floating-point operations of one call), in the order of the names.
      held_bytes: the bytes on one device of the arguments, and of the results that reuse no argument's buffer.
    """

    key: str
    blob: bytes
    donated: tuple[int, ...]
    arguments: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...] = ()
    held_bytes: int = 0
    kernels: tuple[tuple[str, float], ...] = ()
