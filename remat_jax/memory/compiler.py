"""Compiling for a target in a process of its own, so that a compiler that aborts or hangs does not end the caller's session."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax import export

from remat_jax import compat
from remat_jax.errors import CompileError
from remat_jax.hardware import Target
from remat_jax.memory.live import LiveBuffer, live_at_peak, named_arguments
from remat_jax.workload import Step

MOST_CHILDREN = 4
"""Compiling processes at a time: each holds a compiler of its own, about 1 GB."""

CHILD = Path(__file__).with_name("compile_child.py")


@dataclass(frozen=True)
class Program:
    """A training step, exported for a platform.

    Attributes:
      key: what the caller knows it by.
      blob: the serialised program.
      donated: the flat arguments whose buffers it may reuse.
      arguments: what each flat argument is called.
    """

    key: str
    blob: bytes
    donated: tuple[int, ...]
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """What the compiler reports, in bytes; `host_*` live in host memory. `live` is what is on the device at the peak."""

    temp: int
    argument: int
    output: int
    alias: int
    host_temp: int
    host_argument: int
    host_output: int
    host_alias: int
    live: tuple[LiveBuffer, ...] = ()

    @property
    def device(self) -> int:
        """Arguments + outputs − aliased + temp."""
        return self.argument + self.output - self.alias + self.temp

    @property
    def host(self) -> int:
        """The same in host memory."""
        return self.host_temp + self.host_argument + self.host_output - self.host_alias


def export_step(key: str, step: Step, target: Target) -> Program:
    """`step` lowered for the platform of `target`; nothing is compiled or allocated here."""
    leaves, treedef = jax.tree.flatten(step.arguments)
    donated: list[int] = []
    start = 0
    for index, argument in enumerate(step.arguments):
        count = len(jax.tree.leaves(argument))
        if index in step.donate_argnums:
            donated += range(start, start + count)
        start += count

    def flat(*values: Any) -> list[Any]:
        return jax.tree.leaves(step.function(*jax.tree.unflatten(treedef, values)))

    platform = "cuda" if target.kind == "gpu" else "cpu"
    # Moving an array to the host is a custom call that JAX does not promise to keep stable; it is compiled at once.
    checks = [export.DisabledSafetyCheck.custom_call("annotate_device_placement")]
    exported = export.export(jax.jit(flat, keep_unused=True), platforms=[platform], disabled_checks=checks)(*leaves)
    return Program(key, bytes(exported.serialize()), tuple(donated), tuple(_argument_names(step)))


def _argument_names(step: Step) -> list[str]:
    found = []
    for index, argument in enumerate(step.arguments):
        name = step.names[index] if step.names else f"argument {index}"
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(argument)]
        found += [f"{name}/{path}" if path else name for path in paths]
    return found


def compile_programs(
    programs: Sequence[Program],
    target: Target,
    *,
    timeout: float,
    compiler_options: dict[str, Any] | None = None,
    on_done: Callable[[str], None] | None = None,
) -> dict[str, Sizes]:
    """The compiler's sizes of each program on `target`, by key; several are compiled side by side, one process for each core.

    Args:
      timeout: seconds for all of them together.
      on_done: told each key as its program is compiled.

    Raises:
      CompileError: the compiler failed, aborted, hung or ran out of memory, with what it said last.
      UnsupportedError: the target is a GPU and its compiler is not installed.
    """
    if target.kind == "gpu":
        compat.require_gpu_compiler()
    with tempfile.TemporaryDirectory(prefix="remat_jax_") as folder:
        entries = []
        for index, program in enumerate(programs):
            path = Path(folder) / f"{index}.jaxexport"
            path.write_bytes(program.blob)
            entries.append(
                {
                    "key": program.key,
                    "path": str(path),
                    "donated": program.donated,
                    "compiler_options": (compiler_options or {}) | (_dump_to(folder, index) if target.kind == "gpu" else {}),
                }
            )
        answers = _run_children(entries, target, timeout, Path(folder), on_done)
        live = {one.key: _live(Path(folder, f"dump_{index}"), one) for index, one in enumerate(programs)}
    return {key: Sizes(**sizes, live=live[key]) for key, sizes in answers.items()}


def _run_children(
    entries: Sequence[dict[str, Any]], target: Target, timeout: float, folder: Path, on_done: Callable[[str], None] | None
) -> dict[str, dict[str, int]]:
    """What the compiling processes answer together; the first failure is raised once all have ended."""
    side_by_side = max(1, min(len(entries), os.cpu_count() or 1, MOST_CHILDREN))
    parts = [entries[first::side_by_side] for first in range(side_by_side)]

    def run(number: int) -> dict[str, dict[str, int]]:
        request = {"programs": parts[number], "compiler_description": target.compiler_description}
        return _run_child(request, target, timeout, folder / f"stderr_{number}", on_done)

    if side_by_side == 1:
        return run(0)
    with ThreadPoolExecutor(side_by_side) as pool:
        found = [pool.submit(run, number) for number in range(side_by_side)]
    return {key: sizes for one in found for key, sizes in one.result().items()}


def _dump_to(folder: str, index: int) -> dict[str, Any]:
    """Have XLA write down what it decided; it costs no time that could be measured."""
    return {"xla_dump_to": str(Path(folder, f"dump_{index}")), "xla_dump_hlo_as_text": True}


def _live(dump: Path, program: Program) -> tuple[LiveBuffer, ...]:
    """What is on the device at the peak, arguments by their names; empty where the compiler wrote nothing down."""
    endings = ("gpu_after_optimizations.txt", "-buffer-assignment.txt", "-live-range.txt")
    found = [sorted(dump.glob(f"*{ending}")) for ending in endings]
    if not all(found):
        return ()
    texts = [paths[-1].read_text(encoding="utf-8", errors="replace") for paths in found]
    return tuple(named_arguments(live_at_peak(*texts), program.arguments))


def _run_child(
    request: dict[str, Any], target: Target, timeout: float, log: Path, on_done: Callable[[str], None] | None
) -> dict[str, dict[str, int]]:
    keys = [entry["key"] for entry in request["programs"]]
    with log.open("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],  # -P: the modules beside the script must not hide others of their names
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(target),
            text=True,
            start_new_session=True,
        )
        assert child.stdin is not None and child.stdout is not None
        timer = _Alarm(child, timeout)
        answers: dict[str, dict[str, int]] = {}
        failed = ""
        try:
            try:
                json.dump(request, child.stdin)
                child.stdin.close()
            except BrokenPipeError:
                pass  # the child died at once; its exit status says why
            for line in child.stdout:
                answer = _answer(line)
                if answer is None:
                    continue
                if "error" in answer:
                    failed = failed or f"{answer['key']}: {answer['error']}"
                    continue
                answers[answer["key"]] = answer["sizes"]
                if on_done is not None:
                    on_done(answer["key"])
            status = child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:
                _kill(child)
                child.wait()
            child.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
        errors.seek(0)
        said = errors.read()[-1500:].strip()
    _raise_for(keys, answers, failed, status, timer.expired, timeout, target, said)
    return answers


def _answer(line: str) -> dict[str, Any] | None:
    """What the child says in a line; None for what some library prints there."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "key" in answer else None


