"""Compiles programs for a target in child processes, and reads their sizes, live buffers and schedule."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from remat_jax.hardware import Target
from remat_jax.memory.compile import cache
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.options import Kernels
from remat_jax.memory.compile.process import Children, NotDoneError, Question, ask, scratch
from remat_jax.memory.compile.sizes import Sizes

MOST_CHILDREN = 4
"""The largest number of compile processes at a time; each compiler needs about 1 GB."""

CHILD = Path(__file__).with_name("child.py")


def compile_programs(
    programs: Sequence[ExportedProgram],
    target: Target,
    *,
    timeout: float,
    compiler_options: dict[str, Any] | None = None,
    memory_limit: int | None = None,
    on_done: Callable[[str], None] | None = None,
    kernels: Kernels | None = None,
    children: Children | None = None,
    is_enough: Callable[[str], bool] = lambda key: False,
) -> dict[str, Sizes]:
    """A dict from each program's key to its `Sizes` on `target`, from the cache or compiled in parallel processes.

    Args:
      timeout: the limit in seconds for all programs together. Sizes that are known although a compilation was ended are
        returned (`Sizes.unfinished`), and cached for when they are enough.
      memory_limit: a device memory limit for XLA in bytes (`options.py`).
      on_done: called with each key when its sizes are known; perhaps in another thread.
      kernels: compiled GPU kernels to reuse, from earlier calls for the same target with the same options.
      children: this call adds its processes to `children`, so that the caller can kill them. If this call runs several
        processes and one of them fails, all of `children` are killed.
      is_enough: asked each second, in other threads, whether the sizes of the program with this key are enough. If so, its
        compilation is ended once they are known (`Backend.knows_memory`).
    """
    backend = backend_of(target)
    backend.require(target)
    tell = on_done or (lambda key: None)
    limits = {program.key: backend.limit_options(memory_limit, target, program.held_bytes) for program in programs}
    options = {key: (compiler_options or {}) | limit for key, limit in limits.items()}
    digests, unfinished = (
        {program.key: cache.digest(program, target, options[program.key] | more, CHILD) for program in programs}
        for more in ({}, {"unfinished": True})
    )

    def enough(key: str) -> bool:
        return all(is_enough(other) for other, digest in digests.items() if digest == digests[key])

    sizes: dict[str, Sizes] = {}
    new: dict[str, ExportedProgram] = {}
    for program in programs:
        digest = digests[program.key]
        cached = cache.read(digest, target, Sizes)
        if cached is None and enough(program.key):
            cached = cache.read(unfinished[program.key], target, Sizes)
        if cached is not None:
            sizes[digest] = cached
            tell(program.key)
        else:
            new.setdefault(digest, program)  # equal programs are compiled once
    if new:
        for key, compiled in _compiled(list(new.values()), target, timeout, options, tell, kernels, children, enough):
            sizes[digests[key]] = replace(compiled, limit_options=limits[key])
            cache.write((unfinished if compiled.unfinished else digests)[key], target, sizes[digests[key]])
        for key, digest in digests.items():
            if digest in new and new[digest].key != key:
                tell(key)
    return {key: sizes[digest] for key, digest in digests.items()}


def result_shapes(program: ExportedProgram, target: Target, *, timeout: float) -> Sequence[tuple[int, ...]] | None:
    """The shapes of the results of `program` on each device of a mesh, as the compiler shards them.

    None if the compiler refuses the program because it does not fit (`Sizes.refusal`), or if the shapes cannot be read.
    """
    backend = backend_of(target)
    backend.require(target)
    digest = cache.digest(program, target, {"results": True}, CHILD)
    shapes = cache.read(digest, target, tuple[tuple[int, ...], ...])
    if shapes is None:
        with scratch() as folder:
            begun = folder / "0"
            entry, unheard = _entry(begun, program, target, {}), lambda answer: None
            answers = _answers([entry], target, timeout, folder, unheard, Kernels(folder), None, lambda key: True)
            answer = answers[program.key]
            results = backend.unfinished_results(begun) if _ENDED in answer else answer["results"]
            if "refusal" in answer or results is None:
                return None
        shapes = tuple(map(tuple, results))
        cache.write(digest, target, shapes)
    return shapes


def _compiled(
    programs: Sequence[ExportedProgram],
    target: Target,
    timeout: float,
    options: Mapping[str, dict[str, Any]],
    tell: Callable[[str], None],
    kernels: Kernels | None,
    children: Children | None,
    is_enough: Callable[[str], bool],
) -> Iterator[tuple[str, Sizes]]:
    """Each program's key and sizes; after a failure or the timeout, those that are known, then the error.

    There is no error if only compilations were ended whose sizes are known (`Sizes.unfinished`).
    """
    backend = backend_of(target)
    with scratch() as folder:
        folders = {program.key: folder / str(index) for index, program in enumerate(programs)}
        entries = [_entry(folders[program.key], program, target, options[program.key]) for program in programs]
        answers: dict[str, dict[str, Any]] = {}

        def arrived(answer: dict[str, Any]) -> None:
            answers[answer["key"]] = answer
            tell(answer["key"])

        try:
            answers.update(_answers(entries, target, timeout, folder, arrived, kernels or Kernels(folder), children, is_enough))
        except NotDoneError:
            late = [key for key in folders if key not in answers]
            for key in filter(lambda key: backend.knows_memory(folders[key]), late):
                arrived(_ended(key))
            if not answers.keys() >= folders.keys():
                raise
        finally:
            for program in programs:
                if (answer := answers.get(program.key)) is not None:
                    files = folders[program.key], program, target
                    yield program.key, backend.read_unfinished(*files) if _ENDED in answer else backend.read(answer, *files)


_ENDED = "ended"


def _ended(key: str) -> dict[str, Any]:
    """In place of the answer of the compile process: its compilation was ended once the memory was known."""
    return {"key": key, _ENDED: True}


def _entry(folder: Path, program: ExportedProgram, target: Target, options: dict[str, Any]) -> dict[str, Any]:
    """The request for one program; the compile process writes its files to `folder`."""
    folder.mkdir()
    path = folder / "program.jaxexport"
    path.write_bytes(program.blob)
    entry = {"key": program.key, "path": str(path), "donated": program.donated, "mesh": program.mesh}
    asked = backend_of(target).entry(folder)
    return entry | asked | {"compiler_options": asked["compiler_options"] | options}


def _answers(
    entries: Sequence[dict[str, Any]],
    target: Target,
    timeout: float,
    folder: Path,
    arrived: Callable[[dict[str, Any]], None],
    kernels: Kernels,
    children: Children | None = None,
    is_enough: Callable[[str], bool] = lambda key: False,
) -> dict[str, dict[str, Any]]:
    """The answer of the compile process for each entry; `_ended` if the sizes were enough (`compile_programs`)."""
    side_by_side = max(1, min(len(entries), os.cpu_count() or 1, MOST_CHILDREN))
    backend = backend_of(target)
    environment, for_all = backend.environment(target), backend.call_options(folder)
    ends = time.monotonic() + timeout
    running, answered = children or Children(), set[str]()
    # A process compiles one part of the entries. What may be ended is a part of its own, so that nothing else ends with it, and
    # comes first, because it takes seconds.
    alone = [entry for entry in entries if backend.knows_memory_early and is_enough(entry["key"])]
    others = [entry for entry in entries if entry not in alone]
    parts = [[entry] for entry in alone] + [part for number in range(side_by_side) if (part := others[number::side_by_side])]

    def told(answer: dict[str, Any]) -> None:
        answered.add(answer["key"])
        arrived(answer)

    def is_known(entry: Mapping[str, Any]) -> bool:
        return is_enough(entry["key"]) and backend.knows_memory(Path(entry["path"]).parent)

    def asked(part: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        def enough() -> bool:
            late = [entry for entry in part if entry["key"] not in answered]
            return bool(late) and all(map(is_known, late))

        left = min(timeout, max(1.0, ends - time.monotonic()))
        programs = [entry | {"compiler_options": {**for_all, **options, **entry["compiler_options"]}} for entry in part]
        request = {"programs": programs, "topology": backend.topology(target), "folder": str(folder)}
        doing, keys = f"compiling for target={target.name!r}", [entry["key"] for entry in part]
        limits: dict[str, Any] = {"left": left, "enough": enough}
        answers = ask(Question(CHILD, request, keys, doing, environment, timeout, again=True, **limits), told, running)
        for key in keys:
            if key not in answers:
                answers[key] = _ended(key)
                told(answers[key])
        return answers

    def run(part: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return backend.ask(functools.partial(asked, part), kernels)

    if side_by_side == 1:
        return {key: answer for part in parts for key, answer in run(part).items()}
    with ThreadPoolExecutor(side_by_side) as pool, running:
        futures = [pool.submit(run, part) for part in parts]
        ended, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        # Read finished parts first, so that a failure is raised at once and the other processes are killed.
        return {key: answer for future in (*ended, *futures) for key, answer in future.result().items()}
