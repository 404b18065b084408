"""Child processes for the compiler, and folders for their files.

If the compiler aborts, hangs or runs out of memory, the child process ends, and this process raises an error. A folder is
removed after its compilation. If this process is killed, its folders are removed by the next process that compiles.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import json
import os
import re
import shutil
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

try:
    import fcntl
except ImportError:  # on Windows, leftover folders are not removed
    fcntl = None  # type: ignore[assignment]

ENVIRONMENT = ("JAX_", "XLA_", "TF_", "CUDA_", "NVIDIA_", "LIBTPU_", "TPU_")
"""The prefixes of environment variables that affect the compiled result."""

IDLE_SECONDS, MOST_IDLE = 30.0, 4
"""How many seconds a child may wait for another question, and how many children may wait; each uses about 500 MB of memory."""

_POLL_SECONDS = 1.0
"""How often `Question.enough` is asked."""

_OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED",
    "out of memory",
    "bad_alloc",
    "annot allocate memory",
    "MemoryError",
    "Unable to allocate",
    "failed to map segment",  # no memory for a library
    "pthread_create",  # no memory for a thread's stack
    "can't start new thread",
)
_FULL = {number: os.strerror(number) for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)}
_PREFIX, _LOCK = "remat_jax_compile_", "held"
_NEW, _OLD = 2.0, 24 * 3600.0
"""A folder younger than `_NEW` seconds may not be locked yet. A folder without a lock is removed after `_OLD` seconds."""


@dataclass(frozen=True)
class Question:
    """A question to a child process.

    Attributes:
      child: the script. It reads `request` as a line of JSON on standard input, with `parent`, this process's id, and
        `idle_seconds`, and prints one JSON object for each of `keys`.
      keys: the keys of the programs to compile; for a request to the attached device, its one key.
      doing, who: words for error messages: the activity, and the program that refuses a key.
      timeout, left: the limit in seconds for all keys together, and the seconds of it that remain; None if all remain.
      again: whether the child waits for another question after it prints `{"done": true}`, because starting a process is slow.
      enough: asked each second; once it is true, the child is ended, and what it has answered is returned.
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
    enough: Callable[[], bool] = lambda: False

    @property
    def kind(self) -> tuple[Any, ...]:
        """The script and the relevant environment. One process can answer all questions of the same kind."""
        relevant = {name: value for name, value in self.environment.items() if name.startswith(ENVIRONMENT)}
        return str(self.child), tuple(sorted(relevant.items()))


class Children:
    """The processes of one call. An exception that leaves this context, such as Ctrl-C, kills the processes."""

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), False
        self._running: set[_Child] = set()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.end()

    def end(self) -> None:
        """Kill the running processes, and each process that is added later."""
        with self._lock:
            self._ended = True
            for child in self._running:
                child.kill()

    @contextlib.contextmanager
    def running(self, child: _Child) -> Iterator[None]:
        """A context in which `end` kills the child. The caller must not wait for the child's exit inside the context."""
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
    question: Question, on_done: Callable[[dict[str, Any]], None] | None = None, children: Children | None = None
) -> dict[str, dict[str, Any]]:
    """A dict from key to the child's answer. `on_done` gets each answer when it arrives; `children` can kill the child."""
    child = _idle.take(question) or _Child(question)
    answered = threading.Event()
    watcher = threading.Thread(target=_watch, args=(child, question, answered), daemon=True)
    watcher.start()
    waits = False
    try:
        with (children or Children()).running(child):
            answers, failed, waits = _converse(child, question, on_done)
        status = 0 if waits else child.process.wait()
        output = child.output()
    finally:
        answered.set()
        watcher.join()
        if waits and not child.killed:
            _idle.give_back(child)
        else:
            child.end()
    missing = [] if child.answered_enough else [key for key in question.keys if key not in answers]
    _raise_for(question, missing, failed, status, child.expired, output)
    return answers


def _watch(child: _Child, question: Question, answered: threading.Event) -> None:
    """End the child after the timeout, or once what is known is enough, unless it has answered."""
    ends = time.monotonic() + (question.timeout if question.left is None else question.left)
    while not answered.wait(min(_POLL_SECONDS, max(0.0, ends - time.monotonic()))):
        with contextlib.suppress(Exception):  # else the timeout would be lost with this thread
            child.answered_enough = question.enough()
        if child.answered_enough:
            child.kill()
            return
        if time.monotonic() >= ends:
            child.expire()
            return


def _converse(
    child: _Child, question: Question, on_done: Callable[[dict[str, Any]], None] | None
) -> tuple[dict[str, dict[str, Any]], str, bool]:
    """The answers by key, a text with the first refused key and its reason, and whether the child waits for more questions."""
    source, sink = child.process.stdout, child.process.stdin
    assert source is not None and sink is not None
    # A broken pipe means that the child ended at once; its exit status has the reason.
    with contextlib.suppress(BrokenPipeError):
        # The child exits by itself later than this process stops using it.
        common = {"parent": os.getpid(), "idle_seconds": IDLE_SECONDS + 30.0}
        sink.write(json.dumps(question.request | common) + "\n")
        sink.flush()
        if not question.again:
            sink.close()
    answers: dict[str, dict[str, Any]] = {}
    failed = ""
    for line in source:
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            continue  # a library printed this line
        if "key" not in answer:
            if "done" in answer:
                return answers, failed, question.again
        elif "error" in answer:
            failed = failed or f"{answer['key']}: {answer['error']}"
        else:
            answers[answer["key"]] = answer
            if on_done is not None:
                on_done(answer)
    return answers, failed, False


