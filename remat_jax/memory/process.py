"""Asking a process of its own: a compiler that aborts, hangs or runs out of memory does so there, and is an error here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat_jax import compat
from remat_jax.errors import CompileError
from remat_jax.hardware import Target
from remat_jax.memory.scratch import full_disk

_OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED",
    "out of memory",
    "bad_alloc",
    "annot allocate memory",
    "MemoryError",
    "Unable to allocate",
    "failed to map segment",  # no room for a library
    "pthread_create",  # no room for a thread's stack
    "can't start new thread",
)


@dataclass(frozen=True)
class Question:
    """What a child is asked.

    Attributes:
      child: the script, which reads `request` as JSON on standard input, with the process that asks as `parent`, and prints one
        JSON object for each of `keys`.
      doing: what it does, for error messages, such as `compiling for target='h200'`.
      environment: of the process.
      timeout: seconds for all keys together.
      log: a file for what the child says on standard error.
      who: who refuses a key, for error messages.
      left: what earlier processes of the same call have left of these seconds; None for all of them.
    """

    child: Path
    request: dict[str, Any]
    keys: Sequence[str]
    doing: str
    environment: dict[str, str]
    timeout: float
    log: Path
    who: str = "the compiler"
    left: float | None = None


class Children:
    """The processes of one call, which end where it does: who interrupts a call does not wait for a compiler.

    As a context it ends them when an error passes through it.
    """

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.end()

    def end(self) -> None:
        """Kill those that run, and those that are started from now on."""
        with self._lock:
            self._ended = True
            for child in self._running:
                _kill(child)

    @contextlib.contextmanager
    def running(self, child: subprocess.Popen[str]) -> Iterator[None]:
        """While the child is one of them; it must not have been waited for before the end."""
        with self._lock:
            self._running.add(child)
            if self._ended:
                _kill(child)
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(child)


def ask(
    question: Question, on_done: Callable[[str], None] | None = None, children: Children | None = None
) -> dict[str, dict[str, Any]]:
    """The child's answer for each key; `on_done` is told of each as it comes, and `children` may end it.

    Raises:
      CompileError: the child refused a key, died, hung or ran out of memory, with what it said last.
    """
    with question.log.open("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(question.child),
            ],  # -P: the modules beside the script must not hide others of their names
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=question.environment,
            text=True,
            start_new_session=True,
        )
        alarm = _Alarm(child, question.timeout if question.left is None else question.left)
        try:
            with (children or Children()).running(child):
                answers, failed = _converse(child, question.request, on_done)
            status = child.wait()
        finally:
            alarm.cancel()
            if child.poll() is None:
                _kill(child)
                child.wait()
            for pipe in (child.stdout, child.stdin):
                with contextlib.suppress(BrokenPipeError):
                    assert pipe is not None
                    pipe.close()
        errors.seek(0)
        said = errors.read().strip()
    _raise_for(question, answers, failed, status, alarm.expired, said)
    return answers


def _converse(
    child: subprocess.Popen[str], request: dict[str, Any], on_done: Callable[[str], None] | None
) -> tuple[dict[str, dict[str, Any]], str]:
    """What the child answers by key, and the first key that it refused with its reason."""
    assert child.stdin is not None and child.stdout is not None
    # A broken pipe: the child died at once, and its exit status says why.
    with contextlib.suppress(BrokenPipeError):
        json.dump(request | {"parent": os.getpid()}, child.stdin)
        child.stdin.close()
    answers: dict[str, dict[str, Any]] = {}
    failed = ""
    for line in child.stdout:
        answer = _answer(line)
        if answer is None:
            continue
        if "error" in answer:
            failed = failed or f"{answer['key']}: {answer['error']}"
            continue
        answers[answer["key"]] = answer
        if on_done is not None:
            on_done(answer["key"])
    return answers, failed


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


def _raise_for(question: Question, answers: dict[str, Any], failed: str, status: int, expired: bool, said: str) -> None:
    missing = [key for key in question.keys if key not in answers]
    if expired and missing:
        raise CompileError(
            f"{question.doing}: not done after timeout={question.timeout:g} s, stopped at policy={missing[0]!r}. "
            "Give a longer timeout, or scan the layers so that there is less to compile."
        )
    if failed:
        remedy = f". {compat.CUDNN_REMEDY}" if compat.wants_cudnn(failed) else _remedy(failed, status)
        raise CompileError(f"{question.doing}: {question.who} refused policy={failed[:2000]}{remedy}")
    if missing:
        reason = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        raise CompileError(
            f"{question.doing}: the process ended with {reason} at policy={missing[0]!r}. "
            f"It said: {_shortened(said) or 'nothing'}{_remedy(said, status)}"
        )


def _shortened(said: str) -> str:
    """The first and the last that was said: an abort gives its reason before a long stack, an exception after it."""
    return said if len(said) <= 1500 else f"{said[:500]}\n…\n{said[-1000:]}"


def _remedy(said: str, status: int) -> str:
    """What to do, as the end of a message, where the reason is known."""
    if remedy := full_disk(said):
        return remedy
    if any(word in said for word in _OUT_OF_MEMORY):
        return ". It ran out of memory: give it more (ulimit -v, the container's limit), or compile fewer policies at once"
    if status == -signal.SIGKILL:
        return ". It ran out of memory, or was killed from outside: look at the memory that is free"
    if status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
        return ". A compiler ends so where it may not have more memory (ulimit -v), or by a fault of its own"
    return ""


class _Alarm:
    """Kills the child when its time is up, and remembers that it did."""

    def __init__(self, child: subprocess.Popen[str], seconds: float) -> None:
        self.expired = False
        self._child = child
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        # What it started may hold the pipe after it: the group is ended, whether or not the child is.
        self.expired = True
        _kill(self._child)

    def cancel(self) -> None:
        self._timer.cancel()


def compiler_environment(target: Target) -> dict[str, str]:
    """The environment of a process that compiles for `target` without touching a GPU.

    Raises:
      CompileError: `XLA_FLAGS` names a file that cannot be read.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["JAX_ENABLE_X64"] = "1"  # the exported program carries its own dtypes; without this JAX would narrow them
    if target.kind == "gpu":
        environment |= compat.GPU_COMPILER_ENVIRONMENT
        environment["XLA_FLAGS"] = compat.xla_flags(compat.GPU_COMPILER_FLAGS)
    elif target.devices > 1:
        environment["XLA_FLAGS"] = compat.xla_flags(f"--xla_force_host_platform_device_count={target.devices}")
    return environment
