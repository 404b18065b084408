"""Child processes for the compiler: if it aborts, hangs or runs out of memory, the child dies, and this process raises."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from remat_jax import compat
from remat_jax.errors import CompileError
from remat_jax.hardware import Target
from remat_jax.memory.compile.scratch import full_disk

ENVIRONMENT = ("JAX_", "XLA_", "TF_", "CUDA_", "NVIDIA_")
"""The prefixes of environment variables that affect a compiler's answer."""

IDLE_SECONDS, MOST_IDLE = 30.0, 4
"""The seconds that a child waits for another question, holding about 500 MB, and the most waiting children."""

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
    """A question to a child process.

    Attributes:
      child: the script. It reads `request` as a line of JSON on standard input, with this process's id as `parent`, and prints
        one JSON object for each of `keys`.
      doing: the activity for error messages, such as `compiling for target='h200'`.
      environment: the child's environment variables.
      timeout: seconds for all keys together.
      who: the program that refuses a key, for error messages.
      left: the seconds left by earlier processes of the same call; None for all of `timeout`.
      again: whether the child prints `{"done": true}` at the end and waits for another question, for at most `IDLE_SECONDS`.
        Starting a child is most of the time for a small program.
    """

    child: Path
    request: dict[str, Any]
    keys: Sequence[str]
    doing: str
    environment: dict[str, str]
    timeout: float
    who: str = "the compiler"
    left: float | None = None
    again: bool = False


class Children:
    """The processes of one call, which end with the call: Ctrl-C kills the compile processes.

    Used as a context manager, it ends the processes when an error leaves the context.
    """

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), False
        self._running: set[_Child] = set()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.end()

    def end(self) -> None:
        """Kill the running processes, and all that are started later."""
        with self._lock:
            self._ended = True
            for child in self._running:
                child.kill()

    @contextlib.contextmanager
    def running(self, child: _Child) -> Iterator[None]:
        """A context in which the child is a running process; the child must not be waited for inside."""
        with self._lock:
            self._running.add(child)
            if self._ended:
                child.kill()
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(child)


def ask(
    question: Question, on_done: Callable[[str], None] | None = None, children: Children | None = None
) -> dict[str, dict[str, Any]]:
    """The child's answer for each key. `on_done` is called for each answer as it comes; `children` may end the child.

    Raises:
      CompileError: the child refused a key, died, hung or ran out of memory; the message has its last output.
    """
    child = _idle.take(question) or _Child.started(question)
    alarm = _Alarm(child, question.timeout if question.left is None else question.left)
    waits = False
    try:
        with (children or Children()).running(child):
            answers, failed, waits = _converse(child, question, on_done)
        status = 0 if waits else child.process.wait()
        said = child.said()
    finally:
        alarm.cancel()
        if waits and not child.killed:
            _idle.give_back(child)
        else:
            child.end()
    _raise_for(question, answers, failed, status, alarm.expired, said)
    return answers


def _converse(
    child: _Child, question: Question, on_done: Callable[[str], None] | None
) -> tuple[dict[str, dict[str, Any]], str, bool]:
    """The child's answers by key, the first refused key with its reason, and whether the child waits for more."""
    source, sink = child.process.stdout, child.process.stdin
    assert source is not None and sink is not None
    # A broken pipe means that the child died at once; its exit status tells why.
    with contextlib.suppress(BrokenPipeError):
        sink.write(json.dumps(question.request | {"parent": os.getpid()}) + "\n")
        sink.flush()
        if not question.again:
            sink.close()
    answers: dict[str, dict[str, Any]] = {}
    failed = ""
    for line in source:
        answer = _answer(line)
        if answer is None:
            continue
        if "key" not in answer:
            return answers, failed, True
        if "error" in answer:
            failed = failed or f"{answer['key']}: {answer['error']}"
            continue
        answers[answer["key"]] = answer
        if on_done is not None:
            on_done(answer["key"])
    return answers, failed, False