class _Child:
    """A child process that answers `question`, and later questions of the same kind."""

    def __init__(self, question: Question) -> None:
        self.kind = question.kind
        self.killed = self.expired = self.answered_enough = False
        self.waits_since = 0.0
        self._errors: TextIO = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen(
            # With -P, modules in the script's folder do not shadow other modules of the same name.
            [sys.executable, "-P", str(question.child)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=question.environment,
            text=True,
            start_new_session=True,
        )

    def output(self) -> str:
        """The child's standard error during the last question."""
        self._errors.seek(0)
        output = self._errors.read().strip()
        self._errors.seek(0)
        self._errors.truncate()
        return output

    def kill(self) -> None:
        """Kill the child's process group, which includes the processes that the compiler started."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def expire(self) -> None:
        """Kill the child's process group after the timeout: even if the child has ended, its children may keep a pipe open."""
        self.expired = True
        self.kill()

    def end(self) -> None:
        """Kill the child if it is running, and close its pipes and files."""
        if self.process.poll() is None:
            self.kill()
            self.process.wait()
        for file in (self.process.stdout, self.process.stdin, self._errors):
            with contextlib.suppress(BrokenPipeError):
                assert file is not None
                file.close()


class _Idle:
    """Children that wait for another question."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Child] = []

    def take(self, question: Question) -> _Child | None:
        """A waiting child for a question of this kind, or None. Ends the children that have waited too long."""
        if not question.again:
            return None
        earliest = time.monotonic() - IDLE_SECONDS
        with self._lock:
            for child in list(self._waiting):
                if child.waits_since < earliest or child.process.poll() is not None:
                    self._waiting.remove(child)
                    child.end()
            for child in reversed(self._waiting):
                if child.kind == question.kind:
                    self._waiting.remove(child)
                    return child
        return None

    def give_back(self, child: _Child) -> None:
        """Add a child to the waiting children. If there are too many, end the child that has waited longest."""
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
    """End the waiting compile processes. `resource.RUSAGE_CHILDREN` counts their CPU time and memory only after they end."""
    _idle.end()


atexit.register(end_idle)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.forget)


class NotDoneError(CompileError):
    """The timeout ended a compilation."""


def _raise_for(question: Question, missing: Sequence[str], failed: str, status: int, expired: bool, output: str) -> None:
    if expired and missing and not failed:
        raise NotDoneError(
            f"{question.doing}: not done after timeout={question.timeout:.3g} s, stopped at policy={missing[0]!r}. "
            "Give a longer timeout, or scan the layers so that there is less to compile."
        )
    if failed:
        remedy = f". {compat.CUDNN_REMEDY}" if compat.wants_cudnn(failed) else _remedy(failed, status)
        raise CompileError(f"{question.doing}: {question.who} refused policy={failed[:2000]}{remedy}")
    if missing:
        # An abort prints its reason before a long stack trace; an exception prints its reason after the trace.
        shortened = output if len(output) <= 1500 else f"{output[:500]}\n…\n{output[-1000:]}"
        reason = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        raise CompileError(
            f"{question.doing}: the compile process ended with {reason} at policy={missing[0]!r}. Its output: "
            f"{shortened or 'none'}{_remedy(output, status)}"
        )


def _remedy(output: str, status: int) -> str:
    """The remedy at the end of a message, if the reason is known."""
    if any(word in output for word in _FULL.values()):
        return (
            f". The temporary folder {tempfile.gettempdir()!r} is full, or a file exceeds the size limit (ulimit -f): name "
            "another folder in TMPDIR"
        )
    if "libdevice not found" in output or "version of ptxas" in output:
        return (
            f". The temporary folder {tempfile.gettempdir()!r} is on a file system that runs no programs (noexec), and no CUDA "
            "toolkit is installed: name another folder in TMPDIR"
        )
    if re.search("space[ =]vmem", output):
        return ". A kernel needs more than the memory of the core (VMEM): give the kernel smaller blocks"
    if any(word in output for word in _OUT_OF_MEMORY):
        return (
            ". The process ran out of memory: give it more (ulimit -v, the container's limit), or compile fewer policies at "
            "once"
        )
    if status == -signal.SIGKILL:
        return ". The process ran out of memory, or another process killed it: check how much memory is free"
    if status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
        return ". Either the compiler reached a memory limit (ulimit -v), or it has a bug"
    return ""


# --- folders ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A context with a new folder in the temporary folder, removed at the end of the context."""
    _sweep(tempfile.gettempdir())
    try:
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, open(Path(folder, _LOCK), "w") as held:
            if fcntl:
                fcntl.flock(held, fcntl.LOCK_EX)
            yield Path(folder)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CompileError(f"the program to compile cannot be written ({error}){_remedy(str(error), 0)}") from error


@functools.cache
def _sweep(parent: str) -> None:
    """Remove the folders of processes that have ended: folders whose locks no process holds."""
    for folder in Path(parent).glob(f"{_PREFIX}*") if fcntl else ():
        with contextlib.suppress(OSError):
            # No lock: the owner was killed before it created the lock, or while it removed the folder.
            if not (folder / _LOCK).exists() and time.time() - folder.stat().st_mtime > _OLD:
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError), open(folder / _LOCK, "r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - folder.stat().st_mtime > _NEW:
                shutil.rmtree(folder, ignore_errors=True)