def _kill(child: subprocess.Popen[str]) -> None:
    """End the child and the processes that the compiler has started: they are a process group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _raise_for(
    keys: list[str],
    answers: dict[str, Any],
    failed: str,
    status: int,
    expired: bool,
    timeout: float,
    target: Target,
    said: str,
) -> None:
    where = f"compiling for target={target.name!r}"
    missing = [key for key in keys if key not in answers]
    if expired:
        raise CompileError(
            f"{where}: not done after timeout={timeout:g} s, stopped at policy={missing[0] if missing else '?'!r}. "
            "Give a longer timeout, or scan the layers so that there is less to compile."
        )
    if failed:
        raise CompileError(f"{where}: the compiler refused policy={failed[:2000]}")
    if missing:
        reason = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        hint = " (out of memory, or killed from outside)" if status == -signal.SIGKILL else ""
        raise CompileError(
            f"{where}: the compiling process ended with {reason}{hint} at policy={missing[0]!r}. "
            f"It said last: {said or 'nothing'}"
        )


class _Alarm:
    """Kills the child when its time is up, and remembers that it did."""

    def __init__(self, child: subprocess.Popen[str], seconds: float) -> None:
        self.expired = False
        self._child = child
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        if self._child.poll() is None:
            self.expired = True
            _kill(self._child)

    def cancel(self) -> None:
        self._timer.cancel()


def _environment(target: Target) -> dict[str, str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["JAX_ENABLE_X64"] = "1"  # the exported program carries its own dtypes; without this JAX would narrow them
    if target.kind == "gpu":
        environment |= compat.GPU_COMPILER_ENVIRONMENT
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} {compat.GPU_COMPILER_FLAGS}".strip()
    return environment