def _answer(line: str) -> dict[str, Any] | None:
    """The child's answer in a line; None for output of a library."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and ("key" in answer or "done" in answer) else None


class _Child:
    """A process that answers questions of one `kind`."""

    def __init__(self, process: subprocess.Popen[str], errors: TextIO, kind: tuple[Any, ...]) -> None:
        self.process, self.kind, self.killed, self.waits_since = process, kind, False, 0.0
        self._errors = errors

    @classmethod
    def started(cls, question: Question) -> _Child:
        """A new child for a question."""
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            # -P: the modules beside the script must not hide others of their names.
            [sys.executable, "-P", str(question.child)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=question.environment,
            text=True,
            start_new_session=True,
        )
        return cls(process, errors, _kind(question))

    def said(self) -> str:
        """Its standard error for the last question."""
        self._errors.seek(0)
        said = self._errors.read().strip()
        self._errors.seek(0)
        self._errors.truncate()
        return said

    def kill(self) -> None:
        """Kill the child and the processes started by the compiler: together they are one process group."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the child if it runs, and close its pipes and files."""
        if self.process.poll() is None:
            self.kill()
            self.process.wait()
        for file in (self.process.stdout, self.process.stdin, self._errors):
            with contextlib.suppress(BrokenPipeError):
                assert file is not None
                file.close()


def _kind(question: Question) -> tuple[Any, ...]:
    """The kind of a question: the script and all settings that affect the answer. One process can answer all of one kind."""
    relevant = {name: value for name, value in question.environment.items() if name.startswith(ENVIRONMENT)}
    return str(question.child), tuple(sorted(relevant.items()))


class _Idle:
    """Children that wait for another question."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Child] = []

    def take(self, question: Question) -> _Child | None:
        """A waiting child for questions of this kind; children that have waited too long are ended."""
        if not question.again:
            return None
        kind, now = _kind(question), time.monotonic()
        with self._lock:
            # A child exits by itself only later, so a child taken here is alive.
            for child in [
                one for one in self._waiting if now - one.waits_since > IDLE_SECONDS or one.process.poll() is not None
            ]:
                self._waiting.remove(child)
                child.end()
            found = next((child for child in reversed(self._waiting) if child.kind == kind), None)
            if found is not None:
                self._waiting.remove(found)
            return found

    def give_back(self, child: _Child) -> None:
        """Keep a waiting child; if there are too many, end the one that has waited longest."""
        child.waits_since = time.monotonic()
        with self._lock:
            self._waiting.append(child)
            if len(self._waiting) > MOST_IDLE:
                self._waiting.pop(0).end()

    def forget(self) -> None:
        """Drop the children without ending them: after a fork they belong to the parent process."""
        self._lock, self._waiting = threading.Lock(), []

    def end(self) -> None:
        """End all waiting children."""
        with self._lock:
            for child in self._waiting:
                child.end()
            self._waiting.clear()


_idle = _Idle()


def end_idle() -> None:
    """End the waiting compile processes, so that the operating system counts their resource use."""
    _idle.end()


atexit.register(end_idle)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.forget)


def _raise_for(question: Question, answers: dict[str, Any], failed: str, status: int, expired: bool, output: str) -> None:
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
            f"{question.doing}: the compile process ended with {reason} at policy={missing[0]!r}. Its output: "
            f"{_shortened(output) or 'none'}{_remedy(output, status)}"
        )


def _shortened(output: str) -> str:
    """The beginning and the end of an output: an abort gives its reason before a long stack, an exception after it."""
    return output if len(output) <= 1500 else f"{output[:500]}\n…\n{output[-1000:]}"


def _remedy(output: str, status: int) -> str:
    """The remedy at the end of a message, if the reason is known."""
    if remedy := full_disk(output):
        return remedy
    if any(word in output for word in _OUT_OF_MEMORY):
        return ". It ran out of memory: give it more (ulimit -v, the container's limit), or compile fewer policies at once"
    if status == -signal.SIGKILL:
        return ". It ran out of memory, or another process killed it: check how much memory is free"
    if status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
        return ". Either the compiler reached a memory limit (ulimit -v), or it has a bug"
    return ""


class _Alarm:
    """Kills the child when its time is up, and remembers that it did."""

    def __init__(self, child: _Child, seconds: float) -> None:
        self.expired = False
        self._child = child
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        # Its own child processes may keep the pipe open: kill the group even if the child has ended.
        self.expired = True
        self._child.kill()

    def cancel(self) -> None:
        self._timer.cancel()
        self._timer.join()


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
