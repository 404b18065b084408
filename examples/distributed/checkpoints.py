"""Checkpoints that survive a kill, damage, and a change of mesh, by orbax.

A checkpoint is written beside its final place and renamed when it is complete, so a kill leaves the previous one intact. It
includes the training's setting and a checksum of every array. The checksum is a sum of integers, the same on every mesh, so it
can be verified on any mesh. It is needed because orbax reads a flipped bit as another number.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.options import MultiprocessingOptions

from remat_jax.compat import is_on_host
from remat_jax.errors import ArgumentError, RematError

from .processes import all_agree
from .setting import differences

Tell = Callable[[str], None]
_LATE = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Seconds between checks for a file that another host writes."""


class CheckpointError(RematError, RuntimeError):
    """Raised if there are checkpoints but none can be read."""


class Checkpoints:
    """The checkpoints of one training in a folder that all processes see.

    Args:
      folder: the folder, which is made if it does not exist.
      setting: what `Setting.told()` returns; a checkpoint of another setting is refused.
      keep: the number of newest checkpoints that are kept.
      wait: whether `save` waits until the checkpoint is written; if not, it waits only for the copy to host memory.

    Raises:
      ArgumentError: the folder cannot be made, or is not the same in all processes.
    """

    def __init__(self, folder: Path, setting: Mapping[str, Any], keep: int, wait: bool) -> None:
        self._folder, self._setting = folder.absolute(), dict(setting)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=not wait, cleanup_tmp_directories=True
        )
        _check_folder(folder)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def save(self, step: int, state: Any) -> None:
        """Save the state before step number `step`."""
        about: dict[str, Any] = {"setting": self._setting, "checksums": checksums(state)}
        about["digest"] = _digest(about)
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about))
        self._manager.save(step, args=saved, force=True)

    def restore(self, structs: Any, tell: Tell) -> tuple[int, Any] | None:
        """The newest readable state, sharded like `structs`, and its step; None if there are no checkpoints.

        `tell` receives a sentence about each unreadable checkpoint. Such checkpoints are
        renamed, because their steps are repeated.

        Raises:
          ArgumentError: the newest checkpoint whose description can be read is of another setting.
          CheckpointError: there are checkpoints, but none can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for position, step in enumerate(steps):
            why, state = self._read(step, structs)
            if not why:
                self._put_aside(steps[:position])
                return step, state
            tell(f"the checkpoint of step {step} cannot be read: {why}; going back to the one before it")
        if steps:
            raise CheckpointError(
                f"--checkpoint {self._folder}: none of the checkpoints of steps {', '.join(map(str, steps))} can be read; "
                "give another folder to begin anew"
            )
        return None

    def close(self) -> None:
        """Wait until all saved data is written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _read(self, step: int, structs: Any) -> tuple[str, Any]:
        """(why the checkpoint cannot be read, or "", and its state); either all processes have a reason, or none has."""
        path = self._folder / str(step)
        why, about = _attempt(path, about=ocp.args.JsonRestore())
        if not why:
            why = "" if _is_whole(about) else "what it says of itself is not what was saved"
        if not why:
            differing = differences(self._setting, about["setting"])
            if differing:
                raise ArgumentError(
                    f"--checkpoint {self._folder}: the checkpoint of step {step} is of another training "
                    f"({'; '.join(differing)}): start with its arguments, or give another folder"
                )
            why, state = _attempt(path, state=ocp.args.StandardRestore(structs))
        if why:
            return why, None
        found = checksums(state)
        wrong = [name for name, value in about["checksums"].items() if found.get(name) != value]
        return (f"{wrong[0]} and {len(wrong) - 1} other arrays are not what was saved" if wrong else ""), state

    def _put_aside(self, steps: list[int]) -> None:
        if steps and jax.process_index() == 0:
            for step in steps:
                (self._folder / str(step)).rename(_free(self._folder / f"{step}.damaged"))
        if steps and all_agree(True):  # no process goes on before they are renamed
            self._manager.reload()


