"""Starts a process for each row, limits its time and reads its result; a failing process cannot end the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.gpu.job import Job
from benchmarks.record import ROOT


class Told(Protocol):
    """A job that a child reads from its command line."""

    def to_json(self) -> str: ...


def environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment with `extra`, and this repository first on Python's path."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **extra}


def run_child(module: str, job: Told, seconds: float, env: dict[str, str]) -> dict[str, Any]:
    """The JSON object that `python -m module JOB` prints last, or `{"error": …}` if the child fails."""
    command = [sys.executable, "-m", module, job.to_json()]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment(env), stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )
        with child:
            try:
                output, _ = child.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                return {"error": f"not done after {seconds:.0f} s, stopped"}
            finally:
                if child.poll() is None:  # late, or this process was interrupted: the child's own session would outlive it
                    stop(child)
        said.seek(0)
        return read_answer(output, child.returncode, said.read())


def read_answer(output: str, status: int, said: str) -> dict[str, Any]:
    """The JSON object on the last line of `output`, or an error that says how the process ended.

    >>> read_answer("", -9, "")["error"]
    'ended with signal SIGKILL (out of host memory, or killed from outside); it said last: nothing'
    """
    lines = output.strip().splitlines()
    try:
        answer = json.loads(lines[-1])
        if isinstance(answer, dict):
            return answer
    except (IndexError, ValueError):
        pass
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    hint = " (out of host memory, or killed from outside)" if status == -signal.SIGKILL else ""
    return {"error": f"ended with {how}{hint}; it said last: {said.strip()[-800:] or 'nothing'}"}


def stop(child: subprocess.Popen[Any], patience: float = 10.0) -> None:
    """End a child and its processes: first by an interrupt, on which Python cleans up, then by force."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            child.wait()
        return


def answer_with(run: Callable[[Any], dict[str, Any]], read: Callable[[str], Any] = Job.from_json) -> None:
    """The body of a child: run the job of the command line and print one line of JSON, also for an exception."""
    try:
        answer = run(read(sys.argv[1]))
    except Exception as error:
        # Running out of memory and being refused by the compiler are results too.
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"[:1500]}
    print(json.dumps(answer), flush=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that another process appends to; an incomplete last line is left out."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
