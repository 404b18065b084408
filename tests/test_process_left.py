"""A process that works for a caller ends with the caller, however that ends."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_jax.hardware import target
from remat_jax.memory.compile import compiler
from remat_jax.memory.compile.exporting import export_step
from remat_jax.step import TrainingStep

ROOT = pathlib.Path(__file__).resolve().parents[1]


def endless(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] > -1, lambda c: (c[0] * 0 + 1, jnp.sin(c[1])), (0, x))[1]


def slow_to_compile(x: Any) -> Any:
    for layer in range(400):
        x = jnp.sin(x @ x.T @ x) * (layer + 1.0) + x
    return x


@pytest.mark.parametrize("work", ["run", "compile"])
def test_a_caller_that_is_gone_when_the_child_has_started_is_seen(tmp_path: pathlib.Path, work: str) -> None:
    step = endless if work == "run" else slow_to_compile
    path = tmp_path / "program"
    path.write_bytes(
        export_step("k", TrainingStep(step, (jax.ShapeDtypeStruct((64, 32), jnp.float32),), ()), target("cpu")).blob
    )
    program = {"key": "k", "path": str(path), "donated": [], "mesh": None, "compiler_options": {}}
    request = {"key": "k", "platform": "cpu", "topology": None, "folder": str(tmp_path)}
    request |= {"program": program} if work == "run" else {"programs": [program]}
    none_such = {"parent": 0, "idle_seconds": 60.0}  # as where the parent has died: the child's is another one then
    done = subprocess.run(
        [sys.executable, "-P", str(compiler.CHILD)],
        input=json.dumps(request | none_such),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert (done.returncode, done.stdout) == (1, "")


CALLER = """
import jax, jax.numpy as jnp
from remat_jax.memory.compile import devices
from tests.test_process_left import endless, export_step, TrainingStep, target

devices.PLATFORM = "cpu"
program = export_step("k", TrainingStep(endless, (jax.ShapeDtypeStruct((8,), jnp.float32),), ()), target("cpu"))
devices.measured_peak(program, 600.0)
"""


def is_running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def seconds_of_work(pid: int) -> float:
    words = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="looks for the child in /proc")
def test_what_runs_on_a_device_ends_with_a_caller_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    caller = subprocess.Popen([sys.executable, "-c", CALLER], env=environment)
    children: list[int] = []
    try:
        while not children and caller.poll() is None:
            time.sleep(0.05)
            lists = pathlib.Path(f"/proc/{caller.pid}/task").glob("*/children")
            children = [int(pid) for listing in lists for pid in listing.read_text().split()]
        (child,) = children
        while seconds_of_work(child) < 3 and is_running(child):  # JAX is imported, and the step runs
            time.sleep(0.1)
        assert is_running(child)
        caller.kill()
        caller.wait()
        deadline = time.monotonic() + 30
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not is_running(child)
    finally:
        caller.kill()
        caller.wait()
        for pid in filter(is_running, children):
            os.kill(pid, signal.SIGKILL)


JOB = """
import os, sys
import jax, jax.numpy as jnp
import remat_jax as rj

def job():
    return rj.Workload(block, jax.ShapeDtypeStruct((4,), jnp.float32), (), block)

@rj.block
def block(w):
    return jnp.sin(jnp.sin(w)).sum()
"""
TRAINED = """
loss = rj.checkpoint_blocks(lambda w: block(w), {block: "full"})
jnp.ones(3).sum()
for compiles in (False, True):
    child = os.fork()
    if child == 0:
        if compiles:
            rj.measure(job(), "full", "cpu")
        for size in (3, 4):
            jax.eval_shape(jax.jit(jax.grad(loss)), jax.ShapeDtypeStruct((size,), jnp.float32))
        os._exit(0)
    os.waitpid(child, 0)
jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((5,), jnp.float32))
"""


def fresh(code: str, path: pathlib.Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-S", "-c", f"import sys; sys.path += {sys.path!r}\n{JOB}{code}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd="/")
    return done.stdout + done.stderr


def test_a_process_that_was_forked_after_jax_had_started_is_told_once() -> None:
    """A compilation in it would wait for ever. The process itself, which was not forked, gets no warning."""
    assert fresh(TRAINED, ROOT).count("RematWarning: this process was forked after JAX had started") == 2