def _check_folder(folder: Path) -> None:
    """Make the folder; refuse different folders in different processes: each would wait for files that are elsewhere."""
    token = int(multihost_utils.broadcast_one_to_all(np.array(secrets.randbits(31), np.int32)))
    file, why = folder.absolute() / f".process-0-was-here-{token}", ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            file.touch()
    except OSError as error:
        why = f"{error.strerror}; give a folder that can be written to"
    if not all_agree(not why):
        raise ArgumentError(f"--checkpoint {folder}: {why or 'another process cannot write to it'}")
    # All processes have reached this point, so the file exists; a network file system may show it late.
    for wait in _LATE:
        if file.exists():
            break
        time.sleep(wait)
    found = multihost_utils.process_allgather(np.array([file.exists()])).ravel()
    if jax.process_index() == 0:
        file.unlink()
    if not found.all():
        others = ", ".join(str(index) for index, one in enumerate(found) if not one)
        raise ArgumentError(
            f"--checkpoint {folder}: in processes {others} it is another folder than in process 0 (here it is "
            f"{folder.absolute()}): give the full path of one that all hosts share"
        )


def _attempt(path: Path, **item: Any) -> tuple[str, Any]:
    """Read one item of a checkpoint; returns (why reading fails in this or another process, or "", and the item)."""
    # Each process reads by itself: if orbax made the processes wait for each other, one that fails would block all others.
    alone = MultiprocessingOptions(primary_host=None, active_processes={jax.process_index()})
    why, found = "", None
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone) as reader:
        try:
            found = reader.restore(path, args=ocp.args.Composite(**item))[next(iter(item))]
        except Exception as error:  # for damaged files orbax raises a plain Exception
            _ignore_leftovers()
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return (why, found) if all_agree(not why) else (why or "another process cannot read it", None)


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _is_whole(about: Any) -> bool:
    """Whether the data matches the digest that was saved with it."""
    return isinstance(about, dict) and about.get("digest") == _digest({name: about[name] for name in about if name != "digest"})


def _ignore_leftovers() -> None:
    """Suppress what orbax's coroutines print if an array cannot be read: a page per other array, hiding the warning."""
    before = sys.unraisablehook

    def told(about: Any) -> None:
        code = getattr(about.object, "cr_code", None)
        if code is None or "orbax" not in Path(code.co_filename).parts:
            before(about)

    if getattr(before, "__qualname__", "") != told.__qualname__:
        sys.unraisablehook = told


def _free(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}{number}") for number in range(2, 1000))
    return next(one for one in (path, *numbered) if not one.exists())


def checksums(state: Any) -> dict[str, int]:
    """A number for each array, which changes with any of the array's elements and does not depend on the mesh.

    Each element's bits and position are mixed by the finalizer of MurmurHash3, a bijection, and summed modulo 2³². A sum of
    integers does not depend on its order. Several changes at once are missed with a probability of 2⁻³².

    >>> one, other = (checksums({"x": jnp.array(x)}) for x in ([1.0, 2.0], [2.0, 1.0]))
    >>> one, one == other
    ({'x': 945941075}, False)
    """
    leaves = jax.tree.leaves_with_path(state)
    sums = jax.jit(lambda arrays: [_checksum(array) for array in arrays])([leaf for _, leaf in leaves])
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {name: int(value) for name, value in zip(names, sums, strict=True)}


def _checksum(array: jax.Array) -> jax.Array:
    if is_on_host(array):  # as under rj.offload_optimizer; sums are computed on the device
        array = jax.device_put(array, jax.memory.Space.Device)
    width = array.dtype.itemsize
    # An element of eight bytes becomes two numbers, in a new dimension.
    bits = jax.lax.bitcast_convert_type(array, jnp.uint32 if width >= 4 else f"uint{8 * width}").astype(jnp.uint32)
    place, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for dimension in reversed(range(bits.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dimension) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[dimension]
    mixed = bits ^ (place * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
